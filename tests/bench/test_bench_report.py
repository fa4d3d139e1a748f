from __future__ import annotations

import re
from typing import Any

import pytest

from streamllm.bench.client import Result
from streamllm.bench.comparison import render_comparison
from streamllm.bench.measure import Measurement
from streamllm.bench.report import distribution, peak_output_tokens, render, summarise


def result(due: float, ttft: float, itls: list[float], tokens: int | None = None) -> Result:
    count = len(itls) + 1
    return Result(
        0, due, prompt_tokens=10, completion_tokens=tokens or count, num_chunks=count, ttft=ttft, itls=itls,
        e2e=ttft + sum(itls),
    )  # fmt: skip


def test_percentiles_by_hand() -> None:
    seconds = [0.004, 0.001, 0.003, 0.002, 0.005]
    found = distribution(seconds, (0, 25, 90, 99.9, 100))
    assert found is not None
    assert found.pop("std") == pytest.approx(2**0.5)
    expected = {"mean": 3, "median": 3, "p0": 1, "p25": 2, "p90": 4.6, "p99.9": 4.996, "p100": 5}
    assert found == pytest.approx(expected)
    assert distribution([]) is None


def test_the_second_with_most_tokens() -> None:
    # Tokens at 0.5, 0.9, 1.1, 1.2; another request's at 1.5, 1.9, each event of two tokens.
    results = [result(0.25, 0.25, [0.4, 0.2, 0.1]), result(1.0, 0.5, [0.4], tokens=4)]
    assert peak_output_tokens(results) == 2 + 4
    assert peak_output_tokens([]) == 0
    assert summarise(results, 2.0)["max_output_tokens_per_s"] == 6


def test_the_report_has_the_chosen_figures_only() -> None:
    summary = summarise([result(0.0, 0.1, [0.1, 0.1])], 1.0, percentiles=(50, 99.9))
    text = render(summary, concurrency=3, request_rate=2.5, metrics=("e2el", "ttft"))
    assert re.findall(r"^(\S+ (?:E2EL|TTFT|TPOT|ITL)) \(ms\): +([\d.]+)", text, re.MULTILINE) == [
        ("Mean E2EL", "300.00"), ("Median E2EL", "300.00"), ("P50 E2EL", "300.00"), ("P99.9 E2EL", "300.00"),
        ("Mean TTFT", "100.00"), ("Median TTFT", "100.00"), ("P50 TTFT", "100.00"), ("P99.9 TTFT", "100.00"),
    ]  # fmt: skip
    assert "goodput" not in text
    assert "Maximum request concurrency:             3 " in text
    assert "Request rate configured (RPS):           2.50" in text


def measurement(url: str, round_number: int, throughput: float, ttft: float | None) -> Measurement:
    values = None if ttft is None else {"mean": ttft, "median": ttft, "std": 0.0, "p99": ttft}
    summary: dict[str, Any] = {
        "failed": 0, "request_throughput": 1.0, "output_throughput": throughput,
        "max_output_tokens_per_s": 1.0, "total_token_throughput": 1.0, "latency_ms": {"ttft": values},
    }  # fmt: skip
    return Measurement(url, "m", round_number, round_number, [], 1.0, summary)


def test_ratios_are_medians_of_the_ratios_within_rounds() -> None:
    servers = {
        "http://a": [measurement("http://a", i, value, 10.0) for i, value in enumerate((100, 10, 40))],
        "http://b": [measurement("http://b", i, value, 30.0) for i, value in enumerate((150, 9, 80))],
        "http://c": [measurement("http://c", i, value, None) for i, value in enumerate((1, 1, 1))],
    }
    text = render_comparison(servers, ("ttft",))
    rows = {line[:40].strip(): line[40:].split() for line in text.splitlines()}
    # 1.5, 0.9 and 2; the ratio of the medians would be 2.
    row = rows["Output token throughput (tok/s):"]
    assert row == ["40.00", "80.00", "1.00", "1.50x", "0.03x"]
    assert rows["Median TTFT (ms):"] == ["10.00", "30.00", "-", "3.00x", "-"]
    assert "medians over 3 rounds" in text and "2: http://b" in text
