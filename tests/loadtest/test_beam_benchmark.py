"""The beam search benchmark, whole, on a tiny model."""

from __future__ import annotations

import json

import beam_search
import pytest
from helpers.tiny_models import make_tiny_model


@pytest.mark.slow
def test_both_find_the_same_and_sharing_is_measured(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model")
    flags = [
        "--model",
        str(model),
        "--prompts",
        "2",
        "--width",
        "3",
        "--input-len",
        "8",
        "--output-len",
        "300",
    ]
    flags += ["--rounds", "1", "--threads", "1", "--json", str(tmp_path / "result.json")]
    assert beam_search.main(flags) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["agreement"]["same_score"] == result["agreement"]["of"] == 2
    assert result["output_tokens_per_round"] == 600
    assert 0 < result["memory"]["share_saved"] < 1 - 1 / 3
    assert result["memory"]["most_blocks"] < result["memory"]["most_blocks_unshared"]
    assert result["ratio"] == pytest.approx(
        result["seconds"]["transformers"][0] / result["seconds"]["streamllm"][0]
    )
    table = capsys.readouterr().out
    assert "beam width 3" in table and f"{result['ratio']:.2f} times as fast" in table


def test_scores_that_differ_are_told():
    agreement = beam_search.compare([([1, 2], -1.0), ([3], -2.0)], [([1, 2], -1.00001), ([4], -2.5)])
    assert (agreement["of"], agreement["same_tokens"], agreement["same_score"]) == (2, 1, 1)
    assert agreement["largest_score_difference"] == 0.5


@pytest.mark.parametrize("flags", [["--width", "0"], ["--rounds", "x"], ["--thread", "1"]])
def test_flags_that_are_refused(flags):
    with pytest.raises(SystemExit) as exit:
        beam_search.parse_args(flags)
    assert exit.value.code == 2
