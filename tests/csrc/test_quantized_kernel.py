"""Products with quantised weights, for every format and instruction set.

The reference rounds the activations as the kernel is documented to, and multiplies in float64 by what the
``gguf`` package says that the weights are.
"""

from __future__ import annotations

import numpy as np
import pytest
from native_reference import address, linear, pack_parts, padded_rows, run, stride
from quantized_reference import (
    FACTORS,
    GROUP,
    block_of,
    dequantise,
    quantise,
    random_blocks,
    round_activations,
    set_factor,
)

from streamllm import _native

INSTRUCTION_SETS = _native.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def random_rows(rows: int, k: int, seed: int = 0) -> np.ndarray:
    x = padded_rows(rows, k)
    x[:] = np.random.default_rng(seed).standard_normal((rows, k))
    return x


def random_stored(name: str, n: int, k: int, seed: int = 1) -> np.ndarray:
    return quantise(name, np.random.default_rng(seed).standard_normal((n, k)) / 8)


def embedding(matrix: _native.PackedMatrix, ids: list[int]) -> np.ndarray:
    token_ids = np.array(ids, np.int32)
    out = padded_rows(len(ids), matrix.k)
    run(lambda p: p.embedding(address(token_ids), matrix, address(out), stride(out)), tokens=len(ids))
    return out


