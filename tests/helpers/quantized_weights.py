"""Weights in every format with what they stand for, by somebody else's definition where there is one."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix, WeightRows, quantize_float8, quantize_int8
from streamllm.ops.stored_rows import StoredRows

GROUP_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
FORMATS = ["q4_0", "q4_1", "q8_0", "int8", "float8_e4m3", "dense"]


def stored_groups(
    row_format: str, rows: int, columns: int, rng: np.random.Generator, scale: float = 0.05
) -> StoredRows:
    """Random codes and factors, up to ``scale`` and of either sign."""
    groups = rng.integers(0, 256, (rows, columns // 32, GROUP_BYTES[row_format]), dtype=np.uint8)
    for factor in range(2 if row_format == "q4_1" else 1):
        values = rng.uniform(-scale, scale, groups.shape[:2]).astype(np.float16)
        groups[..., 2 * factor : 2 * factor + 2] = values[..., None].view(np.uint8)
    return StoredRows(row_format, groups.reshape(rows, -1))


def dequantized(stored: StoredRows) -> np.ndarray:
    """What the gguf package makes of stored groups, float32."""
    return dequantize(stored.data, gguf.GGMLQuantizationType[stored.format.upper()])


def random_rows(
    row_format: str, rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[WeightRows, np.ndarray]:
    """A weight, and the float64 values that it stands for."""
    rng = np.random.default_rng(seed)
    if row_format in GROUP_BYTES:
        stored = stored_groups(row_format, rows, columns, rng)
        matrix = QuantizedMatrix.from_parts(rows, columns, [stored], device, dtype)
        return matrix.pieces[0], dequantized(stored).astype(np.float64)
    weight = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    scales = weight.abs().amax(1, keepdim=True).double()
    if row_format == "int8":
        codes = (weight.double() / (scales / 127)).round()
        return quantize_int8(weight.to(device)), (codes * (scales / 127)).numpy()
    if row_format == "float8_e4m3":
        values = (weight / (scales / 448).float()).to(torch.float8_e4m3fn).double()
        return quantize_float8(weight.to(device)), (values * (scales / 448)).numpy()
    stored_weight = weight.to(device, dtype)
    return WeightRows("dense", rows, columns, stored_weight), stored_weight.cpu().double().numpy()
