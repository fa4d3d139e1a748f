"""MXFP4 against the specification's tables, Transformers' dequantisation, and GGML's."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from streamllm.models.mxfp4 import dequantize, to_ggml

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""OCP Microscaling Formats (MX) Specification 1.0, table 5: codes 0 to 7; 8 to 15 are their negatives."""


def random_rows(rows: int, groups: int, lowest: int, highest: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    blocks = rng.integers(0, 256, (rows, groups, 16), dtype=np.uint8)
    return blocks, rng.integers(lowest, highest + 1, (rows, groups), dtype=np.uint8)


def test_every_code_and_scale_is_the_specifications() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    expected = np.array(E2M1 + [-value for value in E2M1])
    for scale in range(255):
        with np.errstate(over="ignore"):
            factor = np.ldexp(np.float64(1), scale - 127)
            lows, highs = ((expected[half] * factor).astype(np.float32) for half in (low, high))
        values = dequantize(codes[:, None], np.full((16, 1), scale, np.uint8)).ravel()
        assert values.dtype == np.float32
        assert np.array_equal(values[0::2], lows) and np.array_equal(values[1::2], highs)
    assert np.isnan(dequantize(codes[:, None], np.full((16, 1), 255, np.uint8))).all()


def test_as_transformers_dequantises() -> None:
    blocks, scales = random_rows(6 * 10, 3, 100, 140)
    stack = convert_moe_packed_tensors(
        torch.from_numpy(blocks.reshape(6, 10, 3, 16)),
        torch.from_numpy(scales.reshape(6, 10, 3)),
        dtype=torch.float32,
    )
    expected = stack.transpose(1, 2).reshape(60, 96)
    assert np.array_equal(dequantize(blocks, scales), expected.numpy())


def test_ggml_reads_the_same_numbers() -> None:
    blocks, scales = random_rows(50, 5, 0, 254)
    packed = to_ggml(blocks, scales)
    assert packed.shape == (50, 5 * 17)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(dequantize(blocks, scales), expected)
