from __future__ import annotations

import os

import front
import pytest


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.slow
def test_every_token_of_every_stream_arrives():
    before = os.sched_getaffinity(0)
    try:
        (row,) = front.run([3], tokens=20, rounds=1, cores=(min(before), max(before)))
    finally:
        os.sched_setaffinity(0, before)
    assert row["streams"] == 3
    for kind in ("engine", "ready-made"):
        assert row[kind]["core"] > row[kind]["clock"] * 0.5 > 0
    # One more than the tokens: the first chunk of a stream may hold none, the last has the finish reason.
    assert 0.9 <= row["engine"]["events"] <= 1.1


def test_report_and_goals():
    row = {
        "streams": 256,
        "engine": {"core": 30_000.0, "clock": 20_000.0, "events": 1.0},
        "ready-made": {"core": 45_000.0, "clock": 40_000.0, "events": 1.0},
    }
    assert (
        "256               30,000         20,000                  45,000    67%          1.00"
        in front.render([row])
    )
    assert front.shortfalls([row]) == []
    row["engine"]["core"] = 24_000.0
    assert front.shortfalls([row]) == [
        "256 streams: 24,000 tokens/s of a core",
        "256 streams: 53% of ready-made chunks",
    ]
    assert front.shortfalls([{**row, "streams": 32}]) == []
