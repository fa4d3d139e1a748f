"""Folders of tiny models with matrices of integers in the layouts of GPTQ, AWQ and compressed-tensors, each
word put together code by code as those formats describe it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row whose code is in each nibble of AWQ's words, from the lowest bits up."""


@dataclass(frozen=True)
class Quantised:
    """A matrix [n, k] as codes from 0 on.

    Attributes:
        codes: [n, k].
        scales, zeros: [n, groups].
        groups: of each column.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float32: what the format says that the matrix is."""
        integers = self.codes.astype(np.int64) - self.zeros[:, self.groups]
        return (self.scales[:, self.groups].astype(np.float64) * integers).astype(np.float32)


def quantise(
    weight: np.ndarray,
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    order: np.ndarray | None = None,
    coarse_scales: bool = False,
) -> Quantised:
    """Rounds to the nearest.

    Args:
        order: which columns the groups take, one group after the other.
        coarse_scales: those are bfloat16 numbers too.
    """
    n, k = weight.shape
    groups = np.empty(k, np.int64)
    groups[np.arange(k) if order is None else order] = np.arange(k) // group_size
    count, largest = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.empty((n, count), np.float16), np.empty((n, count), np.int64)
    for group in range(count):
        columns = weight[:, groups == group]
        low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
        if symmetric:
            scales[:, group] = np.maximum(-low, high) / 2 ** (bits - 1)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            scales[:, group] = (high - low) / largest
            zeros[:, group] = np.clip(np.rint(-low / (high - low) * largest), 0, largest)
    if coarse_scales:
        scales = (scales.view(np.uint16) & 0xFFF8).view(np.float16)
    steps = np.rint(weight / scales[:, groups].astype(np.float32)).astype(np.int64)
    return Quantised(np.clip(steps + zeros[:, groups], 0, largest), scales, zeros, groups)


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes along an axis packed into int32, those of a word from the lowest bits up."""
    per_word = 32 // bits
    moved = np.moveaxis(np.asarray(codes, np.int64), axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // per_word), np.int64)
    for place in range(per_word):
        source = order[place] if order else place
        packed |= moved[..., source::per_word] << (bits * place)
    packed = np.moveaxis(packed, -1, axis).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


Writer = Callable[[Quantised], dict[str, torch.Tensor]]
"""The tensors of one matrix by what comes after its module's name."""


def gptq(bits: int, zero_offset: int = 1, *, index: bool = True) -> Writer:
    def write(matrix: Quantised) -> dict[str, torch.Tensor]:
        zeros = (matrix.zeros - zero_offset) % 2**bits
        parts = {
            "qweight": words(matrix.codes.T, bits, 0),
            "qzeros": words(zeros.T, bits, 1),
            "scales": tensor(matrix.scales.T),
        }
        return {**parts, "g_idx": tensor(matrix.groups.astype(np.int32))} if index else parts

    return write


def awq(matrix: Quantised) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(matrix.codes.T, 4, 1, AWQ_ORDER),
        "qzeros": words(matrix.zeros.T, 4, 1, AWQ_ORDER),
        "scales": tensor(matrix.scales.T),
    }


def pack_quantized(
    bits: int, *, symmetric: bool = True, index: bool = False, packed_zeros: bool = True
) -> Writer:
    def write(matrix: Quantised) -> dict[str, torch.Tensor]:
        parts = {
            "weight_packed": words(matrix.codes, bits, 1),
            "weight_scale": tensor(matrix.scales).to(torch.bfloat16),
            "weight_shape": torch.tensor(matrix.codes.shape),
        }
        if not symmetric and packed_zeros:
            parts["weight_zero_point"] = words(matrix.zeros, bits, 0)
        elif not symmetric:
            parts["weight_zero_point"] = tensor((matrix.zeros - 2 ** (bits - 1)).astype(np.int8))
        if index:
            parts["weight_g_idx"] = tensor(matrix.groups.astype(np.int32))
        return parts

    return write


def int_quantized(matrix: Quantised, *, symmetric: bool = True) -> dict[str, torch.Tensor]:
    parts = {
        "weight": tensor((matrix.codes - 128).astype(np.int8)),
        "weight_scale": tensor(matrix.scales),
    }
    return (
        parts if symmetric else {**parts, "weight_zero_point": tensor((matrix.zeros - 128).astype(np.int8))}
    )


@dataclass
class QuantisedFolder:
    """
    Attributes:
        path: of the folder.
        plain: a folder with the dequantised weights, float32.
        matrices: the quantised ones, by module.
    """

    path: Path
    plain: Path
    matrices: dict[str, Quantised] = field(default_factory=dict)


def save_quantised(
    folder: Path,
    write: Writer,
    config: Mapping[str, Any] | None,
    quantise_matrix: Callable[[np.ndarray], Quantised],
    *,
    family: str = "llama",
    keep: tuple[str, ...] = ("lm_head", "embed_tokens", "gate.weight"),
    **fields: Any,
) -> QuantisedFolder:
    """A tiny model whose matrices are quantised but for those with a name that ends as ``keep`` says.

    Args:
        config: the ``quantization_config``.
        fields: of :func:`make_tiny_model`.
    """
    made = QuantisedFolder(
        make_tiny_model(folder / "quantised", family, **fields),
        make_tiny_model(folder / "plain", family, **fields),
    )
    quantised, plain = {}, {}
    for name, weight in load_file(made.plain / "model.safetensors").items():
        quantised[name] = plain[name] = weight
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or name.endswith(keep) or module.endswith(keep):
            continue
        matrix = quantise_matrix(weight.float().numpy())
        made.matrices[module] = matrix
        del quantised[name]
        quantised |= {f"{module}.{part}": value for part, value in write(matrix).items()}
        plain[name] = tensor(matrix.values)
    save_file(quantised, made.path / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, made.plain / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        edit_config(made.path, quantization_config=dict(config))
    return made


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
