"""Products with weights of 8-bit floats, in every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_reference import address, linear, pack_parts, padded_rows, run, stride

from streamllm import _native
from streamllm.ops.float8_rows import BLOCK, float8_values, pack_float8, unpack_float8
from streamllm.ops.stored_rows import StoredRows

INSTRUCTION_SETS = _native.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def random_weight(n: int, k: int, seed: int = 0) -> tuple[StoredRows, np.ndarray]:
    """Rows, and the float32 values that torch says they have."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32) * 60).to(torch.float8_e4m3fn)
    scales = rng.uniform(-0.01, 0.01, (n, -(-k // BLOCK))).astype(np.float32)
    values = codes.float().numpy() * np.repeat(scales, BLOCK, axis=1)[:, :k]
    return pack_float8(codes.view(torch.uint8).numpy(), scales), values


def random_rows(rows: int, k: int, seed: int = 0) -> np.ndarray:
    x = padded_rows(rows, k)
    x[:] = np.random.default_rng(seed).standard_normal((rows, k))
    return x


def packed(stored: StoredRows, k: int) -> _native.PackedMatrix:
    return pack_parts(k, [(stored.format, stored.data)])


def embedding(matrix: _native.PackedMatrix, ids: list[int]) -> np.ndarray:
    token_ids = np.array(ids, np.int32)
    out = padded_rows(len(ids), matrix.k)
    run(lambda p: p.embedding(address(token_ids), matrix, address(out), stride(out)), tokens=len(ids))
    return out


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (33, 7), (64, 127), (50, 128), (100, 129), (47, 700), (31, 2500)]
)
def test_products_are_those_of_the_dequantised_weights(instruction_set, n, k):
    stored, values = random_weight(n, k)
    matrix = packed(stored, k)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for rows in (*range(1, 14), 31, 50):
        x = random_rows(rows, k)
        expected = x.astype(np.float64) @ values.T.astype(np.float64)
        tolerance = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(values.T)) + 1e-6
        assert (np.abs(linear(x, matrix) - expected) <= tolerance).all()
        assert (np.abs(linear(x, matrix, bias) - (expected + bias)) <= tolerance).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_in_every_batch(instruction_set, threads):
    stored, _ = random_weight(300, 400)
    x, matrix = random_rows(70, 400), packed(stored, 400)
    alone = np.concatenate([linear(x[i : i + 1], matrix, threads=1) for i in range(70)])
    rng = np.random.default_rng(2)
    for _ in range(8):
        rows = rng.permutation(70)[: rng.integers(1, 71)]
        np.testing.assert_array_equal(
            linear(np.ascontiguousarray(x[rows]), matrix, threads=threads), alone[rows]
        )


def test_instruction_sets_that_fuse_agree():
    stored, _ = random_weight(210, 1100)
    x, matrix, results = random_rows(37, 1100), packed(stored, 1100), {}
    before = _native.instruction_set()
    for name in INSTRUCTION_SETS:
        _native.set_instruction_set(name)
        results[name] = linear(x, matrix)
    _native.set_instruction_set(before)
    fused = [result for name, result in results.items() if name != "portable"]
    for result in fused[1:]:
        np.testing.assert_array_equal(result, fused[0])


def test_every_pattern_is_torchs_number(instruction_set):
    codes = np.arange(256, dtype=np.uint8).reshape(256, 1)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    for scale in (1.0, 0.37, 2.0**-130):
        stored = pack_float8(codes, np.full((256, 1), scale, np.float32))
        np.testing.assert_array_equal(float8_values(stored), expected * np.float32(scale))
        rows = embedding(packed(stored, 1), list(range(256)))
        np.testing.assert_array_equal(rows, expected * np.float32(scale))
        finite = ~np.isnan(rows)
        assert (np.signbit(rows) == np.signbit(expected))[finite].all()


def test_embedding_rows_are_the_dequantised_ones(instruction_set):
    stored, values = random_weight(70, 333)
    ids = [69, 0, 31, 32, 5]
    np.testing.assert_array_equal(embedding(packed(stored, 333), ids), values[ids])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_reaches_the_products_of_its_row_only(instruction_set, code):
    stored, _ = random_weight(40, 300)
    codes, scales = unpack_float8(stored)
    codes = codes.copy()
    codes[3, 200] = code
    matrix = packed(pack_float8(codes, scales), 300)
    out = linear(random_rows(5, 300), matrix)
    assert np.isnan(out[:, 3]).all() and np.isfinite(np.delete(out, 3, axis=1)).all()
    row = embedding(matrix, [3])[0]
    assert np.isnan(row[200]) and np.isfinite(row[:128]).all() and np.isfinite(row[256:]).all()


def test_size_in_memory_is_one_byte_an_element_and_the_scales(instruction_set):
    stored, _ = random_weight(64, 300)
    assert packed(stored, 300).num_bytes == stored.data.size == 64 * (300 + 3 * 4)


def test_rows_too_short_are_refused():
    matrix = _native.PackedMatrix(300)
    stored, _ = random_weight(4, 300)
    with pytest.raises(ValueError, match="row_stride must be at least 312, not 300"):
        matrix.append_rows("float8_e4m3", stored.data.ctypes.data, 4, 300)
