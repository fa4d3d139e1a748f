from __future__ import annotations

from pathlib import Path

import accuracy
import numpy as np
import pytest
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.sources import resolve


def test_comparison_of_known_distributions():
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]))
    comparison = accuracy.Comparison()
    comparison.add(exact, other, np.array([1, -1]))
    assert comparison.divergence == pytest.approx(0.25 * np.log(2))
    assert (comparison.same_choice, comparison.num_positions, comparison.num_predictions) == (1, 2, 1)
    assert comparison.line("x").split() == ["x", f"{0.125 * np.log(2):.3e}", "50.00%", "2.0000"]


def test_log_softmax_of_large_logits():
    logits = np.array([[1000.0, 1000.0, -1e30]], np.float32)
    np.testing.assert_allclose(accuracy.log_softmax(logits)[0, :2], np.log(0.5))


def test_windows_and_the_tokens_that_follow():
    windows = accuracy.windows_of(list(range(11)), 4, beginning=[])
    assert windows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert accuracy.following_tokens(windows, 0).tolist() == [1, 4, 7]
    assert accuracy.following_tokens(windows, 2).tolist() == [-1, -1, -1]
    assert accuracy.windows_of([5, 6], 4, beginning=[1]).tolist() == [[1, 5, 6]]


def test_a_tiny_model(tmp_path: Path, monkeypatch, capsys):
    save_tiny_gguf(tmp_path / "m.gguf", quantization="Q8_0")
    command = f"accuracy.py --model {tmp_path / 'm.gguf'} --tokens 120 --window 40"
    monkeypatch.setattr("sys.argv", command.split())
    accuracy.main()
    lines = capsys.readouterr().out.splitlines()
    assert "120 tokens in windows of 40" in lines[0]
    divergence = {line[:32].strip(): float(line[32:].split()[0]) for line in lines[2:]}
    assert divergence["float32"] == 0
    assert 0 < divergence["packed, float32 KV"] < 0.1
    assert 0 < divergence["float32, float16 KV"] < 1e-4


def test_what_quantization_makes_of_floats(tmp_path: Path, monkeypatch, capsys):
    folder = make_tiny_model(tmp_path)
    names = [f"--quantization {bits}, float16 KV" for bits in ("int8", "int4")]
    command = ["accuracy.py", "--model", str(folder), "--tokens", "40", "--window", "20"]
    # argparse takes what begins with dashes for an option, unless it holds a space.
    monkeypatch.setattr("sys.argv", [*command, "--only", *names])
    accuracy.main()
    lines = capsys.readouterr().out.splitlines()
    divergence = [float(line[32:].split()[0]) for line in lines[2:]]
    assert [line[:32].strip() for line in lines[2:]] == ["float32", *names]
    assert 0 == divergence[0] < divergence[1] < divergence[2] < 1


def test_floats_of_a_gguf_are_written_once(tmp_path: Path):
    save_tiny_gguf(tmp_path / "m.gguf", quantization="Q8_0")
    files = resolve(str(tmp_path / "m.gguf"))
    floats = accuracy.write_floats(files, tmp_path / "floats")
    name, checkpoints = "model.layers.0.mlp.up_proj.weight", []
    for source in (files, floats):
        checkpoints.append(open_checkpoint(source, ModelConfig.from_files(source)))
    assert checkpoints[1].format(name) == "float32"
    assert (checkpoints[0].read(name) == checkpoints[1].read(name)).all()
    written = (tmp_path / "floats" / "model.safetensors").stat().st_mtime_ns
    assert accuracy.write_floats(files, tmp_path / "floats") == floats
    assert (tmp_path / "floats" / "model.safetensors").stat().st_mtime_ns == written
