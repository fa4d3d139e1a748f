"""Triton's matrix products against float64, in Triton's interpreter where there is no GPU.

The interpreter runs a program at a time with numpy: what the compiler makes of the code, and the order of
sums within a matrix instruction, it does not see.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.quantized_weights import FORMATS, dequantized, random_rows, stored_groups  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix, WeightRows, from_float8  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul import (  # noqa: E402
    batch_invariant_linear,
    multiply_rows,
    quantized_linear,
)
from streamllm.ops.gpu.triton_kernels.matmul_plan import (  # noqa: E402
    ProductConfig,
    plan_product,
    product_config,
)

pytestmark = pytest.mark.slow

SMALL = ProductConfig(
    block_n=64, block_rows=128, num_warps=4, num_stages=2, wide_warps=4, wide_stages=2, programs=8
)
HALF_STEP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of a number's rounding, relative to it."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
EVERY_FORMAT = pytest.mark.parametrize("row_format", FORMATS)


def activations(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def multiply(x, weight: WeightRows, bias=None, config: ProductConfig | None = SMALL, out_dtype=None):
    out = torch.full((len(x), weight.n), float("nan"), dtype=out_dtype or x.dtype, device=DEVICE)
    multiply_rows(out, x, weight, bias, config)
    return out


def check(out, x, reference: np.ndarray, bias=None) -> None:
    """Every element within what rounding weights and the result to their dtypes can do to it, and a float32
    sum of k terms."""
    values = x.cpu().double().numpy()
    expected = values @ reference.T + (0 if bias is None else bias.cpu().double().numpy())
    magnitude = np.abs(values) @ np.abs(reference).T
    tolerance = magnitude * (HALF_STEP[x.dtype] + 3e-6) + np.abs(expected) * HALF_STEP[out.dtype] + 1e-6
    assert (np.abs(out.cpu().double().numpy() - expected) <= tolerance).all()


@DTYPES
@EVERY_FORMAT
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 64, 128), (1, 130, 1056), (3, 1, 32), (17, 96, 96), (70, 20, 1184), (130, 72, 160)],
    ids=str,
)
def test_products_of_every_shape(row_format, dtype, rows, n, k):
    weight, reference = random_rows(row_format, n, k, dtype, DEVICE, seed=rows)
    x = activations(rows, k, dtype)
    bias = torch.randn(n, device=DEVICE) if rows % 2 else None
    check(multiply(x, weight, bias), x, reference, bias)


@EVERY_FORMAT
@pytest.mark.parametrize("rows", [1, 33])
def test_the_tables_configurations(row_format, rows):
    weight, reference = random_rows(row_format, 130, 160, torch.float16, DEVICE)
    x = activations(rows, 160, torch.float16)
    check(multiply(x, weight, config=None), x, reference)


@DTYPES
@pytest.mark.parametrize("k", [7, 100, 1031])
def test_a_dense_weight_of_any_width(dtype, k):
    weight, reference = random_rows("dense", 70, k, dtype, DEVICE)
    x, bias = activations(5, k, dtype), torch.randn(70, device=DEVICE)
    out = torch.full((5, 70), float("nan"), dtype=dtype, device=DEVICE)
    batch_invariant_linear(out, x, weight.values, bias)
    check(out, x, reference, bias)


@EVERY_FORMAT
@pytest.mark.parametrize(
    ("dtype", "k"), [(torch.float32, 160), (torch.float16, 1056)], ids=["whole", "split"]
)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(row_format, dtype, k, ordered_products):
    """Splits are spread over programs for a tile of rows, taken in turn for the two of 200."""
    weight, _ = random_rows(row_format, 40, k, dtype, DEVICE)
    bias, x = torch.randn(40, device=DEVICE), activations(200, k, dtype)
    config = replace(SMALL, programs=3)
    plans = [plan_product(config, row_format, x.element_size(), rows, 40, k) for rows in (1, 200)]
    assert [plan.spread for plan in plans] == [k > 1000, False] and (plans[0].splits > 1) == (k > 1000)
    whole = multiply(x, weight, bias, config)
    for first, rows in [(0, 1), (199, 1), (63, 3), (16, 16), (180, 17), (100, 64)]:
        part = multiply(x[first : first + rows], weight, bias, config)
        assert torch.equal(part, whole[first : first + rows])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@EVERY_FORMAT
def test_what_is_not_finite_stays_in_its_row(row_format):
    weight, reference = random_rows(row_format, 70, 1056, torch.float16, DEVICE)
    for rows in (6, 80):
        x = activations(rows, 1056, torch.float16)
        x[1, 5], x[2, 1055], x[4] = float("nan"), float("inf"), float("-inf")
        out = multiply(x, weight)
        assert (
            torch.isnan(out[1]).all()
            and not torch.isfinite(out[2]).any()
            and not torch.isfinite(out[4]).any()
        )
        finite = [row for row in range(rows) if row not in (1, 2, 4)]
        check(out[finite], x[finite], reference)


@DTYPES
@pytest.mark.parametrize("row_format", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
def test_every_code_at_its_extreme(row_format, dtype, byte):
    """Under factors from the smallest subnormal to nearly what overflows the weights in float16."""
    n, k = 64, 128
    stored = stored_groups(row_format, n, k, np.random.default_rng(0))
    groups = stored.data.reshape(n, k // 32, -1)
    groups[...] = byte
    scales = np.resize(
        np.array([2.0**-24, 500.0, -500.0, -(2.0**-20), 0.0, 1.0], np.float16), (n, k // 32, 1)
    )
    groups[..., 0:2] = scales.view(np.uint8)
    if row_format == "q4_1":
        groups[..., 2:4] = np.roll(scales, 1, axis=0).view(np.uint8)
    weight = QuantizedMatrix.from_parts(n, k, [stored], DEVICE, dtype).pieces[0]
    x = activations(3, k, dtype)
    check(multiply(x, weight, out_dtype=torch.float32), x, dequantized(stored).astype(np.float64))


@pytest.mark.parametrize("row_format", ["int8_row", "float8_row"])
@pytest.mark.parametrize("magnitude", [1e-20, 1e20])
def test_row_scales_reach_beyond_the_activations_dtype(row_format, magnitude):
    weight, reference = random_rows(row_format, 64, 96, torch.float16, DEVICE)
    weight = WeightRows(row_format, 64, 96, weight.values, weight.scales * magnitude)
    x = activations(2, 96, torch.float16)
    out = multiply(x, weight, out_dtype=torch.float32)
    check(out / magnitude, x, reference)


@EVERY_FORMAT
def test_activations_of_large_magnitude(row_format):
    weight, reference = random_rows(row_format, 64, 1056, torch.float16, DEVICE)
    x = activations(2, 1056, torch.float16).sign() * 65504
    check(multiply(x, weight, out_dtype=torch.float32), x, reference)


def test_all_patterns_of_float8():
    patterns = torch.arange(256, dtype=torch.uint8).view(1, 256)
    finite = (patterns & 0x7F) != 0x7F
    stored = torch.where(finite, patterns, 0).view(torch.float8_e4m3fn).to(DEVICE)
    weight = from_float8(stored, torch.ones(1, device=DEVICE))
    one_each = torch.eye(256, device=DEVICE)
    assert torch.equal(multiply(one_each, weight)[:, 0], stored[0].float())


def test_a_float8_row_with_nan_is_nan():
    patterns = torch.zeros(3, 64, dtype=torch.uint8)
    patterns[1, 40] = 0xFF
    weight = from_float8(patterns.view(torch.float8_e4m3fn).to(DEVICE), torch.ones((), device=DEVICE))
    out = multiply(activations(2, 64, torch.float32), weight)
    assert torch.isnan(out[:, 1]).all() and (out[:, [0, 2]] == 0).all()


@pytest.mark.parametrize("rows", [2, 70])
def test_rows_may_lie_apart_and_the_result_be_float32(rows):
    weight, reference = random_rows("q4_1", 70, 1056, torch.float16, DEVICE)
    wide = activations(rows, 1100, torch.float16)
    x = wide[:, 20:1076]
    out = torch.full((rows, 90), 7.0, device=DEVICE)
    multiply_rows(out[:, 10:80], x, weight, None, SMALL)
    check(out[:, 10:80], x, reference)
    assert (out[:, :10] == 7).all() and (out[:, 80:] == 7).all()


def test_pieces_of_several_formats():
    rng = np.random.default_rng(3)
    parts = [stored_groups(name, rows, 96, rng) for name, rows in [("q4_1", 33), ("q8_0", 20), ("q4_0", 30)]]
    plain = rng.standard_normal((17, 96)).astype(np.float32)
    bias = torch.randn(100, device=DEVICE)
    matrix = QuantizedMatrix.from_parts(100, 96, [*parts, plain], DEVICE, torch.float16, bias)
    reference = np.concatenate([*(dequantized(part) for part in parts), plain.astype(np.float16)])
    x = activations(3, 96, torch.float16)
    out = torch.full((3, 100), float("nan"), dtype=torch.float16, device=DEVICE)
    quantized_linear(out, x, matrix)
    check(out, x, reference.astype(np.float64), bias)


def test_no_rows():
    weight, _ = random_rows("q4_0", 64, 96, torch.float16, DEVICE)
    assert multiply(activations(0, 96, torch.float16), weight).shape == (0, 64)


def test_what_does_not_fit_is_refused():
    weight, _ = random_rows("dense", 64, 96, torch.float32, DEVICE)
    x, out = activations(2, 96, torch.float32), torch.empty(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[2, 95\] by a weight \[64, 96\]"):
        batch_invariant_linear(out, x[:, :95], weight.values)
    with pytest.raises(ValueError, match=r"does not give \[3, 64\]"):
        batch_invariant_linear(torch.empty(3, 64, device=DEVICE), x, weight.values)
    with pytest.raises(ValueError, match="side by side"):
        batch_invariant_linear(torch.empty(64, 2, device=DEVICE).t(), x, weight.values)


@EVERY_FORMAT
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("x_bytes", [2, 4])
def test_the_order_of_sums_follows_from_the_weight_alone(row_format, architecture, x_bytes):
    for n, k in [(64, 64), (4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096)]:
        config = product_config(architecture, row_format, x_bytes, n, k)
        plans = [plan_product(config, row_format, x_bytes, rows, n, k) for rows in range(1, 600)]
        assert len({(plan.tile_k, plan.splits, plan.block_n) for plan in plans}) == 1
        assert plans[0].splits * 512 <= max(k, 512)
        for rows, plan in enumerate(plans, 1):
            assert plan.grid[0] == -(-n // plan.block_n) * -(-rows // plan.block_rows)
            assert plan.grid[1] == (plan.splits if plan.spread else 1)
            assert not plan.spread or plans[rows - 2].spread or rows == 1
        if (n, k) == (4096, 14336):
            assert plans[0].grid[0] * plans[0].grid[1] >= 200
