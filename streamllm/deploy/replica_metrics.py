"""Prometheus texts of many replicas as one: each sample labelled by its replica, or all summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_SHARES = ("_perc", "_ratio", "_share", "_usage")
"""Ends of names of gauges that are a share of something: the mean says more than the sum."""


@dataclass(slots=True)
class _Family:
    """One metric: its ``# HELP`` and ``# TYPE`` lines, and its samples by whoever has them."""

    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def labelled(texts: Mapping[str, str], label: str = "replica") -> str:
    """One text with the samples of all, each with a further label.

    Args:
        texts: label's value -> metrics in Prometheus' text format.
    """
    families: dict[str, _Family] = {}
    for value, text in texts.items():
        pair = f'{label}="{value}"'
        family = _Family()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, _Family())
                if is_new:
                    family.head.append(line)
            elif line.startswith("#"):
                if len(family.head) == 1:
                    family.head.append(line)
            elif line:
                family.samples.append(_with_label(line, pair))
    lines = [line for family in families.values() for line in (*family.head, *family.samples)]
    return "\n".join(lines) + "\n" if lines else ""


def _with_label(sample: str, pair: str) -> str:
    """``name{a="b"} 1`` or ``name 1`` with one more label."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        return f"{sample[: brace + 1]}{pair}{'' if rest.startswith('}') else ','}{rest}"
    return f"{sample[:space]}{{{pair}}}{sample[space:]}"


def summed(texts: Mapping[str, str]) -> str:
    """One text in which each sample is the sum over all, of shares the mean, of start times the first."""
    heads: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for text in texts.values():
        for family in text_string_to_metric_families(text):
            heads.setdefault(family.name, (family.documentation, family.type))
            samples = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                samples.setdefault(key, []).append(sample.value)
    lines: list[str] = []
    for name, (text, kind) in heads.items():
        # The parser strips the end that a counter's name has in this format.
        shown = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {shown} {text}", f"# TYPE {shown} {kind}"]
        for (sample_name, labels), found in values[name].items():
            pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
            lines.append(f"{sample_name}{{{pairs}}} {_together(sample_name, found):.17g}".replace("{}", ""))
    return "\n".join(lines) + "\n" if lines else ""


def _together(name: str, values: list[float]) -> float:
    if name.endswith("_start_time_seconds"):
        return min(values)
    total = sum(values)
    return total / len(values) if name.endswith(_SHARES) else total


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
