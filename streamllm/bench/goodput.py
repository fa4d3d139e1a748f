"""Goodput: requests a second that met every objective, after DistServe (Zhong et al., OSDI 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streamllm.errors import ConfigError

if TYPE_CHECKING:
    from streamllm.bench.client import Result

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` as milliseconds by metric.

    Raises:
        ConfigError: a pair is none, its metric is unknown or there twice, or its limit is no time.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or name in objectives or not 0 < limit < math.inf:
            raise ConfigError(
                f"--goodput {pair}: must be METRIC:MILLISECONDS, such as ttft:200, each of "
                f"{', '.join(OBJECTIVES)} at most once."
            )
        objectives[name] = limit
    return objectives


def is_good(result: Result, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded and met every objective (milliseconds by metric). What a request does not
    have, as a time per output token where there was one token, it cannot miss; without a first token it has
    missed that."""
    if result.error is not None:
        return False
    seconds = {"ttft": math.inf if result.ttft is None else result.ttft, "tpot": result.tpot or 0.0,
               "e2el": result.e2e}  # fmt: skip
    return all(seconds[name] * 1e3 <= limit for name, limit in objectives.items())