def assert_close(actual: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Equal to the product with rounded activations but for the rounding of float32 sums."""
    rounded = round_activations(x)
    expected = rounded @ weight.T.astype(np.float64)
    magnitude = np.abs(rounded) @ np.abs(weight.T.astype(np.float64))
    assert (np.abs(actual - expected) <= 2e-6 * magnitude + 1e-30).all()


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize(("n", "blocks", "batches"), [(33, 3, range(34)), (1, 1, [1, 5]), (70, 6, [1, 7])])
def test_product_matches_float64(instruction_set, name, n, blocks, batches):
    k = blocks * block_of(name)[0]
    stored = random_blocks(name, n, k)
    weight, matrix = dequantise(name, stored), pack_parts(k, [(name, stored)])
    bias = np.random.default_rng(2).standard_normal(n).astype(np.float32)
    for rows in batches:
        x = random_rows(rows, k)
        actual = linear(x, matrix)
        assert_close(actual, x, weight)
        np.testing.assert_array_equal(linear(x, matrix, bias), actual + bias)
        # Each activation is off by at most half a step of its group, max|x| / 254.
        step = np.abs(x).reshape(rows, k // GROUP, GROUP).max(axis=-1).repeat(GROUP, axis=-1) / 254
        bound = step.astype(np.float64) @ np.abs(weight.T) * 1.001 + 1e-5
        assert (np.abs(actual - x.astype(np.float64) @ weight.T) <= bound).all()


@pytest.mark.parametrize("name", FACTORS)
def test_dequantised_rows_are_those_of_gguf(instruction_set, name):
    elements, num_bytes = block_of(name)
    stored = random_blocks(name, 77, 3 * elements)
    matrix = pack_parts(3 * elements, [(name, stored)])
    rows = embedding(matrix, [76, 0, 31, 32, 5, 15, 16, 64, -1, 77])
    expected = dequantise(name, stored)[[76, 0, 31, 32, 5, 15, 16, 64]]
    np.testing.assert_array_equal(rows[:8].view(np.uint32), expected.view(np.uint32))
    assert not rows[8:].any()
    # 77 rows in panels of 32, not inflated but for scales of 4 or 6 bits that take a byte.
    assert 96 * 3 * num_bytes <= matrix.num_bytes <= 96 * 3 * num_bytes * (1 if elements == 32 else 1.04)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
@pytest.mark.parametrize("name", FACTORS)
def test_extreme_integers_do_not_overflow(instruction_set, name, byte):
    """Weights and activations at their limits: sums of pairs and of groups are then the largest. (All bits of
    a weight are 0 or 1 in the first two; q8_0 has its limits in the others.)"""
    elements, num_bytes = block_of(name)
    blocks = np.full((40, 3, num_bytes), byte, np.uint8)
    for offset, factor in zip(FACTORS[name], [1.0, 0.25], strict=False):
        set_factor(name, blocks, offset, factor)
    stored, k = blocks.reshape(40, -1), 3 * elements
    matrix, weight = pack_parts(k, [(name, stored)]), dequantise(name, stored)
    for value in (127.0, -127.0):
        x = padded_rows(12, k)
        x[:] = value
        for rows in (1, 5, 12):
            assert_close(linear(x[:rows], matrix), x[:rows], weight)


@pytest.mark.parametrize("name", FACTORS)
def test_extreme_scales(instruction_set, name):
    """The largest and smallest float16 scales, zero groups, activations from 1e-42 to 3e37."""
    scales = np.array([65504.0, 6e-8, 0.0, -1.5, 6.1e-5] * 7)
    elements, num_bytes = block_of(name)
    k = max(elements, 128)
    blocks = random_blocks(name, len(scales), k, seed=3).reshape(len(scales), -1, num_bytes)
    for offset, ratio in zip(FACTORS[name], [1.0, -0.5], strict=False):
        set_factor(name, blocks, offset, scales[:, None] * ratio)
    stored = blocks.reshape(len(scales), -1)
    weight, matrix = dequantise(name, stored), pack_parts(k, [(name, stored)])
    x = random_rows(9, k, seed=4)
    x *= np.array([1e-42, 1e-31, 1e-29, 1e-3, 0.0, 1.0, 1e5, 1e20, 3e27], np.float32)[:, None]
    x[5, 32:64] = 0.0
    x[6, :] = np.float32(7.0)
    actual = linear(x, matrix)
    assert np.isfinite(actual).all()
    assert_close(actual, x, weight)
    assert (actual[:2] == 0).all() and (actual[4] == 0).all()


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(instruction_set, name, bad):
    k = 3 * block_of(name)[0]
    stored = random_blocks(name, 70, k)
    stored[5] = 0  # a weight of zeros too
    matrix, x = pack_parts(k, [(name, stored)]), random_rows(13, k)
    clean = linear(x, matrix)
    for row in (0, 6, 12):
        spoiled = padded_rows(13, k)
        spoiled[:] = x
        spoiled[row, 40] = bad
        actual = linear(spoiled, matrix)
        assert np.isnan(actual[row]).all()
        others = np.arange(13) != row
        np.testing.assert_array_equal(actual[others], clean[others])


@pytest.mark.parametrize("name", FACTORS)
def test_row_is_the_same_in_every_batch(instruction_set, name):
    rng, k = np.random.default_rng(5), 256
    x, stored = random_rows(110, k), random_blocks(name, 300, k)
    matrix = pack_parts(k, [(name, stored)])
    alone = np.concatenate([linear(x[i : i + 1], matrix, threads=1) for i in range(110)])
    for threads in (1, 2, 4):
        for size in (*rng.integers(1, 111, 3), 110):
            rows = rng.permutation(110)[:size]
            batch = padded_rows(size, k, pad=1)
            batch[:] = x[rows]
            np.testing.assert_array_equal(linear(batch, matrix, threads=threads), alone[rows])


@pytest.mark.parametrize("name", FACTORS)
def test_all_instruction_sets_that_fuse_multiply_and_add_give_the_same_bits(name):
    x, stored = random_rows(29, 1536), random_blocks(name, 210, 1536)
    x *= np.exp(np.random.default_rng(6).uniform(-20, 20, (29, 1))).astype(np.float32)
    matrix, before = pack_parts(1536, [(name, stored)]), _native.instruction_set()
    results = []
    for instruction_set in INSTRUCTION_SETS:
        if instruction_set != "portable":
            _native.set_instruction_set(instruction_set)
            results.append(linear(x, matrix))
    _native.set_instruction_set(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_every_scale_of_mxfp4(instruction_set):
    """All 256 powers of two: infinite where float32 ends, NaN for the last."""
    blocks = np.zeros((256, 1, 17), np.uint8)
    blocks[:, 0, 0] = np.arange(256)
    blocks[:, 0, 1:] = np.arange(16) * 17
    matrix = pack_parts(32, [("mxfp4", blocks.reshape(256, -1))])
    rows = embedding(matrix, list(range(256)))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    with np.errstate(over="ignore"):
        expected = np.ldexp(np.tile(numbers, 2), np.arange(255)[:, None] - 127).astype(np.float32)
    np.testing.assert_array_equal(rows[:255], expected)
    assert np.isnan(rows[255]).all()
    x = random_rows(3, 32)
    actual = linear(x, matrix)
    assert np.isnan(actual[:, 255]).all()
    assert_close(actual[:, 60:200], x, dequantise("mxfp4", blocks.reshape(256, -1))[60:200])


def test_rows_of_several_formats_are_one_matrix(instruction_set):
    """As in GGUF files whose q, k and v have types of their own; parts end within a panel."""
    k, x = 96, random_rows(21, 96)
    bias = np.random.default_rng(7).standard_normal(150).astype(np.float32)
    plain = np.random.default_rng(8).standard_normal((37, k)).astype(np.float32)
    parts = [("q4_1", random_stored("q4_1", 50, k)), ("q8_0", random_stored("q8_0", 33, k))]
    parts += [("float32", plain), ("q4_0", random_stored("q4_0", 30, k))]
    matrix, begin = pack_parts(k, parts), 0
    whole = linear(x, matrix, bias)
    for name, stored in parts:
        end = begin + len(stored)
        alone = linear(x, pack_parts(k, [(name, stored)]), bias[begin:end].copy())
        np.testing.assert_array_equal(whole[:, begin:end], alone)
        begin = end
    assert matrix.formats == ["q4_1", "q8_0", "float32", "q4_0"] and matrix.n == 150
    rows = embedding(matrix, [49, 50, 82, 83, 119, 120, 149])
    np.testing.assert_array_equal(rows[3:5], plain[[0, 36]])
    np.testing.assert_array_equal(rows[6], dequantise("q4_0", parts[3][1])[-1])


def test_successive_products_share_the_plans_scratch():
    """Inputs of several widths, on tokens and on outputs, quantised one after the other."""
    wide, narrow = random_rows(40, 1536), random_rows(40, 64)
    down = pack_parts(1536, [("q4_1", random_stored("q4_1", 64, 1536))])
    head = pack_parts(64, [("q8_0", random_stored("q8_0", 100, 64))])
    hidden, logits = padded_rows(40, 64), padded_rows(40, 100)

    def record(plan: _native.Plan) -> None:
        for x, matrix, out, on_outputs in [
            (wide, down, hidden, False),
            (narrow, head, logits, False),
            (hidden, head, logits, True),
        ]:
            plan.linear(address(x), stride(x), matrix, 0, address(out), stride(out), on_outputs)

    run(record, tokens=40, outputs=3)
    np.testing.assert_array_equal(hidden, linear(wide, down))
    np.testing.assert_array_equal(logits[:3], linear(hidden[:3], head))
    np.testing.assert_array_equal(logits[3:], linear(narrow[3:], head))


def quantized_rows(rows: int, width: int) -> np.ndarray:
    return np.full(_native.quantized_bytes(rows, width), 0xAA, np.uint8)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (2, 3), (40, 3)])
def test_operations_that_write_quantised_rows_change_no_bit(instruction_set, rows, threads, gated):
    """norm -> product -> activation -> product, with and without float32 rows in between."""
    k, n = 96, 128
    x, weight = random_rows(rows, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    x[rows // 2, 40], x[0, :32] = np.nan, 0.0
    up = pack_parts(k, [("q4_1", random_stored("q4_1", 2 * n, k))])
    down = pack_parts(n, [("q8_0", random_stored("q8_0", k, n))])

    def forward(quantized: bool) -> np.ndarray:
        normed, active = padded_rows(rows, k), padded_rows(rows, n)
        pairs, out = padded_rows(rows, 2 * n), padded_rows(rows, k)
        first = quantized_rows(rows, k) if quantized else normed
        second = quantized_rows(rows, n) if quantized else active
        source = address(x), stride(x), 0, 0, address(weight)
        normed_to = k, 1e-5, address(first), stride(normed), quantized
        active_to = address(second), stride(active), quantized

        def record(plan: _native.Plan) -> None:
            if gated:
                plan.rms_norm(*source, *normed_to)
            else:
                plan.layer_norm(*source, address(weight), *normed_to)
            plan.linear(
                address(first), stride(normed), up, 0, address(pairs), stride(pairs), False, quantized
            )
            if gated:
                plan.gate_and_mul(address(pairs), stride(pairs), n, "gelu_tanh", 0.0, *active_to)
            else:
                plan.activate(address(pairs), stride(pairs), n, "relu", *active_to)
            plan.linear(address(second), stride(active), down, 0, address(out), stride(out), False, quantized)

        run(record, tokens=rows, threads=threads)
        return out

    expected = forward(False)
    np.testing.assert_array_equal(forward(True), expected)
    assert np.isnan(expected[rows // 2]).all()


def test_quantised_rows_that_do_not_fit_are_refused():
    plan, x = _native.Plan(_native.ThreadPool(1)), random_rows(4, 64)
    with pytest.raises(ValueError, match="quantised rows have a multiple of 32 elements, not 40"):
        plan.gate_and_mul(address(x), 80, 40, "silu", 0.0, address(x), 40, True)
    matrix = pack_parts(
        32, [("q4_0", random_stored("q4_0", 8, 32)), ("float32", np.ones((8, 32), np.float32))]
    )
    assert not matrix.is_quantized
    with pytest.raises(ValueError, match="quantised weights only"):
        plan.linear(address(x), 0, matrix, 0, address(x), 64, False, True)
    assert plan.num_ops == 0
