"""Weights that stay as their file holds them: what the loader keeps, and what the model then computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.llama import load_weights
from streamllm.models.loading_progress import LoadingProgress
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import CheckpointLoader, weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.stored_rows import StoredRows
from streamllm.ops.torch_ops import TorchOps
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

NO_PROGRESS = LoadingProgress(0, show=False)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def model_files(path: Path) -> ModelFiles:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    return ModelFiles(name=path.name, served_name=path.name, kind=kind, path=path)


def save_model(folder: Path, stored_as: str, **fields: Any) -> ModelFiles:
    """A tiny Llama with its matrices in a type: of safetensors in lower case, of GGUF in upper case."""
    if stored_as.islower():
        return model_files(make_tiny_model(folder, dtype=stored_as, **fields))
    save_tiny_gguf(folder / "m.gguf", quantization=stored_as, **fields)
    return model_files(folder / "m.gguf")


def make_ops() -> CpuOps:
    return CpuOps(threads=1, max_tokens=1, max_outputs=1)


def make_runner(files: ModelFiles, weight_mode: str, **changes: Any) -> ModelRunner:
    config = ModelConfig.from_files(files)
    settings = {
        "block_size": 16,
        "num_blocks": 64,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_dtype": "float32",
        "max_model_len": 256,
        "threads": 2,
        "progress": False,
        **changes,
    }
    return ModelRunner(config, open_checkpoint(files, config), weight_mode=weight_mode, **settings)


def to_float32(rows: StoredRows) -> np.ndarray:
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return gguf.quants.dequantize(
        rows.data, gguf.GGMLQuantizationType[names.get(rows.format, rows.format.upper())]
    )


@pytest.mark.parametrize(
    ("stored_as", "format"),
    [
        ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"),
        ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"),
        ("Q4_0", "q4_0"), ("Q4_1", "q4_1"), ("Q8_0", "q8_0"), ("Q5_1", "q5_1"),
    ],
)  # fmt: skip
def test_stored_rows_are_the_tensor(tmp_path: Path, stored_as: str, format: str) -> None:
    """In Hugging Face's order too: a GGUF of Llama has the rows of q and k interleaved."""
    files = save_model(tmp_path, stored_as)
    checkpoint = open_checkpoint(files, ModelConfig.from_files(files))
    for name in (Q_PROJ, "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        rows = checkpoint.read_stored(name)
        assert rows.format == checkpoint.format(name) == format
        assert rows.data.nbytes == checkpoint.num_bytes(name)
        assert np.array_equal(to_float32(rows), checkpoint.read(name))
    assert checkpoint.format("model.norm.weight") == ("float32" if stored_as.isupper() else format)


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "Q4_0", "Q5_1", "Q8_0"])
def test_matrices_stay_as_stored(tmp_path: Path, stored_as: str) -> None:
    files = save_model(tmp_path, stored_as, tied=True)
    config, ops = ModelConfig.from_files(files), make_ops()
    checkpoint = open_checkpoint(files, config)
    model = load_weights(
        CheckpointLoader(checkpoint, ops, progress=NO_PROGRESS, weight_mode="packed"), config
    )
    name = stored_as.lower()
    assert model.embed is model.lm_head and model.embed.packed.formats == [name]
    assert model.layers[1].attention.qkv.packed.formats == [name] * 3
    assert model.layers[0].mlp.down.packed.formats == [name]
    # All heights of this model are multiples of 32, so that panels have no padding.
    assert ops.weight_bytes == weight_bytes(checkpoint, ops.packed_formats, "packed")
    exact = make_ops()
    model = load_weights(CheckpointLoader(checkpoint, exact, progress=NO_PROGRESS), config)
    assert model.layers[1].attention.qkv.packed.formats == ["float32"] * 3
    assert exact.weight_bytes == weight_bytes(checkpoint, exact.packed_formats, "float32")
    assert ops.weight_bytes <= exact.weight_bytes


def test_a_type_without_kernel_becomes_float32(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(CpuOps, "packed_formats", CpuOps.packed_formats - {"q5_1"})
    files = save_model(tmp_path, "Q5_1")
    config, ops = ModelConfig.from_files(files), make_ops()
    checkpoint = open_checkpoint(files, config)
    with caplog.at_level(logging.WARNING, "streamllm"):
        model = load_weights(
            CheckpointLoader(checkpoint, ops, progress=NO_PROGRESS, weight_mode="packed"), config
        )
    assert model.layers[0].mlp.gate_up.packed.formats == ["float32"] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "there is no kernel for weights of type q5_1 (model.embed_tokens.weight and maybe others): "
        "they become float32, which takes more memory and time"
    ]
    assert ops.weight_bytes == weight_bytes(checkpoint, ops.packed_formats, "packed")


