"""--quantization: float matrices quantised as they are read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
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


def test_what_is_quantised_already_or_has_no_whole_groups_stays(tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", quantization="Q5_0")
    checkpoint = open_quantized(files_of(tmp_path / "m.gguf"), "int8")
    assert checkpoint.format(GATE) == "q5_0"
    folder = make_tiny_model(tmp_path / "odd", hidden_size=48, intermediate_size=96)
    checkpoint = open_quantized(files_of(folder), "int8")
    assert checkpoint.format(GATE) == "float32"
    assert checkpoint.format("model.layers.1.mlp.down_proj.weight") == "q8_0"


def test_memory_and_results_of_a_model(tmp_path):
    files = files_of(make_tiny_model(tmp_path, dtype="bfloat16"))
    config, prompts = ModelConfig.from_files(files), [[5, 6, 7, 8], list(range(40))]
    logits = {}
    for quantization in (None, "int8"):
        checkpoint = open_quantized(files, quantization)
        runner = ModelRunner(
            config, checkpoint, block_size=16, num_blocks=16, max_num_batched_tokens=64, max_num_seqs=4,
            kv_cache_dtype="float32", max_model_len=64, threads=1, progress=False, weight_mode="packed",
        )  # fmt: skip
        expected = weight_bytes(checkpoint, CpuOps.packed_formats, "packed")
        assert runner.weight_bytes == expected
        runs = generate(runner, prompts, max_tokens=1)
        logits[quantization] = (expected, np.array([run.logits[0] for run in runs]))
        runner.close()
    (plain, exact), (eight_bits, int8) = logits.values()
    assert 0.5 < eight_bits / plain < 0.6
    assert 0 < np.sqrt(np.square(int8 - exact).mean()) < exact.std() / 10


def test_the_setting(tmp_path):
    folder = make_tiny_model(tmp_path)
    llm = LLM(str(folder), quantization="int8", max_model_len=64)
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    llm.shutdown()
    with pytest.raises(ConfigError, match="--quantization int8 does not go with --dtype float32"):
        LLM(str(folder), quantization="int8", dtype="float32")
    with pytest.raises(ConfigError, match="--quantization must be one of int8; got 'awq'"):
        LLM(str(folder), quantization="awq")
