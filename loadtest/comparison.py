"""What the comparison found: medians over the rounds, ratios, the tables in Markdown, and the picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "streamllm"
OFFLINE = "streamllm-generate"


@dataclass(frozen=True, slots=True)
class Column:
    """One measured quantity.

    Attributes:
        title: with its unit.
        load: name of the load.
        figure: name in ``loads.figures``.
        larger_is_better: a rate, not a time.
        scale: from the figure's unit to the title's.
    """

    title: str
    load: str
    figure: str
    larger_is_better: bool
    scale: float = 1.0


def columns(loads: Sequence[dict[str, Any]], *, ratios: bool) -> list[Column]:
    """The columns for the loads that were run, in their order.

    Args:
        loads: ``name``, ``kind`` and ``streams`` of each load.
        ratios: only those that engines are compared by.
    """
    streams = [load for load in loads if load["kind"] == "streams"]
    found = [_at(load, "tokens/s", "tokens_per_s", True) for load in streams]
    if not ratios:
        found += [_at(load, "ITL ms", "itl_ms", False) for load in streams]
        found += [_at(load, "TTFT ms", "ttft_s", False, 1e3) for load in streams]
    for load in loads:
        name, kind = load["name"], load["kind"]
        if kind == "long-prompt":
            found.append(Column("TTFT s, 2,000-token prompt", name, "ttft_s", False))
        elif kind == "shared-prefix":
            found.append(Column("last TTFT s, 8 sharing 1,500 tokens", name, "last_ttft_s", False))
        elif kind == "mixed-lengths":
            found.append(_at(load, "tokens/s, 16 to 256 out,", "tokens_per_s", True))
    return found


def _at(load: dict[str, Any], title: str, figure: str, larger: bool, scale: float = 1.0) -> Column:
    return Column(f"{title} at {load['streams']}", load["name"], figure, larger, scale)


class Measurements:
    """All runs of all engines, by engine and load.

    Args:
        runs: the JSON file's ``runs``: ``engine``, ``round``, ``load`` and ``figures`` of each.
    """

    def __init__(self, runs: Sequence[dict[str, Any]]) -> None:
        self._rounds: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
        for run in runs:
            for figure, value in run["figures"].items():
                self._rounds[run["engine"], run["load"], figure][run["round"]] = value

    def median(self, engine: str, load: str, figure: str) -> float | None:
        """The median over the rounds; ``None`` where the engine did not run this load, or does not tell."""
        rounds = self._rounds.get((engine, load, figure))
        return statistics.median(rounds.values()) if rounds else None

    def speedup(self, engine: str, column: Column) -> float | None:
        """How many times as fast streamllm was as ``engine``: the median of the ratios within each round, for
        the machine's speed changes more between rounds than in one."""
        ours = self._rounds.get((OURS, column.load, column.figure), {})
        theirs = self._rounds.get((engine, column.load, column.figure), {})
        ratios = [
            ours[number] / theirs[number] if column.larger_is_better else theirs[number] / ours[number]
            for number in sorted(ours.keys() & theirs.keys())
        ]
        return statistics.median(ratios) if ratios else None

    def http_share(self, load: str) -> tuple[float, float] | None:
        """Throughput over HTTP as a share of ``LLM.generate``'s: as measured, and with the load generator's
        processor time taken out; medians of the ratios within each round."""
        offline = self._rounds.get((OFFLINE, load, "tokens_per_s"), {})
        shares = []
        for figure in ("tokens_per_s", "tokens_per_s_alone"):
            http = self._rounds.get((OURS, load, figure), {})
            ratios = [http[number] / offline[number] for number in http.keys() & offline.keys()]
            if not ratios:
                return None
            shares.append(statistics.median(ratios))
        return shares[0], shares[1]


