"""What the emulation's collectives and matrix unit return, against their definitions in CUDA's manual."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda_emulation import address, emulated
from helpers.number_formats import BFLOAT16, FLOAT16, NumberFormat

KERNELS = Path(__file__).with_name("collective_kernels.cu")
NUM_COLLECTIVES, WARP = 16, 32


class CollectivesArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("lane_mask", ctypes.c_int32),
    ]


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


def lane_results(x: np.ndarray, lane: int, by_parity: bool) -> list[int]:
    """What one lane of a warp gets whose lanes bring ``x``."""
    lanes = [other for other in range(WARP) if not by_parity or other % 2 == lane % 2]
    group = lane // 8 * 8
    return [
        x[lane // 2 * 2 % 8 + lane % 2],
        x[group + 2 + lane % 2],
        x[lane - 2] if lane >= 2 else x[lane],
        x[lane - 4] if lane - group >= 4 else x[lane],
        x[lane + 2] if lane < 30 else x[lane],
        x[lane + 4] if lane - group < 4 else x[lane],
        x[lane ^ 6],
        x[lane ^ 4],
        sum(1 << other for other in lanes if x[other] % 3 == 0),
        int(any(x[other] > 90 for other in lanes)),
        int(all(x[other] > 5 for other in lanes)),
        sum(1 << other for other in lanes if x[other] == x[lane]),
        sum(x[other] for other in lanes),
        min(x[other] for other in lanes),
    ]


@pytest.mark.parametrize("by_parity", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_collectives(seed, by_parity):
    library = emulated(str(KERNELS))
    library.set_seed(seed)
    threads = WARP * (seed + 1)
    random = np.random.default_rng(seed)
    x = random.integers(0, 100, threads, np.int32)
    floats = random.standard_normal(threads, np.float32)
    out = np.full((NUM_COLLECTIVES, threads), -99, np.int32)
    sums = np.full((2, threads), np.nan, np.float32)
    arguments = CollectivesArgs(
        address(out), address(x), address(floats), address(sums), threads, 0 if by_parity else -1
    )
    library.call("collectives", arguments)

    numbers = [int(number) for number in x]
    of_block = [int((x % 2 == 0).sum()), 2 * int((x > 98).any()) + int((x > 1).all())]
    for thread in range(threads):
        warp = numbers[thread // WARP * WARP :][:WARP]
        expected = lane_results(np.array(warp, object), thread % WARP, by_parity) + of_block
        assert (out[:, thread].astype(np.int64) & 0xFFFFFFFF).tolist() == [n & 0xFFFFFFFF for n in expected]
    np.testing.assert_allclose(sums[0], floats.sum(dtype=np.float64), rtol=1e-5, atol=1e-5)
    assert len(set(sums[0].tolist())) == 1
    np.testing.assert_array_equal(sums[1], floats.max())


@pytest.mark.parametrize("number_format", [FLOAT16, BFLOAT16], ids=lambda number_format: number_format.name)
@pytest.mark.parametrize("rows, columns", [(16, 16), (48, 32), (8, 32), (24, 64), (32, 8)])
def test_matrix_products(rows: int, columns: int, number_format: NumberFormat):
    library = emulated(str(KERNELS))
    random = np.random.default_rng(rows + columns)
    depth = 48
    left = aligned(number_format.encode(random.standard_normal((rows, depth))))
    right = aligned(number_format.encode(random.standard_normal((columns, depth))))
    expected = number_format.decode(left) @ number_format.decode(right).T
    results = set()
    for seed in range(10):
        library.set_seed(seed)
        out = np.full((rows, columns), np.nan, np.float32)
        arguments = ProductArgs(
            address(out), address(left), address(right), rows, columns, depth, number_format.code
        )
        library.call("product", arguments)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        results.add(out.tobytes())
    assert len(results) == 1


def test_a_product_without_a_tiling_is_refused():
    arguments = ProductArgs(None, None, None, 12, 12, 16, FLOAT16.code)
    with pytest.raises(ValueError, match="product: a size or stride that the kernel does not support"):
        emulated(str(KERNELS)).call("product", arguments)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 32 bytes."""
    memory = np.empty(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 32
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
