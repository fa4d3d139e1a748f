"""The table that sets several servers' runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from streamllm.bench.report import FIGURES, TITLES

if TYPE_CHECKING:
    from streamllm.bench.measure import Measurement

_COMPARED = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "max_output_tokens_per_s",
    "total_token_throughput",
)


def render_comparison(servers: Mapping[str, Sequence[Measurement]], metrics: Sequence[str]) -> str:
    """Each figure of each server, the median over its rounds, and its ratio to the first server's: the median
    of the ratios within each round, for what disturbs one round disturbs all servers in it.

    Args:
        servers: runs by server, in the order of the rounds; all have as many.
        metrics: names of latencies, keys of :data:`~streamllm.bench.report.TITLES`.
    """
    num_rounds = len(next(iter(servers.values())))
    rounds = "1 round" if num_rounds == 1 else f"medians over {num_rounds} rounds"
    width = 40 + 12 * len(servers) + 10 * (len(servers) - 1)
    lines = [f" Comparison, {rounds} ".center(width, "=")]
    lines += [f"{number}: {url}" for number, url in enumerate(servers, 1)]
    numbers = [str(number) for number in range(1, len(servers) + 1)]
    titles = [f"{each:>12}" for each in numbers] + [f"{each + ' / 1':>10}" for each in numbers[1:]]
    lines.append(" " * 40 + "".join(titles))
    columns = [[_figures(run.summary, metrics) for run in runs] for runs in servers.values()]
    for title in columns[0][0]:
        lines.append(_row(title, [[figures.get(title) for figures in runs] for runs in columns]))
    lines.append("=" * width)
    return "\n".join(lines)


def _figures(summary: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, float | None]:
    """Figures by the titles that the report gives them."""
    found: dict[str, float | None] = {"Failed requests": summary["failed"]}
    found |= {FIGURES[key]: summary[key] for key in _COMPARED if key in summary}
    for name in metrics:
        short, values = TITLES[name][0], summary["latency_ms"][name]
        for key, value in (values or {}).items():
            if key != "std":
                found[f"{key.title()} {short} (ms)"] = value
    return found


def _row(title: str, columns: Sequence[Sequence[float | None]]) -> str:
    """One figure of every server, its values in the order of the rounds."""
    cells = []
    for values in columns:
        known = [value for value in values if value is not None]
        cells.append(f"{median(known):>12.2f}" if known else f"{'-':>12}")
    for values in columns[1:]:
        pairs = zip(columns[0], values, strict=True)
        ratios = [value / first for first, value in pairs if first and value is not None]
        cells.append(f"{f'{median(ratios):.2f}x' if ratios else '-':>10}")
    return f"{title + ':':<40}" + "".join(cells)
