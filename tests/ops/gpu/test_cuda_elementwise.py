"""RMSNorm and the gated activations of csrc/cuda/elementwise.cu, emulated, against float64.

Emulation runs the kernels' own source; it cannot see coalescing, the GPU's own exponentials (1 to 2 units in
the last place apart from the C library's), or what a launch costs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.cuda_emulation import EmulatedLibrary, address, emulated
from helpers.guarded_arrays import GuardedArray
from helpers.number_formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, NumberFormat, assert_rounds_to

from streamllm.ops.gpu.cuda.elementwise import ActAndMulArgs, RmsNormArgs

DTYPES = [pytest.param(dtype, id=dtype.name) for dtype in (FLOAT32, FLOAT16, BFLOAT16)]
SILU, GELU, GELU_TANH = range(3)
# Around what one thread, one warp and two sizes of blocks take in each dtype, and the largest.
SIZES = [1, 3, 4, 7, 8, 9, 31, 64, 100, 511, 512, 513, 1023, 1024, 1025, 2050, 4096, 8191, 16383, 16384]


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return emulated("elementwise.cu")


def random(shape: tuple[int, ...], dtype: NumberFormat, seed: int, scale: float = 1.0) -> np.ndarray:
    return dtype.encode(scale * np.random.default_rng(seed).standard_normal(shape, np.float32))


def rms_norm(
    library: EmulatedLibrary,
    x: np.ndarray,
    weight: np.ndarray,
    dtype: NumberFormat,
    residual: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
    gap: int = 0,
    shift: int = 0,
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """What the kernel leaves in ``out`` and in ``residual``, having written nothing else."""
    given = GuardedArray(x, gap=gap, shift=shift)
    out = given if in_place else GuardedArray(dtype.nan(x.shape), gap=2 * gap, shift=shift)
    carried = None if residual is None else GuardedArray(residual, gap=gap, shift=shift)
    weight = weight.astype(np.float32)
    arguments = RmsNormArgs(
        out.address, given.address, carried and carried.address, address(weight), out.stride, given.stride,
        carried.stride if carried else 0, *x.shape, dtype.code, eps,
    )  # fmt: skip
    library.call("rms_norm", arguments)
    for array in (given, out, carried):
        if array is not None:
            array.assert_nothing_beside_it_changed()
    if not in_place:
        np.testing.assert_array_equal(given.array, x)
    return out.array, None if carried is None else carried.array


def expected_norm(x: np.ndarray, weight: np.ndarray, dtype: NumberFormat, eps: float = 1e-5) -> np.ndarray:
    values = dtype.decode(x)
    return values / np.sqrt((values * values).mean(-1, keepdims=True) + eps) * weight.astype(np.float32)


def expected_sum(x: np.ndarray, residual: np.ndarray, dtype: NumberFormat) -> np.ndarray:
    """Added in float32 and rounded, as the definition says; a sum of two float32 numbers has one rounding."""
    return dtype.encode(dtype.decode(x).astype(np.float32) + dtype.decode(residual).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(library, size, dtype):
    weight = np.random.default_rng(size).standard_normal(size)
    for rows, gap, shift in ((1, 0, 0), (5, 0, 0), (3, 8, 0), (2, 3, 0), (2, 0, 1)):
        x = random((rows, size), dtype, seed=rows)
        out, _ = rms_norm(library, x, weight, dtype, gap=gap, shift=shift)
        assert_rounds_to(out, expected_norm(x, weight, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_adds_the_residual_first(library, size, dtype):
    weight = np.random.default_rng(size).standard_normal(size)
    x, residual = random((6, size), dtype, 1), random((6, size), dtype, 2, scale=30)
    out, carried = rms_norm(library, x, weight, dtype, residual)
    total = expected_sum(x, residual, dtype)
    np.testing.assert_array_equal(carried, total)
    assert_rounds_to(out, expected_norm(total, weight, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 1000, 4097])
def test_rms_norm_in_place(library, size, dtype):
    x, residual, weight = random((3, size), dtype, 1), random((3, size), dtype, 2), np.full(size, 0.5)
    apart = rms_norm(library, x, weight, dtype, residual)
    together = rms_norm(library, x, weight, dtype, residual, in_place=True)
    for first, second in zip(apart, together, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e4])
def test_rms_norm_of_magnitudes(library, scale, dtype):
    x = dtype.encode(scale * np.random.default_rng(3).standard_normal((4, 300)))
    out, _ = rms_norm(library, x, np.ones(300), dtype)
    assert_rounds_to(out, expected_norm(x, np.ones(300), dtype), dtype)


def test_rms_norm_whose_squares_overflow_is_zero_as_in_float32(library):
    """The definition (``ops/gpu/reference.py``) squares in float32: infinity, whose inverse root is 0."""
    x = FLOAT32.encode(np.array([[1e20, -1e20] * 40, [1.0, -1.0] * 40]))
    out, _ = rms_norm(library, x, np.ones(80), FLOAT32)
    assert not out[0].any()
    assert_rounds_to(out[1:], expected_norm(x[1:], np.ones(80), FLOAT32), FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_is_zero(library, dtype):
    out, carried = rms_norm(
        library, dtype.encode(np.zeros((3, 70))), np.ones(70), dtype, dtype.encode(np.zeros((3, 70)))
    )
    assert not dtype.decode(out).any() and not dtype.decode(carried).any()
    # Without eps the definition divides zero by zero.
    out, _ = rms_norm(library, dtype.encode(np.zeros((1, 70))), np.ones(70), dtype, eps=0.0)
    assert np.isnan(dtype.decode(out)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 5000])
def test_a_rows_nan_stays_in_the_row(library, size, dtype):
    x, weight = random((5, size), dtype, 4), np.ones(size)
    clean, _ = rms_norm(library, x, weight, dtype)
    x[2, size // 2] = dtype.encode(np.array([np.nan]))[0]
    out, _ = rms_norm(library, x, weight, dtype)
    assert np.isnan(dtype.decode(out[2])).all()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 512, 1030, 4096])
def test_rms_norm_has_the_same_bits_in_every_batch_and_order(library, size, dtype):
    x, residual = random((9, size), dtype, 5), random((9, size), dtype, 6)
    weight = np.random.default_rng(7).standard_normal(size)
    batch = rms_norm(library, x, weight, dtype, residual)
    for seed in range(1, 11):
        library.set_seed(seed)
        for one, other in zip(rms_norm(library, x, weight, dtype, residual), batch, strict=True):
            np.testing.assert_array_equal(one, other)
    library.set_seed(0)
    for row in (0, 8):
        alone = rms_norm(library, x[row : row + 1], weight, dtype, residual[row : row + 1])
        for one, other in zip(alone, batch, strict=True):
            np.testing.assert_array_equal(one[0], other[row])


def act_and_mul(
    library: EmulatedLibrary,
    x: np.ndarray,
    activation: int,
    dtype: NumberFormat,
    *,
    gap: int = 0,
    out_gap: int = 0,
    shift: int = 0,
) -> np.ndarray:
    given = GuardedArray(x, gap=gap, shift=shift)
    width = x.shape[1] // 2
    out = GuardedArray(dtype.nan((len(x), width)), gap=out_gap, shift=shift)
    arguments = ActAndMulArgs(
        out.address, given.address, out.stride, given.stride, len(x), width, dtype.code, activation
    )
    library.call("act_and_mul", arguments)
    given.assert_nothing_beside_it_changed()
    out.assert_nothing_beside_it_changed()
    np.testing.assert_array_equal(given.array, x)
    return out.array


def expected_activation(x: np.ndarray, activation: int, dtype: NumberFormat) -> np.ndarray:
    gate, up = np.split(dtype.decode(x), 2, axis=1)
    if activation == GELU:
        factor = 0.5 * np.vectorize(math.erfc)(-gate / math.sqrt(2))
    else:
        inner = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3) if activation == GELU_TANH else gate
        with np.errstate(over="ignore"):
            factor = 1 / (1 + np.exp(-inner))
    return gate * factor * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
@pytest.mark.parametrize("width", [1, 3, 8, 9, 16, 63, 100, 1024, 2050])
def test_act_and_mul(library, width, activation, dtype):
    # The second place has every row at a multiple of 16 bytes, but not every row's second half.
    for rows, gap, out_gap, shift in ((7, 0, 0, 0), (3, -2 * width % 8, -width % 8, 0), (2, 3, 5, 1)):
        x = random((rows, 2 * width), dtype, seed=width + rows, scale=3)
        out = act_and_mul(library, x, activation, dtype, gap=gap, out_gap=out_gap, shift=shift)
        # Far below zero an exponential's relative error is that of its argument, times the argument.
        assert_rounds_to(out, expected_activation(x, activation, dtype), dtype, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
def test_act_and_mul_over_the_whole_range(library, activation, dtype):
    gate = np.concatenate([np.linspace(-12, 12, 997), [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 6e4, -6e4]])
    x = dtype.encode(np.stack([np.concatenate([gate, np.full_like(gate, up)]) for up in (1.0, -0.75, 0.0)]))
    out = act_and_mul(library, x, activation, dtype)
    assert_rounds_to(out, expected_activation(x, activation, dtype), dtype, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
def test_act_and_mul_keeps_nan_where_it_is(library, activation, dtype):
    x = random((3, 40), dtype, 1)
    nan = dtype.encode(np.array([np.nan]))[0]
    x[1, 3], x[1, 20 + 17] = nan, nan
    out = dtype.decode(act_and_mul(library, x, activation, dtype))
    assert np.argwhere(np.isnan(out)).tolist() == [[1, 3], [1, 17]]


@pytest.mark.parametrize("width", [5, 24, 3000])
def test_act_and_mul_has_the_same_bits_in_every_batch_and_order(library, width):
    x = random((6, 2 * width), BFLOAT16, 2)
    batch = act_and_mul(library, x, SILU, BFLOAT16)
    for seed in range(1, 11):
        library.set_seed(seed)
        np.testing.assert_array_equal(act_and_mul(library, x, SILU, BFLOAT16), batch)
    library.set_seed(0)
    for row in range(6):
        np.testing.assert_array_equal(act_and_mul(library, x[row : row + 1], SILU, BFLOAT16)[0], batch[row])


def test_no_rows_are_no_work(library):
    assert rms_norm(library, random((0, 8), FLOAT32, 0), np.ones(8), FLOAT32)[0].shape == (0, 8)
    assert act_and_mul(library, random((0, 8), FLOAT32, 0), SILU, FLOAT32).shape == (0, 4)


def test_what_there_is_no_kernel_for_is_refused(library):
    with pytest.raises(ValueError, match="rms_norm: a size or stride"):
        rms_norm(library, random((1, 16385), FLOAT32, 0), np.ones(16385), FLOAT32)
    with pytest.raises(ValueError, match="act_and_mul: an option"):
        act_and_mul(library, random((1, 8), FLOAT32, 0), 3, FLOAT32)
    for call in (RmsNormArgs(rows=1, size=1, dtype=FLOAT8.code), RmsNormArgs(rows=1, size=1, dtype=9)):
        with pytest.raises(ValueError, match="no kernel for this dtype"):
            library.call("rms_norm", call)
