"""GPTQ, AWQ and compressed-tensors checkpoints of integers: their values, what stays packed, and what they
compute, against Transformers with the weights that the formats say they have."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import integer_checkpoints as written
from helpers.drive import generate
from helpers.integer_checkpoints import Quantised, QuantisedFolder, Writer, save_quantised
from helpers.random_runner import new_runner
from helpers.tiny_models import load_reference

from streamllm import _native
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.stored_rows import StoredRows
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

SIZES = {"hidden_size": 128, "intermediate_size": 192}
UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.1.mlp.down_proj"


def ct_config(kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        config: the ``quantization_config``.
        group_size: 0: the whole row.
        formats: of the stored rows with 128 and with 192 columns.
    """

    config: dict[str, Any]
    write: Writer
    bits: int
    group_size: int
    symmetric: bool
    formats: tuple[str, str]
    options: dict[str, Any] = field(default_factory=dict)

    def quantise(self, weight: np.ndarray) -> Quantised:
        group_size = self.group_size or weight.shape[1]
        return written.quantise(weight, self.bits, group_size, symmetric=self.symmetric, **self.options)

    def save(self, folder: Path, **fields: Any) -> QuantisedFolder:
        return save_quantised(folder, self.write, self.config, self.quantise, **{**SIZES, **fields})


def gptq_config(bits: int, group_size: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, **changes}


COARSE = {"coarse_scales": True}
CASES = {
    "gptq": Case(gptq_config(4, 32), written.gptq(4), 4, 32, False, ("int4_32", "int4_32")),
    "gptq-128": Case(gptq_config(4, 128), written.gptq(4), 4, 128, True, ("int4_128", "int4_64")),
    "gptq-64-v2": Case(
        gptq_config(4, 64, checkpoint_format="gptq_v2"),
        written.gptq(4, 0, index=False), 4, 64, False, ("int4_64", "int4_64"),
    ),
    "gptq-8": Case(gptq_config(8, 64), written.gptq(8), 8, 64, False, ("int8_64", "int8_64")),
    "gptq-8-rows": Case(gptq_config(8, -1), written.gptq(8), 8, 0, True, ("int8_128", "int8_64")),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        written.awq, 4, 64, False, ("int4_64", "int4_64"),
    ),
    "ct-w4-groups": Case(
        ct_config("pack-quantized", 4, strategy="group", group_size=64),
        written.pack_quantized(4), 4, 64, True, ("int4_64", "int4_64"), COARSE,
    ),
    "ct-w4-zeros": Case(
        ct_config("pack-quantized", 4, strategy="group", group_size=32, symmetric=False),
        written.pack_quantized(4, symmetric=False), 4, 32, False, ("int4_32", "int4_32"), COARSE,
    ),
    "ct-w8-zeros": Case(
        ct_config("pack-quantized", 8, strategy="channel", symmetric=False),
        written.pack_quantized(8, symmetric=False, packed_zeros=False),
        8, 0, False, ("int8_128", "int8_64"), COARSE,
    ),
    "ct-int8-rows": Case(
        ct_config("int-quantized", 8, strategy="channel"),
        written.int_quantized, 8, 0, True, ("int8_128", "int8_64"),
    ),
    "ct-int8-zeros": Case(
        ct_config("int-quantized", 8, strategy="channel", symmetric=False),
        partial(written.int_quantized, symmetric=False), 8, 0, False, ("int8_128", "int8_64"),
    ),
}  # fmt: skip