def render(document: dict[str, Any]) -> str:
    """The whole result in Markdown: one row an engine, then the ratios, then who is missing."""
    measured = Measurements(document["runs"])
    engines = [engine for engine in document["engines"] if engine["version"] is not None]
    parts = [_heading(document), _absolute(measured, engines, document["loads"])]
    if ratio_table := _ratios(measured, engines, document["loads"]):
        parts.append("How many times as fast streamllm is (each family's best variant in the column):")
        parts.append(ratio_table)
    for load in document["loads"]:
        if load["kind"] == "offline" and (shares := measured.http_share(load["name"])):
            parts.append(
                f"streamllm over HTTP at {load['streams']} streams reaches {shares[0]:.1%} of LLM.generate "
                f"on the same requests; {shares[1]:.1%} with the load generator's processor time taken out."
            )
    notes = [f"- {failure['engine']} failed: {failure['message']}" for failure in document["failures"]]
    notes += [
        f"- {engine['name']} is not installed: {engine['install']}."
        for engine in document["engines"]
        if engine["version"] is None
    ]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _heading(document: dict[str, Any]) -> str:
    arguments = document["arguments"]
    rounds = max((run["round"] for run in document["runs"]), default=0)
    return (
        f"{document['model']} on {document['processor']}, {arguments['threads']} threads for every engine, "
        f"the load generator on the same {document['cores']} cores; prompts of {arguments['input_len']} "
        f"tokens, {arguments['output_len']} out; medians of {rounds} round(s), seed {arguments['seed']}, "
        f"{document['date']}."
    )


def _absolute(
    measured: Measurements, engines: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]
) -> str:
    shown = columns(loads, ratios=False)
    rows = []
    for engine in engines:
        values = [measured.median(engine["name"], column.load, column.figure) for column in shown]
        if any(value is not None for value in values):
            cells = [_number(v, column.scale) for v, column in zip(values, shown, strict=True)]
            rows.append([f"{engine['name']} {engine['version']}", engine["precision"], *cells])
    if not rows:
        return "Nothing was measured."
    return _table(["engine", "precision", *(column.title for column in shown)], rows)


def _ratios(
    measured: Measurements, engines: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]
) -> str | None:
    shown = columns(loads, ratios=True)
    families: dict[str, list[str]] = {}
    for engine in engines:
        if engine["name"] not in (OURS, OFFLINE):
            families.setdefault(engine["family"], []).append(engine["name"])
    rows = []
    for family, variants in families.items():
        cells = [best_speedup(measured, variants, column) for column in shown]
        if any(cell is not None for cell in cells):
            rows.append([family, *("-" if cell is None else f"{cell:.2f}x" for cell in cells)])
    return _table(["against", *(column.title for column in shown)], rows) if rows else None


def best_speedup(measured: Measurements, variants: Sequence[str], column: Column) -> float | None:
    """streamllm against the fastest of ``variants`` by its median; ``None`` with nothing to compare."""
    medians = {name: measured.median(name, column.load, column.figure) for name in variants}
    known = {name: value for name, value in medians.items() if value is not None}
    if not known:
        return None
    pick = max if column.larger_is_better else min
    return measured.speedup(pick(known, key=known.__getitem__), column)


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(path: Path, document: dict[str, Any]) -> None:
    """A picture of the medians: one panel a quantity, one bar an engine, streamllm's in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = Measurements(document["runs"])
    names = [engine["name"] for engine in document["engines"]]
    panels = []
    for column in columns(document["loads"], ratios=False):
        values = {name: measured.median(name, column.load, column.figure) for name in names}
        if any(value is not None for value in values.values()):
            panels.append((column, values))
    per_row = min(3, max(len(panels), 1))
    num_rows = max(-(-len(panels) // per_row), 1)
    figure, axes = plt.subplots(
        num_rows, per_row, figsize=(5 * per_row, 0.8 + 3.4 * num_rows), layout="constrained", squeeze=False
    )
    figure.suptitle(_heading(document), fontsize=9)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (column, values) in zip(axes.flat, panels, strict=False):
        bars = {name: value * column.scale for name, value in values.items() if value is not None}
        colours = ["tab:orange" if name == OURS else "tab:blue" for name in bars]
        drawn = ax.barh(list(bars), list(bars.values()), color=colours)
        ax.bar_label(drawn, [_number(value, 1.0) for value in bars.values()], padding=2, fontsize=8)
        ax.margins(x=0.15)
        ax.set_ylim(max(len(bars), 4) - 0.5, -0.5)
        ax.tick_params(labelsize=8)
        better = "more is better" if column.larger_is_better else "less is better"
        ax.set_title(f"{column.title} ({better})", fontsize=9)
    figure.savefig(path, format="png", dpi=100)
    plt.close(figure)
