"""--quantization: float matrices quantised as they are read."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError
from streamllm.models.calibration import column_importance
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.load_quantization import QuantizedCheckpoint, to_q4_1
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

GATE = "model.layers.1.mlp.gate_proj.weight"


def files_of(path: Path) -> ModelFiles:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    return ModelFiles(name="m", served_name="m", kind=kind, path=path)


def open_quantized(files: ModelFiles, quantization: str | None) -> Checkpoint:
    return open_checkpoint(files, ModelConfig.from_files(files), quantization=quantization)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_have_the_groups_of_their_values(tmp_path, dtype):
    files = files_of(make_tiny_model(tmp_path, dtype=dtype))
    plain, checkpoint = open_quantized(files, None), open_quantized(files, "int8")
    assert checkpoint.names() == plain.names()
    for name in checkpoint.names():
        values = plain.read(name)
        if values.ndim == 1:
            assert checkpoint.format(name) == dtype
            continue
        stored = checkpoint.read_stored(name)
        assert checkpoint.format(name) == stored.format == "q8_0"
        assert checkpoint.num_bytes(name) == stored.data.nbytes
        read = gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType.Q8_0)
        # Half of a step of max / 127; the scale, rounded to float16, adds a little.
        largest = np.abs(values.reshape(-1, 32)).max(1, keepdims=True)
        assert (np.abs(read - values).reshape(-1, 32) <= largest * (0.5 / 127 + 2**-11)).all()


@pytest.mark.parametrize("quantization, becomes", [("int8", "q8_0"), ("int4", "q4_1")])
def test_what_is_quantised_already_or_has_no_whole_groups_stays(quantization, becomes, tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", quantization="Q5_0")
    checkpoint = open_quantized(files_of(tmp_path / "m.gguf"), quantization)
    assert checkpoint.format(GATE) == "q5_0"
    folder = make_tiny_model(tmp_path / "odd", hidden_size=48, intermediate_size=96)
    checkpoint = open_quantized(files_of(folder), quantization)
    assert checkpoint.format(GATE) == "float32"
    assert checkpoint.format("model.layers.1.mlp.down_proj.weight") == becomes


FOUR_BITS = {
    "llama": {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "qwen2moe": {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt-oss": {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "mixtral": {"q_proj", "k_proj", "o_proj", "w1", "w2", "w3"},
    "opt": {"q_proj", "k_proj", "out_proj", "fc1", "fc2"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
}


@pytest.mark.parametrize("family", FOUR_BITS)
def test_four_bits_for_all_but_what_is_small_or_sensitive(family, tmp_path):
    files = files_of(make_tiny_model(tmp_path, family))
    checkpoint = open_quantized(files, "int4")
    for name in checkpoint.names():
        if len(checkpoint.shape(name)) == 2:
            is_robust = name.split(".")[-2] in FOUR_BITS[family]
            assert checkpoint.format(name) == ("q4_1" if is_robust else "q8_0"), name
            assert checkpoint.read_stored(name).data.nbytes == checkpoint.num_bytes(name)


def test_columns_with_large_inputs_have_the_smaller_errors(tmp_path):
    """Of one layer's matrix: what it is off by, once weighed by the inputs and once not."""
    files = files_of(make_tiny_model(tmp_path, hidden_size=128, rms_norm_eps=1e-6))
    config, name = ModelConfig.from_files(files), "model.layers.0.mlp.down_proj.weight"
    plain, checkpoint = open_quantized(files, None), open_quantized(files, "int4")
    values, importance = plain.read(name), column_importance(plain, config, files)[name]
    weighed, alike = (
        np.square(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_1) - values)
        for rows in (checkpoint.read_stored(name).data, to_q4_1(values))
    )
    assert (weighed @ importance).sum() < 0.97 * (alike @ importance).sum()
    assert weighed.sum() > alike.sum()


def test_inputs_are_measured_once_and_only_if_they_are_needed(tmp_path):
    calls = []
    plain = open_quantized(files_of(make_tiny_model(tmp_path)), None)
    checkpoint = QuantizedCheckpoint(plain, "int4", lambda: calls.append(1) or {})
    for name in sorted(checkpoint.names()):
        checkpoint.format(name), checkpoint.num_bytes(name)
    checkpoint.read_stored("lm_head.weight")
    assert calls == []
    for layer in range(2):
        checkpoint.read_stored(f"model.layers.{layer}.mlp.up_proj.weight")
    assert calls == [1]


def test_reading_takes_the_memory_of_one_tensor(tmp_path):
    """Beyond what numpy and the tokenizer take, which a first model warms up."""
    folders = [
        make_tiny_model(tmp_path / str(layers), dtype="bfloat16", hidden_size=256, intermediate_size=1024,
                        num_hidden_layers=layers)
        for layers in (1, 12)
    ]  # fmt: skip
    peaks = []
    for folder in folders:
        checkpoint = open_quantized(files_of(folder), "int4")
        tracemalloc.start()
        for name in sorted(checkpoint.names()):
            checkpoint.read_stored(name)
            checkpoint.release(name)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    largest = 4 * 256 * 1024
    assert peaks[1] < peaks[0] + largest


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_memory_and_results_of_a_model(quantization, tmp_path):
    files = files_of(make_tiny_model(tmp_path, dtype="bfloat16", hidden_size=128, intermediate_size=256))
    config, prompts = ModelConfig.from_files(files), [[5, 6, 7, 8], list(range(40))]
    logits = []
    for setting in (None, quantization):
        checkpoint = open_quantized(files, setting)
        runner = ModelRunner(
            config, checkpoint, block_size=16, num_blocks=16, max_num_batched_tokens=64, max_num_seqs=4,
            kv_cache_dtype="float32", max_model_len=64, threads=1, progress=False, weight_mode="packed",
        )  # fmt: skip
        expected = weight_bytes(checkpoint, CpuOps.packed_formats, "packed")
        assert runner.weight_bytes == expected
        runs = generate(runner, prompts, max_tokens=1)
        logits.append((expected, np.array([run.logits[0] for run in runs])))
        runner.close()
    (plain, exact), (reduced, quantised) = logits
    low, high, error = (0.5, 0.6, 0.1) if quantization == "int8" else (0.35, 0.45, 0.4)
    assert low < reduced / plain < high
    assert 0 < np.sqrt(np.square(quantised - exact).mean()) < exact.std() * error


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_setting(quantization, tmp_path):
    folder = make_tiny_model(tmp_path)
    llm = LLM(str(folder), quantization=quantization, max_model_len=64)
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    llm.shutdown()
    with pytest.raises(ConfigError, match=f"--quantization {quantization} does not go with --dtype float32"):
        LLM(str(folder), quantization=quantization, dtype="float32")
    with pytest.raises(ConfigError, match="--quantization must be one of int8, int4; got 'awq'"):
        LLM(str(folder), quantization="awq")
