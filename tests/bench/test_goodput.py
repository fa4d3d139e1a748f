from __future__ import annotations

import pytest

from streamllm.bench.client import RequestFailure, Result
from streamllm.bench.goodput import is_good, parse_goodput
from streamllm.bench.report import summarise
from streamllm.errors import ConfigError


def result(ttft: float | None, e2e: float, tokens: int, error: RequestFailure | None = None) -> Result:
    return Result(0, 0.0, ttft=ttft, e2e=e2e, completion_tokens=tokens, num_chunks=tokens, error=error)


RESULTS = [
    result(0.100, 1.000, 10),  # TPOT 100 ms
    result(0.200, 1.100, 10),  # TPOT 100 ms, TTFT exactly at the limit
    result(0.201, 1.000, 10),
    result(0.100, 2.000, 11),  # TPOT 190 ms
    result(0.100, 0.100, 1),  # no TPOT
    result(None, 0.050, 0),  # no token at all
    result(0.010, 0.020, 2, RequestFailure("HTTP 500", "")),
]


@pytest.mark.parametrize(
    ("pairs", "good"),
    [
        (["ttft:200"], [0, 1, 3, 4]),
        (["tpot:150"], [0, 1, 2, 4, 5]),
        (["ttft:200", "tpot:150"], [0, 1, 4]),
        (["ttft:200", "tpot:150", "e2el:1050"], [0, 4]),
        (["ttft:0.5"], []),
    ],
)
def test_goodput_by_hand(pairs: list[str], good: list[int]) -> None:
    objectives = parse_goodput(pairs)
    assert [i for i, each in enumerate(RESULTS) if is_good(each, objectives)] == good
    summary = summarise(RESULTS, 4.0, objectives=objectives)
    assert summary["request_goodput"] == len(good) / 4.0


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:20", ":5", "ttft:inf", "ttft=200"]
)
def test_pairs_that_are_none(pair: str) -> None:
    with pytest.raises(ConfigError, match="must be METRIC:MILLISECONDS"):
        parse_goodput([pair])
    with pytest.raises(ConfigError, match="at most once"):
        parse_goodput(["ttft:1", "ttft:2"])
