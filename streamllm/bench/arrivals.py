"""When the requests of an open loop are due: gamma-distributed gaps, rates that rise or fall, bursts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that goes from ``start`` to ``end`` requests a second over the requests of a load,
    by equal differences or by equal factors from one request to the next."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rate(self, progress: float) -> float:
        """Requests a second once this share of the requests has arrived."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def arrival_times(
    count: int, rate: float | Ramp, seed: int, *, burstiness: float = 1.0, burst_size: int = 1
) -> list[float]:
    """When each of ``count`` requests is due, in seconds; the first at 0.

    Args:
        rate: requests a second on average.
        burstiness: the shape of the gaps' gamma distribution, whose mean is the rate's whatever it is. 1 is a
            Poisson process; less is burstier, more is steadier. The gaps' standard deviation is their mean
            divided by its square root.
        burst_size: so many requests arrive together, and the gaps between groups are as many times longer.
    """
    rng = random.Random(f"arrivals {seed}")
    num_groups = -(-count // burst_size)
    now = 0.0
    groups = [now]
    for number in range(1, num_groups):
        mean_rate = rate.rate(number / (num_groups - 1)) if isinstance(rate, Ramp) else rate
        mean_gap = burst_size / mean_rate
        now += rng.gammavariate(burstiness, mean_gap / burstiness)
        groups.append(now)
    return [groups[number // burst_size] for number in range(count)]
