"""The load generator's numbers: percentiles, and the block on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamllm.bench.client import Result
from streamllm.bench.goodput import is_good

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
FIGURES = {
    "duration_s": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
    "total_token_throughput": "Total token throughput (tok/s)",
}
"""A summary's figures as the report has them; goodput only where objectives were given."""

PERCENTILES = (90.0, 99.0)
_WIDTH = 50


def summarise(
    results: Sequence[Result],
    duration: float,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    objectives: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Everything that the report shows, ready for JSON. Latencies (milliseconds) and tokens are those of the
    successful requests; ``duration`` is in seconds, ``objectives`` (of goodput) in milliseconds by metric."""
    good = [result for result in results if result.error is None]
    failures = [result.error for result in results if result.error is not None]
    first_messages = {failure.kind: failure.message for failure in reversed(failures)}
    input_tokens = sum(r.prompt_tokens or 0 for r in good)
    output_tokens = sum(r.output_tokens for r in good)
    summary = {
        "completed": len(good),
        "failed": len(failures),
        "failures": [
            {"kind": kind, "count": count, "first_message": first_messages[kind]}
            for kind, count in Counter(failure.kind for failure in failures).most_common()
        ],
        "duration_s": duration,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "requests_without_usage": sum(r.completion_tokens is None for r in good),
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": peak_output_tokens(good),
        "max_concurrent_requests": peak_concurrency(results),
        "latency_ms": {
            name: distribution(values, percentiles) for name, values in latency_samples(good).items()
        },
    }
    if objectives:
        summary["request_goodput"] = sum(is_good(r, objectives) for r in good) / duration
    return summary


def latency_samples(good: Sequence[Result]) -> dict[str, list[float]]:
    """Seconds by the names of :data:`TITLES`, of successful requests."""
    return {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itls],
        "e2el": [r.e2e for r in good],
    }


def distribution(
    seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float] | None:
    """Mean, median, standard deviation and percentiles (``p90``, ``p99.9``; linear interpolation) in
    milliseconds; ``None`` without samples."""
    if not seconds:
        return None
    milliseconds = np.asarray(seconds) * 1e3
    found = {
        "mean": float(milliseconds.mean()),
        "median": float(np.median(milliseconds)),
        "std": float(milliseconds.std()),
    }
    for rank, value in zip(percentiles, np.percentile(milliseconds, percentiles), strict=True):
        found[f"p{rank:g}"] = float(value)
    return found


def peak_output_tokens(good: Sequence[Result]) -> float:
    """The most tokens that came within one of the load's seconds (from its start, as vLLM cuts them). Where
    events carry several tokens, a request's are spread evenly over its events."""
    tokens = np.zeros(1)
    for result in good:
        if result.ttft is None:
            continue
        times = result.due + result.ttft + np.cumsum([0.0, *result.itls])
        share = result.output_tokens / result.num_chunks
        found = np.bincount(times.astype(int)) * share
        tokens = np.pad(tokens, (0, max(len(found) - len(tokens), 0)))
        tokens[: len(found)] += found
    return float(tokens.max())


def peak_concurrency(results: Sequence[Result]) -> int:
    """The most requests that were under way at one moment, waiting for a slot included."""
    changes = sorted([(r.due, 1) for r in results] + [(r.due + r.e2e, -1) for r in results])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def render(
    summary: Mapping[str, Any],
    *,
    concurrency: int | None,
    request_rate: float | None,
    metrics: Sequence[str] = tuple(TITLES),
) -> str:
    """The report block, in the shape of ``vllm bench serve``, with the latencies named by ``metrics``."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines.append(_line("Successful requests", summary["completed"]))
    lines.append(_line("Failed requests", summary["failed"]))
    for failure in summary["failures"]:
        lines.append(f"  {failure['count']} x {failure['kind']}: {failure['first_message']}")
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency", concurrency))
    if request_rate is not None:
        lines.append(_line("Request rate configured (RPS)", request_rate))
    lines += [_line(title, summary[key]) for key, title in FIGURES.items() if key in summary]
    if summary["requests_without_usage"]:
        lines.append(f"({summary['requests_without_usage']} answers without usage: events counted as tokens)")
    for name in metrics:
        short, title = TITLES[name]
        values = summary["latency_ms"][name]
        lines.append(title.center(_WIDTH, "-"))
        if values is None:
            lines.append("(no samples)")
            continue
        lines += [
            _line(f"{key.title()} {short} (ms)", value) for key, value in values.items() if key != "std"
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float | int) -> str:
    return f"{label + ':':<40} {value:<9.2f}" if isinstance(value, float) else f"{label + ':':<40} {value:<9}"


def request_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One JSON object a request: times in seconds from the start of the load."""
    return [
        {
            "index": r.index,
            "start_s": r.due,
            "ttft_s": r.ttft,
            "e2e_s": r.e2e,
            "itl_s": r.itls,
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            "finish_reason": r.finish_reason,
            "error": None if r.error is None else {"kind": r.error.kind, "message": r.error.message},
        }
        for r in results
    ]
