"""Triton's products with every format of a file, against what its values give in float64; in Triton's
interpreter where there is no GPU. What products of any format have to keep is in ``test_triton_matmul``."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.quantized_weights import (  # noqa: E402
    BLOCKS,
    FILE_FORMATS,
    dequantized,
    random_rows,
    stored_groups,
)
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops import Experts, Gate  # noqa: E402
from streamllm.ops.gpu.expert_weights import stack_experts  # noqa: E402
from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul import multiply_rows, quantized_linear  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul_plan import ProductConfig  # noqa: E402
from streamllm.ops.stored_rows import StoredRows  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = ProductConfig(
    block_n=64, block_rows=256, num_warps=4, num_stages=2, wide_warps=4, wide_stages=2, programs=1
)
EVERY_FORMAT = pytest.mark.parametrize("row_format", FILE_FORMATS)


def columns_of(row_format: str, blocks: int = 3) -> int:
    """Whole blocks; three end within a tile if they can."""
    return blocks * BLOCKS[row_format].elements if row_format in BLOCKS else 67 * blocks


def activations(rows: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


def check(out: torch.Tensor, x: torch.Tensor, values: np.ndarray, half_step: float) -> None:
    """Every element within what rounding weights and result to the activations' dtype can do to it, and a
    float32 sum."""
    inputs = x.cpu().double().numpy()
    expected = inputs @ values.T
    tolerance = np.abs(inputs) @ np.abs(values).T * (half_step + 1e-6) + np.abs(expected) * half_step + 1e-6
    assert (np.abs(out.cpu().double().numpy() - expected) <= tolerance).all()


@EVERY_FORMAT
@pytest.mark.parametrize(
    "rows", [1, 5, pytest.param(17, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)
def test_products(row_format, rows):
    """With an odd number of weight rows that no tile ends with."""
    k = columns_of(row_format, 3 if rows == 5 else 1)
    weight, values = random_rows(row_format, 37, k, torch.float32, DEVICE, seed=rows)
    x = activations(rows, k)
    out = torch.full((rows, 37), float("nan"), device=DEVICE)
    multiply_rows(out, x, weight, None, SMALL)
    check(out, x, values, half_step=2.0**-24)


@EVERY_FORMAT
def test_products_in_16_bits(row_format):
    k = columns_of(row_format, 1)
    weight, values = random_rows(row_format, 37, k, torch.float16, DEVICE)
    x = activations(5, k, torch.float16)
    out = torch.full((5, 37), float("nan"), dtype=torch.float16, device=DEVICE)
    multiply_rows(out, x, weight, None, SMALL)
    check(out, x, values, half_step=2.0**-11)


@EVERY_FORMAT
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0xF0, 0xAA, 0x7E])
def test_every_bit_has_its_place(row_format, byte):
    """One number of all bits alike under factors of 1, times a unit matrix: the values themselves."""
    k = BLOCKS[row_format].elements if row_format in BLOCKS else 96
    stored = stored_groups(row_format, 3, k, np.random.default_rng(0))
    if row_format in BLOCKS:
        block = BLOCKS[row_format]
        stored.data[1] = byte
        stored.data.reshape(3, -1, block.size)[1, :, list(block.factors)] = 0
        for offset in block.factors:
            one = np.array(1, block.dtype).reshape(1).view(np.uint8) if block.dtype != "u1" else [128]
            stored.data[1, offset : offset + len(one)] = one
    elif byte & 0x7F != 0x7F:
        stored.data[1, 4:] = byte
    weight = QuantizedMatrix.from_parts(3, k, [stored], DEVICE, torch.float32).pieces[0]
    out = torch.full((k, 3), float("nan"), device=DEVICE)
    multiply_rows(out, torch.eye(k, device=DEVICE), weight, None, SMALL)
    np.testing.assert_allclose(out.cpu().numpy().T, dequantized(stored), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("row_format", ["iq4_nl", "iq4_xs", "mxfp4"])
def test_every_code_of_a_table(row_format):
    """Exact under factors that are powers of two."""
    block = BLOCKS[row_format]
    stored = stored_groups(row_format, 1, block.elements, np.random.default_rng(1))
    stored.data[0, -16:] = np.arange(16) * 17
    scale = [122] if row_format == "mxfp4" else np.array([0.125], np.float16).view(np.uint8)
    stored.data[0, : len(scale)] = scale
    weight = QuantizedMatrix.from_parts(1, block.elements, [stored], DEVICE, torch.float32).pieces[0]
    out = torch.full((block.elements, 1), float("nan"), device=DEVICE)
    multiply_rows(out, torch.eye(block.elements, device=DEVICE), weight, None, SMALL)
    assert np.array_equal(out.cpu().numpy().T, dequantized(stored))


def test_pieces_of_two_formats():
    """The projections of a Q4_K_M file: q and k in q4_k, v in q6_k."""
    rng = np.random.default_rng(3)
    parts = [stored_groups(name, rows, 512, rng) for name, rows in [("q4_k", 40), ("q4_k", 9), ("q6_k", 9)]]
    bias = torch.randn(58, device=DEVICE)
    matrix = QuantizedMatrix.from_parts(58, 512, parts, DEVICE, torch.float32, bias)
    assert [piece.format for piece in matrix.pieces] == ["q4_k", "q6_k"]
    x = activations(3, 512)
    out = torch.full((3, 58), float("nan"), device=DEVICE)
    quantized_linear(out, x, matrix)
    values = np.concatenate([dequantized(part) for part in parts]).astype(np.float64)
    check(out - bias, x, values, half_step=2.0**-23)


def stacked(parts: list[list[StoredRows]], rows: int, k: int):
    return stack_experts(
        [QuantizedMatrix.from_parts(rows, k, expert, DEVICE, torch.float32) for expert in parts],
        torch.float32,
    )


@pytest.mark.parametrize(
    ("gate_up", "down", "size"),
    [
        ("mxfp4", "mxfp4", 64),
        pytest.param("q4_k", "q6_k", 256, marks=pytest.mark.slow),
        ("int4_64", "float8_e4m3", 128),
    ],
)
def test_experts(gate_up, down, size):
    """Three experts; gates and ups are tensors of their own in a file."""
    rng = np.random.default_rng(5)
    up_parts = [[stored_groups(gate_up, size, size, rng, 0.01) for _ in range(2)] for _ in range(3)]
    down_parts = [[stored_groups(down, size, size, rng, 0.01)] for _ in range(3)]
    ups, downs = stacked(up_parts, 2 * size, size), stacked(down_parts, size, size)
    assert (ups.rows.format, downs.rows.format) == (gate_up, down)
    experts = Experts(ups, downs, 3, 2, True, Gate())
    x, logits = activations(4, size), activations(4, 3)
    found, expected = (torch.full((4, size), float("nan"), device=DEVICE) for _ in range(2))
    TritonKernels().experts(found, x, logits, experts)
    ReferenceKernels().experts(expected, x, logits, experts)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_experts_of_several_formats_become_dense():
    rng = np.random.default_rng(6)
    parts = [[stored_groups(name, 8, 256, rng)] for name in ("q4_k", "q6_k")]
    weights = stacked(parts, 8, 256)
    assert weights.rows.format == "dense"
    for expert, (part,) in enumerate(parts):
        assert np.array_equal(weights.dequantize(expert)[0].cpu().numpy(), dequantized(part))
