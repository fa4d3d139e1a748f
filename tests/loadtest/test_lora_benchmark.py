"""The benchmark of adapters: one small run."""

from __future__ import annotations

import json
import sys

import lora
import pytest


@pytest.mark.slow
def test_a_small_run(monkeypatch, tmp_path, capsys):
    path = tmp_path / "result.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["lora.py", "--batch", "3", "--steps", "2", "--prompt", "20", "--rank", "2", "--adapters", "2",
         "--json", str(path)],
    )  # fmt: skip
    lora.main()
    rows = json.loads(path.read_text())
    assert [row["batch"] for row in rows] == [
        "the model alone", "room for adapters, none in use", "2 adapters",
    ]  # fmt: skip
    assert rows[0]["ratio"] == 1.0 and all(row["step_ms"] > 0 for row in rows)
    assert "2 adapters" in capsys.readouterr().out