def test_a_backend_without_packed_formats_gets_float32(tmp_path: Path) -> None:
    files = save_model(tmp_path, "Q8_0")
    config, ops = ModelConfig.from_files(files), TorchOps()
    checkpoint = open_checkpoint(files, config)
    model = load_weights(
        CheckpointLoader(checkpoint, ops, progress=NO_PROGRESS, weight_mode="packed"), config
    )
    expected = checkpoint.read("model.layers.0.mlp.down_proj.weight")
    assert np.array_equal(model.layers[0].mlp.down.weight.numpy(), expected)


class MixedCheckpoint:
    """Three layers of one stack, each of a type of its own, as files of the K types have them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.stored = {}
        for name, quant in (("a", "Q4_1"), ("b", "Q8_0"), ("c", "F16")):
            values = rng.standard_normal((32, 64)).astype(np.float32)
            rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType[quant])
            self.stored[f"{name}.weight"] = StoredRows(
                {"F16": "float16"}.get(quant, quant.lower()), rows.view(np.uint8)
            )

    def names(self) -> set[str]:
        return set(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return (32, 64)

    def format(self, name: str) -> str:
        return self.stored[name].format

    def num_bytes(self, name: str) -> int:
        return self.stored[name].data.nbytes

    def read_stored(self, name: str) -> StoredRows:
        return self.stored[name]

    def release(self, name: str) -> None:
        pass


def test_a_stack_may_mix_formats() -> None:
    checkpoint = MixedCheckpoint()
    loader = CheckpointLoader(checkpoint, make_ops(), progress=NO_PROGRESS, weight_mode="packed")
    matrix = loader.linear([("a", 32), ("b", 32), ("c", 32)], 64)
    assert matrix.packed.formats == ["q4_1", "q8_0", "float16"] and matrix.packed.n == 96
    with pytest.raises(ModelLoadError, match=r"b\.weight has shape \[32, 64\]; the config says \[16, 64\]"):
        loader.linear([("b", 16)], 64)


def test_16_bit_weights_compute_what_their_float32_values_do(tmp_path: Path) -> None:
    files = save_model(tmp_path, "bfloat16")
    prompts = [[5, 6, 7, 8], list(range(40))]
    exact, packed = (
        generate(make_runner(files, mode), prompts, max_tokens=5) for mode in ("float32", "packed")
    )
    for one, two in zip(exact, packed, strict=True):
        assert np.array_equal(np.array(one.logits), np.array(two.logits))


@pytest.mark.parametrize("stored_as", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_weights_are_close_and_do_not_depend_on_the_batch(tmp_path: Path, stored_as: str) -> None:
    files = save_model(tmp_path, stored_as)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 320, length).tolist() for length in (3, 33, 70, 17)]
    runner = make_runner(files, "packed")
    alone = [generate(runner, [prompt], max_tokens=5, budget=128)[0] for prompt in prompts]
    for budget, threads in ((64, 2), (7, 1), (1, 3)):
        other = make_runner(files, "packed", threads=threads)
        for one, two in zip(alone, generate(other, prompts, max_tokens=5, budget=budget), strict=True):
            assert np.array_equal(np.array(one.logits), np.array(two.logits))
    exact = make_runner(files, "float32")
    for prompt, packed in zip(prompts, alone, strict=True):
        one, two = generate(exact, [prompt], max_tokens=1)[0].logits[0], packed.logits[0]
        # Activations are rounded to one part in 254 of their group's largest, at every product.
        assert 0 < np.linalg.norm(one - two) < 0.06 * np.linalg.norm(one)


def test_the_default_model_takes_as_much_memory_as_its_file(default_model_path: Path) -> None:
    files = model_files(default_model_path)
    runner = make_runner(files, "packed")
    assert runner.weight_bytes < 1.01 * default_model_path.stat().st_size
    exact = make_runner(files, "float32")
    prompt = np.random.default_rng(2).integers(0, 49000, 60).tolist()
    one, two = (generate(r, [prompt], max_tokens=1)[0].logits[0] for r in (exact, runner))
    assert np.corrcoef(one, two)[0, 1] > 0.998
