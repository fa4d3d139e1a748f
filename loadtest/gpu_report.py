"""The goals of loadtest/gpu.py and its table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ATTENTION_SHARE, STEP_RATIO, IDLE_SHARE = 0.80, 1.25, 0.03


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with what was measured (``None``: nothing was) and whether it is met."""
    stages = result["stages"]
    attention = [
        row["share"]
        for name in ("cuda", "triton")
        for row in stages.get(name, {}).get("rows", ())
        if (row["kernel"], row["shape"]) == ("paged_decode", "32 x context 4096") and "share" in row
    ]
    steps = [row for row in stages.get("steps", {}).get("rows", ()) if "graphs" in row]
    alone = [row["graphs"]["period"] / row["floor"] for row in steps if row["tokens"] == 1]
    idle = [row["graphs"]["idle"] for row in steps]
    found = [
        (
            "decode attention, 32 x context 4,096: share of copy bandwidth",
            _first(attention),
            ATTENTION_SHARE,
            True,
        ),
        ("step at batch 1 with graphs, over weight bytes / bandwidth", _first(alone), STEP_RATIO, False),
        ("idle between steps with graphs, the most of any load", max(idle, default=None), IDLE_SHARE, False),
    ]
    return [
        {
            "name": name,
            "value": value,
            "goal": goal,
            "at_least": at_least,
            "met": value is not None and (value >= goal if at_least else value <= goal),
        }
        for name, value, goal, at_least in found
    ]


def render(result: dict[str, Any]) -> str:
    """The table."""
    stages = result["stages"]
    lines = []
    if described := next((stage for stage in stages.values() if "peaks" in stage), None):
        device, peaks = described["device"], described["peaks"]
        lines += [
            f"{device['name']}, torch {device['torch']}, CUDA {device.get('cuda')}; "
            f"copies {peaks['bandwidth'] / 1e9:,.0f} GB/s, "
            f"bfloat16 products {peaks['matrix_rate'] / 1e12:,.1f} T op/s",
            "",
        ]
    lines += [*_kernels(stages), *_steps(stages), *_loads(stages)]
    lines += [f"{name}: {stage['error']}" for name, stage in stages.items() if "error" in stage]
    lines += [_goal(goal) for goal in result["goals"]]
    lines.append(f"{result['seconds']:.0f} s in all")
    return "\n".join(lines)


def _kernels(stages: dict[str, Any]) -> Iterator[str]:
    """A line a case, with the figures of both implementations side by side."""
    names = [name for name in ("cuda", "triton") if "rows" in stages.get(name, {})]
    measured: dict[tuple[str, str, int], dict[str, Any]] = {}
    for name in names:
        for row in stages[name]["rows"]:
            measured.setdefault((row["kernel"], row["shape"], row["rows"]), {})[name] = row
    if not measured:
        return
    heads = "".join(f"{name + ', µs':>13} {'share':>6}" for name in names)
    yield f"{'kernel':20} {'shape':24} {'rows':>6} {'MB':>9} {'Gop':>8}{heads}"
    order = list(dict.fromkeys(kernel for kernel, _, _ in measured))
    for (kernel, shape, rows), by_name in sorted(measured.items(), key=lambda item: order.index(item[0][0])):
        known = next(iter(by_name.values()))
        size = f"{known.get('bytes', 0) / 1e6:9.2f} {known.get('operations', 0) / 1e9:8.1f}"
        cells = "".join(_cell(by_name.get(name)) for name in names)
        yield f"{kernel:20} {shape:24} {rows:6} {size}{cells}".rstrip()
    yield ""


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return " " * 20
    if "error" in row:
        return f"{'failed':>13} {'':6}"
    return f"{1e6 * row['seconds']:13.1f} {row['share']:6.0%}"


def _steps(stages: dict[str, Any]) -> Iterator[str]:
    steps = stages.get("steps", {})
    rows = steps.get("rows", ())
    if not rows:
        return
    ways = [name for name in ("graphs", "eager") if name in rows[0]]
    heads = "".join(f"{name + ', ms':>13} {'busy':>8} {'idle':>6} {'/ floor':>8}" for name in ways)
    yield f"{'step (' + steps['kernels'] + ' kernels)':42} {'floor, ms':>10}{heads}"
    for row in rows:
        cells = "".join(
            f"{1e3 * row[way]['period']:13.3f} {1e3 * row[way]['busy']:8.3f} {row[way]['idle']:6.1%} "
            f"{row[way]['period'] / row['floor']:7.2f}x"
            for way in ways
        )
        yield f"{row['step']:42} {1e3 * row['floor']:10.3f}{cells}"
    yield ""


def _loads(stages: dict[str, Any]) -> Iterator[str]:
    server = stages.get("server", {})
    rows = [row for row in server.get("rows", ()) if "latency_ms" in row]
    if not rows:
        return
    yield f"server, {server['input_len']} tokens in, {server['output_len']} out"
    heads = f"{'streams':>8} {'requests':>9} {'failed':>7} {'tokens/s':>10}"
    yield f"{heads} {'TTFT, ms':>10} {'p99':>8} {'ITL, ms':>9} {'p99':>8}"
    for row in rows:
        counts = f"{row['streams']:8} {row['requests']:9} {row['failed']:7} {row['output_throughput']:10,.0f}"
        latency = row["latency_ms"]
        yield f"{counts} {_percentiles(latency['ttft'], 10)} {_percentiles(latency['itl'], 9)}"
    yield ""


def _percentiles(values: dict[str, float] | None, width: int) -> str:
    if values is None:
        return f"{'-':>{width}} {'-':>8}"
    return f"{values['median']:{width}.2f} {values['p99']:8.2f}"


def _goal(goal: dict[str, Any]) -> str:
    wanted = f"{goal['name']}: goal {'at least' if goal['at_least'] else 'at most'} {goal['goal']:g}"
    if goal["value"] is None:
        return f"{wanted}, not measured"
    return f"{wanted}, measured {goal['value']:.3f}: {'met' if goal['met'] else 'MISSED'}"


def _first(values: list[float]) -> float | None:
    return values[0] if values else None
