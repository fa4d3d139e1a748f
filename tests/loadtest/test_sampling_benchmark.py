"""The benchmark of sampling: one small run, and that every kind is what it says."""

from __future__ import annotations

import json
import sys

import pytest
import sampling

from streamllm.sampling_params import SamplingParams


def test_kinds_are_valid_and_the_first_is_greedy():
    every = [SamplingParams(**kind.params) for kind in sampling.kinds(49152)]
    assert every[0].greedy and not any(params.greedy for params in every[1:])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49152, 60000])
def test_a_small_run(monkeypatch, tmp_path, capsys, vocab_size):
    path = tmp_path / "result.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["sampling.py", "--batch", "2", "--steps", "2", "--prompt", "20", "--json", str(path),
         "--vocabularies", str(vocab_size)],
    )  # fmt: skip
    sampling.main()
    rows = json.loads(path.read_text())[str(vocab_size)]
    assert [row["kind"] for row in rows] == [kind.name for kind in sampling.kinds(49152)]
    assert rows[0]["ratio"] == 1.0 and all(row["step_ms"] > 0 for row in rows)
    assert f"vocabulary {vocab_size}" in capsys.readouterr().out
