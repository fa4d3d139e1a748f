"""Checkpoints of 8-bit floats: their values, what stays packed, what they compute against Transformers with
the weights that they stand for, and what is refused. The layouts are written here with torch's float8."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drive import generate
from helpers.tiny_models import load_reference, new_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.float8_rows import float8_values
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = {"hidden_size": 192, "intermediate_size": 320}
"""One block of 128 and a half, two and a half."""
UP = "model.layers.1.mlp.up_proj.weight"

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""The tensors of a float32 matrix under its name, and what they stand for."""


def blocks(
    high: int, wide: int, suffix: str, dtype: torch.dtype = torch.float32, kind: torch.dtype = E4M3
) -> Writer:
    """A scale for each ``high`` rows and ``wide`` columns; 0: for all of them."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        tall, broad = high or rows, wide or columns
        padded = torch.nn.functional.pad(weight, (0, -columns % broad, 0, -rows % tall))
        cut = padded.view(padded.shape[0] // tall, tall, padded.shape[1] // broad, broad)
        scales = (cut.abs().amax((1, 3)) / torch.finfo(kind).max).to(dtype)
        each = scales.float().repeat_interleave(tall, 0).repeat_interleave(broad, 1)[:rows, :columns]
        limit = torch.finfo(kind).max
        codes = (weight / each).clamp(-limit, limit).to(kind)
        return {name: codes, name + suffix: scales}, codes.float() * each

    return write


def reshaped(write: Writer, *shape: int) -> Writer:
    """The same with the scales in another shape, and static scales of activations beside them."""

    def written(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = write(name, weight)
        scale = next(key for key in tensors if key != name)
        tensors[scale] = tensors[scale].reshape(shape)
        for activations in ("input_scale", "activation_scale"):
            tensors[name.replace("weight", activations)] = torch.tensor(0.5)
        return tensors, values

    return written


def without_scale(kind: torch.dtype) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {name: weight.to(kind)}, weight.to(kind).float()

    return write


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
CASES: dict[str, tuple[dict[str, Any] | None, Writer]] = {
    "deepseek": (DEEPSEEK, blocks(128, 128, "_scale_inv")),
    "deepseek-rows-of-64": (DEEPSEEK | {"weight_block_size": [64, 256]}, blocks(64, 256, "_scale_inv")),
    "mistral": (STATIC | {"weight_block_size": None}, reshaped(blocks(0, 0, "_scale_inv", torch.bfloat16))),
    "autofp8": (STATIC, reshaped(blocks(0, 0, "_scale"), 1)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, blocks(1, 0, "_scale")),
    "ct-tensor": (compressed("tensor"), reshaped(blocks(0, 0, "_scale", torch.bfloat16), 1)),
    "ct-channel": (compressed("channel"), blocks(1, 0, "_scale", torch.float16)),
    "ct-block": (compressed("block", block_structure=[128, 128]), blocks(128, 128, "_scale")),
    "ct-group-128": (compressed("group", group_size=128), blocks(1, 128, "_scale")),
    "no-config": (None, without_scale(E4M3)),
}
DENSE: dict[str, tuple[dict[str, Any] | None, Writer]] = {
    "blocks-of-32": (DEEPSEEK | {"weight_block_size": [32, 32]}, blocks(32, 32, "_scale_inv")),
    "e5m2": (STATIC, reshaped(blocks(0, 0, "_scale", kind=E5M2))),
    "e5m2-no-config": (None, without_scale(E5M2)),
}


def save(folder: Path, case: tuple[dict[str, Any] | None, Writer], family: str = "llama") -> dict[str, Any]:
    """Writes the model as float8 into ``fp8`` and with the same values as floats into ``plain``; returns the
    values of the quantised matrices."""
    config, write = case
    model_config, tensors = tiny(family)
    values: Tensors = {}
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            del stored[name]
            parts, values[name] = write(name, tensor)
            stored |= parts
    for path, written in (("plain", tensors | values), ("fp8", stored)):
        model_config.save_pretrained(folder / path)
        save_file(written, folder / path / "model.safetensors", {"format": "pt"})
    if config is not None:
        edit(folder / "fp8", quantization_config=config)
    return values


@cache
def tiny(family: str) -> tuple[Any, Tensors]:
    """The config and the weights of a model."""
    torch.manual_seed(0)
    model = new_tiny_model(family, **SIZES)
    return model.config, {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(path: Path) -> tuple[ModelConfig, Checkpoint]:
    files = ModelFiles(name="m", served_name="m", kind="folder", path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_files_bytes_and_stand_for_its_values(tmp_path, case):
    values = save(tmp_path, CASES[case])
    _, checkpoint = load(tmp_path / "fp8")
    codes = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, expected in values.items():
        assert checkpoint.format(name) == "float8_e4m3" and checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(checkpoint.read(name), expected.numpy())
        stored = checkpoint.read_stored(name)
        np.testing.assert_array_equal(float8_values(stored), expected.numpy())
        columns = expected.shape[1]
        np.testing.assert_array_equal(stored.data[:, -columns:], codes[name].view(torch.uint8).numpy())
        assert checkpoint.num_bytes(name) == stored.data.nbytes
        assert stored.data.shape[1] == columns + 4 * -(-columns // 128)


@pytest.mark.parametrize("case", DENSE)
def test_what_has_no_kernel_becomes_float32(tmp_path, caplog, case):
    values = save(tmp_path, DENSE[case])
    with caplog.at_level(logging.WARNING):
        _, checkpoint = load(tmp_path / "fp8")
    assert "14 matrices such as model.layers.0.mlp.down_proj.weight" in caplog.text
    for name, expected in values.items():
        assert checkpoint.format(name) == checkpoint.read_stored(name).format == "float32"
        np.testing.assert_array_equal(checkpoint.read(name), expected.numpy())
        assert checkpoint.num_bytes(name) == checkpoint.read_stored(name).data.nbytes == 4 * expected.numel()


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("deepseek", "llama"),
        ("fbgemm", "qwen3"),
        ("mistral", "phi3"),
        ("no-config", "llama"),
        ("e5m2", "llama"),
    ],
)
def test_models_compute_what_transformers_does_with_their_values(tmp_path, case, family):
    save(tmp_path, (CASES | DENSE)[case], family)
    config, checkpoint = load(tmp_path / "fp8")
    prompts = [np.random.default_rng(0).integers(0, 320, length).tolist() for length in (5, 40)]
    reference, logits = load_reference(tmp_path / "plain"), {}
    for mode in ("float32", "packed"):
        runner = ModelRunner(
            config, checkpoint, block_size=16, num_blocks=16, max_num_batched_tokens=64, max_num_seqs=4,
            kv_cache_dtype="float32", max_model_len=64, threads=1, progress=False, weight_mode=mode,
        )  # fmt: skip
        assert runner.weight_bytes == weight_bytes(checkpoint, CpuOps.packed_formats, mode)
        runs = generate(runner, prompts, max_tokens=1, budget=33)
        logits[mode] = np.array([run.logits[0] for run in runs])
        runner.close()
    with torch.no_grad():
        expected = [reference(torch.tensor([prompt])).logits[0, -1].numpy() for prompt in prompts]
    np.testing.assert_allclose(logits["float32"], expected, atol=1e-4)
    # Activations are float32 there too.
    np.testing.assert_allclose(logits["packed"], expected, atol=1e-4)


def test_transformers_reads_the_same(tmp_path):
    """Its own reader of DeepSeek's layout, which wants whole blocks, and gives bfloat16."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    case = (DEEPSEEK | {"weight_block_size": [64, 64]}, blocks(64, 64, "_scale_inv"))
    save(tmp_path, case)
    edit(tmp_path / "fp8", quantization_config=case[0] | {"scale_fmt": "float"})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    read = model.state_dict()
    _, checkpoint = load(tmp_path / "fp8")
    for name in ("model.layers.0.self_attn.q_proj.weight", UP):
        np.testing.assert_allclose(checkpoint.read(name), read[name].float().numpy(), rtol=2**-7, atol=1e-6)


