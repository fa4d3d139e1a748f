from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from streamllm.bench.arrivals import Ramp, arrival_times

STEADY = 1e9
"""A burstiness at which a gap is its mean."""


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_poisson_arrivals_have_the_asked_rate() -> None:
    times = arrival_times(20_000, 8.0, seed=3)
    found = gaps(times)
    assert times[0] == 0.0 and min(found) >= 0
    # The mean of n exponential gaps has a relative standard error of 1 / sqrt(n) = 0.7 %.
    assert statistics.mean(found) == pytest.approx(1 / 8.0, rel=0.03)
    # Exponential: the standard deviation is the mean, the median is mean * ln 2; a fixed pace has neither.
    assert statistics.stdev(found) == pytest.approx(1 / 8.0, rel=0.05)
    assert statistics.median(found) == pytest.approx(0.6931 / 8.0, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0, 100.0])
def test_burstiness_sets_the_variance_and_leaves_the_rate(burstiness: float) -> None:
    found = gaps(arrival_times(20_000, 5.0, seed=1, burstiness=burstiness))
    # Standard errors at 0.25, the worst: 1.4 % of the mean, 1.8 % of the standard deviation.
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.08)


def test_bursts_arrive_together_at_the_same_rate() -> None:
    times = arrival_times(20_002, 8.0, seed=0, burst_size=4)
    assert len(times) == 20_002
    assert all(times[i] == times[i + 1] == times[i + 2] == times[i + 3] for i in range(0, 20_000, 4))
    starts = times[::4]
    assert len(set(starts)) == len(starts) == 5_001
    assert statistics.mean(gaps(starts)) == pytest.approx(4 / 8.0, rel=0.05)


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        (Ramp("linear", 1.0, 3.0), [1 / 2, 1 / 3]),
        (Ramp("linear", 3.0, 1.0), [1 / 2, 1.0]),
        (Ramp("exponential", 1.0, 100.0), [1 / 10, 1 / 100]),
    ],
)
def test_a_ramp_changes_the_rate_from_request_to_request(ramp: Ramp, expected: list[float]) -> None:
    assert gaps(arrival_times(3, ramp, seed=0, burstiness=STEADY)) == pytest.approx(expected, rel=1e-3)


def test_a_linear_ramp_on_average() -> None:
    """A mean rate of 2 to 20: the middle thousand requests come at 11 a second."""
    times = arrival_times(9_001, Ramp("linear", 2.0, 20.0), seed=0)
    assert statistics.mean(gaps(times[4_000:5_002])) == pytest.approx(1 / 11, rel=0.1)
    assert statistics.mean(gaps(times[-500:])) == pytest.approx(1 / 20, rel=0.2)


def test_the_seed_decides() -> None:
    assert arrival_times(50, 2.0, seed=1) == arrival_times(50, 2.0, seed=1)
    assert arrival_times(50, 2.0, seed=1) != arrival_times(50, 2.0, seed=2)
    assert arrival_times(1, 2.0, seed=1) == [0.0]
