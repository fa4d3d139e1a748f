from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compare import main
from comparison import Column, Measurements, best_speedup, columns, plot, render

RATE = Column("tokens/s at 8", "streams-8", "tokens_per_s", True)
FIRST = Column("TTFT s", "long-prompt", "ttft_s", False)


def run(engine: str, number: int, load: str, **values: float) -> dict[str, Any]:
    return {"engine": engine, "round": number, "load": load, "figures": values}


def rates(engine: str, *values: float) -> list[dict[str, Any]]:
    return [run(engine, n, "streams-8", tokens_per_s=value) for n, value in enumerate(values, start=1)]


def test_medians_over_rounds() -> None:
    measured = Measurements(rates("a", 30, 10, 20))
    assert measured.median("a", "streams-8", "tokens_per_s") == 20
    assert measured.median("a", "streams-8", "itl_ms") is None
    assert measured.median("b", "streams-8", "tokens_per_s") is None


def test_speedup_is_the_median_of_ratios_within_rounds() -> None:
    # The machine was half as fast in the second round, for both.
    measured = Measurements([*rates("streamllm", 40, 20, 60), *rates("peer", 10, 5, 20)])
    assert measured.speedup("peer", RATE) == 4
    # A round that only one of them ran says nothing.
    measured = Measurements([*rates("streamllm", 40, 20), *rates("peer", 10, 5, 1)])
    assert measured.speedup("peer", RATE) == 4


def test_speedup_of_times_is_more_than_one_for_the_shorter() -> None:
    runs = [run("streamllm", 1, "long-prompt", ttft_s=0.5), run("peer", 1, "long-prompt", ttft_s=2.0)]
    assert Measurements(runs).speedup("peer", FIRST) == 4


def test_the_best_variant_counts_in_each_column() -> None:
    runs = [*rates("streamllm", 100), *rates("peer-a", 50), *rates("peer-b", 20)]
    runs += [
        run("streamllm", 1, "long-prompt", ttft_s=1.0),
        run("peer-a", 1, "long-prompt", ttft_s=9.0),
        run("peer-b", 1, "long-prompt", ttft_s=3.0),
    ]
    measured = Measurements(runs)
    assert best_speedup(measured, ["peer-a", "peer-b"], RATE) == 2
    assert best_speedup(measured, ["peer-a", "peer-b"], FIRST) == 3
    assert best_speedup(measured, ["peer-c"], RATE) is None


def test_columns_follow_the_loads() -> None:
    loads = [{"name": f"streams-{n}", "kind": "streams", "streams": n} for n in (1, 8)]
    loads.append({"name": "long-prompt", "kind": "long-prompt", "streams": 1})
    assert [column.title for column in columns(loads, ratios=False)] == [
        "tokens/s at 1", "tokens/s at 8", "ITL ms at 1", "ITL ms at 8", "TTFT ms at 1", "TTFT ms at 8",
        "TTFT s, 2,000-token prompt",
    ]  # fmt: skip
    assert [column.title for column in columns(loads, ratios=True)] == [
        "tokens/s at 1", "tokens/s at 8", "TTFT s, 2,000-token prompt",
    ]  # fmt: skip


def engine(name: str, family: str, version: str | None = "1.0") -> dict[str, Any]:
    return {
        "name": name, "family": family, "precision": "Q4_1", "version": version,
        "install": f"pip install {name}",
    }  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    figures = {"tokens_per_s": 250.0, "itl_ms": 3.456, "ttft_s": 0.0721, "tokens_per_s_alone": 260.0}
    halves = {"tokens_per_s": 100.0, "itl_ms": 8.0, "ttft_s": 0.2}
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "model": "m",
        "processor": "p",
        "cores": 2,
        "arguments": {"threads": 2, "seed": 0, "input_len": 128, "output_len": 64},
        "engines": [
            engine("streamllm", "streamllm"),
            engine("streamllm-generate", "streamllm LLM.generate"),
            engine("peer-a", "peer"),
            engine("other", "other", version=None),
        ],
        "loads": [
            {"name": "streams-8", "kind": "streams", "streams": 8},
            {"name": "offline-8", "kind": "offline", "streams": 8},
        ],
        "runs": [
            run("streamllm", 1, "streams-8", **figures),
            run("streamllm", 1, "offline-8", **figures),
            run("streamllm-generate", 1, "offline-8", tokens_per_s=260.0),
            run("peer-a", 1, "streams-8", **halves),
        ],
        "failures": [{"engine": "peer-a", "round": 2, "message": "it died"}],
    }


def test_tables(document: dict[str, Any]) -> None:
    text = render(document)
    assert "| streamllm 1.0 | Q4_1 | 250 | 3.46 | 72.1 |" in text
    assert "| peer-a 1.0 | Q4_1 | 100 | 8.00 | 200 |" in text
    assert "| peer | 2.50x |" in text
    assert "at 8 streams reaches 96.2% of LLM.generate" in text and "100.0% with the load generator's" in text
    assert "- peer-a failed: it died" in text
    assert "- other is not installed: pip install other." in text
    assert "| other" not in text


def test_report_of_an_earlier_run(document: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(document))
    assert main(["--from-json", str(path), "--markdown", str(tmp_path / "table.md")]) == 1  # an engine failed
    assert "| peer | 2.50x |" in capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == render(document) + "\n"
    path.write_text(json.dumps(document | {"failures": []}))
    assert main(["--from-json", str(path)]) == 0
    assert main(["--from-json", str(tmp_path / "none.json")]) == 2


def test_nothing_measured_is_still_a_report(document: dict[str, Any], tmp_path: Path) -> None:
    document |= {"runs": []}
    text = render(document)
    assert "Nothing was measured." in text and "is not installed" in text and "|" not in text
    plot(tmp_path / "empty.png", document)


def test_picture(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    plot(tmp_path / "comparison.png", document)
    with Image.open(tmp_path / "comparison.png") as image:
        # Three panels side by side, and something drawn on them.
        assert image.width == 1500
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 20)) > 10
