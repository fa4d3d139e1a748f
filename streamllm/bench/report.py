"""The load test's numbers: percentiles, the block on the terminal, the JSON file and the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamllm.bench.client import Result

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2e": ("E2EL", "End-to-end Latency"),
}
_STATISTICS = {"mean": "Mean", "median": "Median", "p90": "P90", "p99": "P99"}
_WIDTH = 50


def summarise(results: Sequence[Result], duration: float) -> dict[str, Any]:
    """Everything that the report shows, ready for JSON. Latencies (milliseconds) and tokens are those of the
    successful requests; ``duration`` is in seconds."""
    good = [result for result in results if result.error is None]
    failures = [result.error for result in results if result.error is not None]
    first_messages = {failure.kind: failure.message for failure in reversed(failures)}
    samples = {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itls],
        "e2e": [r.e2e for r in good],
    }
    input_tokens = sum(r.prompt_tokens or 0 for r in good)
    output_tokens = sum(r.output_tokens for r in good)
    return {
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
        "max_concurrent_requests": peak_concurrency(results),
        "latency_ms": {name: distribution(values) for name, values in samples.items()},
    }


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, p90 and p99 in milliseconds (linear interpolation); ``None`` without samples."""
    if not seconds:
        return None
    milliseconds = np.asarray(seconds) * 1e3
    median, p90, p99 = np.percentile(milliseconds, [50, 90, 99])
    return {"mean": float(milliseconds.mean()), "median": float(median), "p90": float(p90), "p99": float(p99)}


def peak_concurrency(results: Sequence[Result]) -> int:
    """The most requests that were under way at one moment, waiting for a slot included."""
    changes = sorted([(r.due, 1) for r in results] + [(r.due + r.e2e, -1) for r in results])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def render(summary: dict[str, Any], *, concurrency: int | None, request_rate: float | None) -> str:
    """The report block, in the shape of ``vllm bench serve``."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines.append(_line("Successful requests", summary["completed"]))
    lines.append(_line("Failed requests", summary["failed"]))
    for failure in summary["failures"]:
        lines.append(f"  {failure['count']} x {failure['kind']}: {failure['first_message']}")
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency", concurrency))
    if request_rate is not None:
        lines.append(_line("Request rate configured (RPS)", request_rate))
    lines += [
        _line("Benchmark duration (s)", summary["duration_s"]),
        _line("Total input tokens", summary["total_input_tokens"]),
        _line("Total generated tokens", summary["total_output_tokens"]),
        _line("Request throughput (req/s)", summary["request_throughput"]),
        _line("Output token throughput (tok/s)", summary["output_throughput"]),
        _line("Total token throughput (tok/s)", summary["total_token_throughput"]),
        _line("Peak concurrent requests", summary["max_concurrent_requests"]),
    ]
    if summary["requests_without_usage"]:
        lines.append(f"({summary['requests_without_usage']} answers without usage: events counted as tokens)")
    for name, (short, title) in TITLES.items():
        values = summary["latency_ms"][name]
        lines.append(title.center(_WIDTH, "-"))
        if values is None:
            lines.append("(no samples)")
            continue
        lines += [_line(f"{label} {short} (ms)", values[key]) for key, label in _STATISTICS.items()]
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


def plot(path: Path, results: Sequence[Result], summary: dict[str, Any], title: str) -> None:
    """A picture of the run: histograms of TTFT, ITL and end-to-end latency, and a timeline with one bar a
    request (light until its first token, dark while it streams, red where it failed)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [r for r in results if r.error is None]
    panels = {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "itl": [gap for r in good for gap in r.itls],
        "e2e": [r.e2e for r in good],
    }
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.suptitle(
        f"{title}: {summary['output_throughput']:.1f} output tokens/s, {summary['failed']} failed"
    )
    for ax, (name, seconds) in zip(axes.flat, panels.items(), strict=False):
        ax.hist(np.asarray(seconds) * 1e3, bins=40, color="tab:blue")
        ax.set(title=TITLES[name][1], xlabel="ms", ylabel="tokens" if name == "itl" else "requests")
        for key, style in {"median": "-", "p99": "--"}.items():
            if values := summary["latency_ms"][name]:
                ax.axvline(values[key], color="black", linestyle=style, label=f"{key} {values[key]:.1f} ms")
        if seconds:
            ax.legend()
    _plot_timeline(axes[1, 1], results)
    figure.savefig(path, format="png", dpi=100)
    plt.close(figure)


def _plot_timeline(ax: Any, results: Sequence[Result]) -> None:
    rows = np.asarray([r.index for r in results])
    starts = np.asarray([r.due for r in results])
    ends = np.asarray([r.e2e for r in results])
    waits = np.asarray([r.e2e if r.ttft is None else r.ttft for r in results])
    failed = np.asarray([r.error is not None for r in results])
    ax.barh(rows, waits, left=starts, height=1.0, color="lightsteelblue", label="until the first token")
    ax.barh(rows, ends - waits, left=starts + waits, height=1.0, color="tab:blue", label="streaming")
    if failed.any():
        ax.barh(rows[failed], ends[failed], left=starts[failed], height=1.0, color="tab:red", label="failed")
    ax.invert_yaxis()
    ax.set(title="Timeline", xlabel="seconds", ylabel="request")
    ax.legend()