def test_memory_is_a_byte_an_element_and_the_scales(tmp_path):
    values = save(tmp_path, CASES["deepseek"])
    _, checkpoint = load(tmp_path / "fp8")
    elements = sum(value.numel() for value in values.values())
    packed = weight_bytes(checkpoint, CpuOps.packed_formats, "packed")
    exact = weight_bytes(checkpoint, CpuOps.packed_formats, "float32")
    scales = sum(len(value) * -(-value.shape[1] // 128) for value in values.values())
    assert exact - packed == 3 * elements - 4 * scales


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_stays_nan(tmp_path, code):
    save(tmp_path, CASES["fbgemm"])
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    tensors[UP].view(torch.uint8)[5, 7] = code
    save_file(tensors, path)
    _, checkpoint = load(tmp_path / "fp8")
    for values in (checkpoint.read(UP), float8_values(checkpoint.read_stored(UP))):
        assert np.isnan(values[5, 7]) and np.isnan(values).sum() == 1


def test_vectors_too(tmp_path):
    save(tmp_path, CASES["no-config"])
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(E4M3)
    save_file(tensors, path)
    _, checkpoint = load(tmp_path / "fp8")
    np.testing.assert_array_equal(
        checkpoint.read("model.norm.weight"), tensors["model.norm.weight"].float().numpy()
    )


def remove(tensors: Tensors) -> None:
    del tensors[f"{UP}_scale_inv"]


def misshape(tensors: Tensors) -> None:
    tensors[f"{UP}_scale_inv"] = torch.ones(2, 2)


def as_powers_of_two(tensors: Tensors) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"].to(torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, rf"lack the scale of the tensor {UP}, which is F8_E4M3: neither {UP}_scale_inv nor"),
        (misshape, rf"{UP}_scale_inv has shape \[2, 2\]; for {UP} of shape \[320, 192\] .*\[3, 2\]"),
        (as_powers_of_two, rf"{UP}_scale_inv has the type U8; scales of 8-bit floats are F32"),
    ],
)
def test_wrong_scales_are_named(tmp_path, change, message):
    save(tmp_path, CASES["deepseek"])
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "fp8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DEEPSEEK | {"weight_block_size": [128]},
            r"weight_block_size must be two positive integers, got \[128",
        ),
        (DEEPSEEK | {"weight_block_size": [128, 0]}, "weight_block_size must be two positive integers"),
        (DEEPSEEK | {"expert_dtype": "fp4"}, "experts quantised to 'fp4' are not supported. Use"),
        (compressed("tensor", symmetric=False), "group_0.weights of 8-bit floats with zero points are not"),
        (compressed("block", block_structure="2:4"), "weights.block_structure must be two positive integers"),
        (compressed("group"), "has no group_size"),
        (
            compressed("tensor") | {"format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized' is not supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' are not supported. Use"),
        ({"quant_method": "mxfp8"}, "'mxfp8' are not supported"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, config, message):
    save(tmp_path, CASES["ct-tensor"])
    edit(tmp_path / "fp8", quantization_config=config)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "fp8")
