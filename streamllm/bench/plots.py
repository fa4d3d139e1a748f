"""Pictures of the load generator's runs; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamllm.bench.client import Result
from streamllm.bench.report import TITLES, distribution, latency_samples

if TYPE_CHECKING:
    from streamllm.bench.measure import Measurement

PANELS = ("ttft", "itl", "e2el")


def plot(path: Path, results: Sequence[Result], summary: dict[str, Any], title: str) -> None:
    """A picture of the run: histograms of TTFT, ITL and end-to-end latency, and a timeline with one bar a
    request (light until its first token, dark while it streams, red where it failed)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = latency_samples([r for r in results if r.error is None])
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.suptitle(
        f"{title}: {summary['output_throughput']:.1f} output tokens/s, {summary['failed']} failed"
    )
    for ax, name in zip(axes.flat, PANELS, strict=False):
        ax.hist(np.asarray(samples[name]) * 1e3, bins=40, color="tab:blue")
        ax.set(title=TITLES[name][1], xlabel="ms", ylabel="tokens" if name == "itl" else "requests")
        if values := distribution(samples[name]):
            for key, style in {"median": "-", "p99": "--"}.items():
                ax.axvline(values[key], color="black", linestyle=style, label=f"{key} {values[key]:.1f} ms")
            ax.legend()
    _plot_timeline(axes[1, 1], results)
    figure.savefig(path, format="png", dpi=100)
    plt.close(figure)


def plot_comparison(path: Path, servers: Mapping[str, Sequence[Measurement]]) -> None:
    """A picture of several servers' runs, by the servers' names: the share of requests (of ITL: of tokens)
    that took at most so long, all rounds together, and the output throughput of each round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for number, (server, runs) in enumerate(servers.items()):
        samples = latency_samples([r for run in runs for r in run.results if r.error is None])
        for ax, name in zip(axes.flat, PANELS, strict=False):
            ax.ecdf(np.asarray(samples[name] or [0.0]) * 1e3, color=f"C{number}", label=server)
            ax.set(title=TITLES[name][1], xlabel="ms", ylabel="share at most so long")
        throughputs = [run.summary["output_throughput"] for run in runs]
        rounds = np.arange(len(runs)) + 1
        width = 0.8 / len(servers)
        axes[1, 1].bar(
            rounds + width * (number - (len(servers) - 1) / 2), throughputs, width, color=f"C{number}"
        )
        axes[1, 1].set_xticks(rounds)
    axes[0, 0].legend()
    axes[1, 1].set(title="Output tokens per second", xlabel="round")
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