def load(path: Path) -> tuple[ModelConfig, Checkpoint]:
    files = ModelFiles(name="m", served_name="m", kind="folder", path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def runner(path: Path, mode: str) -> ModelRunner:
    config, checkpoint = load(path)
    return new_runner(
        config,
        checkpoint,
        weight_mode=mode,
        block_size=16,
        num_blocks=40,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        kv_cache_dtype="float32",
        max_model_len=128,
        threads=1,
        progress=False,
    )


def logits_and_expected(made: QuantisedFolder, mode: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the model computes, and what Transformers does with the dequantised weights."""
    reference, model = load_reference(made.plain), runner(made.path, mode)
    prompts = [np.random.default_rng(0).integers(0, 320, length).tolist() for length in (5, 40)]
    results = []
    for run in generate(model, prompts, max_tokens=2, budget=33):
        with torch.no_grad():
            expected = reference(torch.tensor([run.tokens[:-1]])).logits[0, len(run.prompt) - 1 :]
        results.append((np.array(run.logits), expected.numpy()))
    model.close()
    return results


def product(x: np.ndarray, stored: StoredRows) -> np.ndarray:
    """``x`` times the transposed weight, by the native kernel."""
    rows, columns = x.shape
    weight = _native.PackedMatrix(columns)
    weight.append_rows(stored.format, stored.data.ctypes.data, *stored.data.shape)
    out = np.empty((rows, weight.n), np.float32)
    plan = _native.Plan(_native.ThreadPool(1))
    plan.linear(x.ctypes.data, columns, weight, 0, out.ctypes.data, weight.n, on_outputs=False)
    plan.run(rows, 0, 0)
    return out


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_what_the_format_says(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    made = case.save(tmp_path)
    _, checkpoint = load(made.path)
    for module, matrix in made.matrices.items():
        weight, columns = f"{module}.weight", matrix.codes.shape[1]
        assert checkpoint.shape(weight) == matrix.codes.shape
        assert checkpoint.format(weight) == case.formats[columns != 128]
        stored = checkpoint.read_stored(weight)
        assert stored.format == checkpoint.format(weight)
        assert stored.data.nbytes == checkpoint.num_bytes(weight)
        np.testing.assert_array_equal(checkpoint.read(weight), matrix.values)
        x = np.random.default_rng(1).standard_normal((3, columns), np.float32)
        # Each activation is off by at most half a step of its group of 32, max|x| / 254.
        steps = np.abs(x).reshape(3, -1, 32).max(-1).repeat(32, axis=-1) / 254
        error = np.abs(product(x, stored) - x.astype(np.float64) @ matrix.values.T)
        assert (error <= steps @ np.abs(matrix.values.T) * 1.001 + 1e-5).all()
    assert len(made.matrices) == 14
    assert checkpoint.format("lm_head.weight") == "float32"
    _, plain = load(made.plain)
    assert checkpoint.names() == plain.names()


@pytest.mark.parametrize("name", CASES)
def test_models_compute_what_transformers_computes(tmp_path: Path, name: str) -> None:
    made = CASES[name].save(tmp_path)
    for actual, expected in logits_and_expected(made, "float32"):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    # The rounding of activations grows in a model of random weights; wrong weights would leave no likeness.
    for actual, expected in logits_and_expected(made, "packed"):
        assert np.sqrt(np.mean((actual - expected) ** 2)) < 0.2 * expected.std()


@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3moe", "mixtral"])
@pytest.mark.parametrize("name", ["gptq-128", "awq", "ct-w4-groups"])
def test_other_families(tmp_path: Path, family: str, name: str) -> None:
    """Biases, joined projections, experts."""
    fields = {"moe_intermediate_size": 64} if family == "qwen3moe" else {}
    made = CASES[name].save(tmp_path, family=family, **fields)
    assert any(".experts." in module for module in made.matrices) == (family in ("qwen3moe", "mixtral"))
    for actual, expected in logits_and_expected(made, "float32"):
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_weights_are_as_large_as_planned(tmp_path: Path) -> None:
    made = CASES["gptq-128"].save(tmp_path)
    _, checkpoint = load(made.path)
    model = runner(made.path, "packed")
    # The head's 320 rows and all others are whole panels.
    assert model.weight_bytes == weight_bytes(checkpoint, CpuOps.packed_formats, "packed")
    dense = weight_bytes(checkpoint, CpuOps.packed_formats, "float32")
    of_matrices = sum(matrix.codes.size for matrix in made.matrices.values())
    packed = sum(checkpoint.num_bytes(f"{module}.weight") for module in made.matrices)
    assert dense - model.weight_bytes == 4 * of_matrices - packed
    assert packed < of_matrices * 0.64
    model.close()


@pytest.mark.parametrize("name", ["gptq", "ct-w4-zeros"])
def test_scattered_groups_become_floats(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    write = {"gptq": written.gptq(4), "ct-w4-zeros": written.pack_quantized(4, symmetric=False, index=True)}[
        name
    ]
    rng = np.random.default_rng(3)

    def quantise(weight: np.ndarray) -> Quantised:
        order = rng.permutation(weight.shape[1])
        return written.quantise(weight, 4, 32, symmetric=False, order=order, coarse_scales=True)

    made = save_quantised(tmp_path, write, case.config, quantise, **SIZES)
    with caplog.at_level(logging.WARNING, logger="streamllm.models"):
        _, checkpoint = load(made.path)
    assert len(caplog.records) == 1
    assert "14 matrices such as model.layers.0." in caplog.text and "--quantization int8" in caplog.text
    assert checkpoint.format(f"{UP}.weight") == "float32"
    assert checkpoint.num_bytes(f"{UP}.weight") == 4 * 192 * 128
    for module, matrix in made.matrices.items():
        np.testing.assert_array_equal(checkpoint.read(f"{module}.weight"), matrix.values)
        stored = checkpoint.read_stored(f"{module}.weight")
        np.testing.assert_array_equal(stored.data.view(np.float32), matrix.values)


def test_groups_in_another_order_stay_packed(tmp_path: Path) -> None:
    """What the columns of a block share is what counts."""

    def quantise(weight: np.ndarray) -> Quantised:
        order = np.arange(weight.shape[1]).reshape(-1, 32)[::-1].ravel()
        return written.quantise(weight, 4, 64, symmetric=False, order=order)

    made = save_quantised(tmp_path, written.gptq(4), gptq_config(4, 64, desc_act=True), quantise, **SIZES)
    _, checkpoint = load(made.path)
    assert checkpoint.format(f"{UP}.weight") == "int4_64" and checkpoint.format(f"{DOWN}.weight") == "int4_64"
    np.testing.assert_array_equal(checkpoint.read(f"{DOWN}.weight"), made.matrices[DOWN].values)


def test_a_scale_for_a_whole_tensor(tmp_path: Path) -> None:
    def quantise(weight: np.ndarray) -> Quantised:
        scales = np.full((len(weight), 1), np.abs(weight).max() / 127, np.float16)
        codes = np.clip(np.rint(weight / scales.astype(np.float32)), -128, 127).astype(np.int64) + 128
        return Quantised(codes, scales, np.full_like(codes[:, :1], 128), np.zeros(weight.shape[1], np.int64))

    def write(matrix: Quantised) -> dict[str, torch.Tensor]:
        return {**written.int_quantized(matrix), "weight_scale": written.tensor(matrix.scales[0])}

    config = ct_config("int-quantized", 8, strategy="tensor")
    made = save_quantised(tmp_path, write, config, quantise, **SIZES)
    _, checkpoint = load(made.path)
    np.testing.assert_array_equal(checkpoint.read(f"{UP}.weight"), made.matrices[UP].values)


def test_schemes_of_several_groups(tmp_path: Path) -> None:
    """A name counts more than a pattern, and that more than a class."""
    config = ct_config("pack-quantized", 8, strategy="channel")
    groups = config["config_groups"]
    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups["group_1"] = {"targets": ["re:.*down_proj$"], "weights": four}
    made = save_quantised(
        tmp_path,
        lambda matrix: written.pack_quantized(4 if matrix.scales.shape[1] > 1 else 8)(matrix),
        config,
        lambda weight: (
            written.quantise(weight, 4, 32, symmetric=True, coarse_scales=True)
            if weight.shape[1] == 192
            else written.quantise(weight, 8, 128, symmetric=True, coarse_scales=True)
        ),
        **SIZES,
    )
    _, checkpoint = load(made.path)
    assert (
        checkpoint.format(f"{DOWN}.weight") == "int4_32" and checkpoint.format(f"{UP}.weight") == "int8_128"
    )
    for module in (UP, DOWN):
        np.testing.assert_array_equal(checkpoint.read(f"{module}.weight"), made.matrices[module].values)


@pytest.mark.parametrize(
    ("file", "content", "case"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq-128"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}, "awq"),
    ],
)
def test_older_files_have_a_config_of_their_own(
    tmp_path: Path, file: str, content: dict[str, Any], case: str
) -> None:
    found = CASES[case]
    made = save_quantised(tmp_path, found.write, None, found.quantise, **SIZES)
    (made.path / file).write_text(json.dumps(content))
    _, checkpoint = load(made.path)
    np.testing.assert_array_equal(checkpoint.read(f"{UP}.weight"), made.matrices[UP].values)


def test_the_config_of_a_text_model_counts(tmp_path: Path) -> None:
    made = CASES["awq"].save(tmp_path)
    path = made.path / "config.json"
    values = json.loads(path.read_text())
    outer = {"quantization_config": values.pop("quantization_config"), "tie_word_embeddings": False}
    path.write_text(json.dumps({"model_type": "llava", "text_config": values, **outer}))
    _, checkpoint = load(made.path)
    assert checkpoint.format(f"{UP}.weight") == "int4_64"


def test_quantization_at_load_leaves_them_packed(tmp_path: Path) -> None:
    made = CASES["awq"].save(tmp_path)
    files = ModelFiles(name="m", served_name="m", kind="folder", path=made.path)
    checkpoint = open_checkpoint(files, ModelConfig.from_files(files), quantization="int8")
    assert checkpoint.format(f"{UP}.weight") == "int4_64" and checkpoint.format("lm_head.weight") == "q8_0"
