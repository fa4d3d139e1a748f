from __future__ import annotations

import numpy as np
import pytest
from native_reference import address, linear, pack, pack_parts, padded_rows, run, stride

from streamllm import _native

INSTRUCTION_SETS = _native.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def random_product(rows: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = padded_rows(rows, k)
    x[:] = rng.standard_normal((rows, k))
    return x, rng.standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 63, 100, 257])
@pytest.mark.parametrize("k", [1, 7, 64, 129])
def test_product_matches_float64(instruction_set, n, k):
    for rows in [*range(14), 31, 50]:
        x, weight = random_product(rows, n, k)
        bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
        matrix = pack(weight)
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        tolerance = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weight.T)) + 1e-6
        assert (np.abs(linear(x, matrix) - expected) <= tolerance).all()
        assert (np.abs(linear(x, matrix, bias) - (expected + bias)) <= tolerance + 1e-6).all()


def test_long_depth_pauses_in_out_and_goes_on(instruction_set):
    x, weight = random_product(30, 47, 2500)
    bias = np.full(47, 3.0, np.float32)
    matrix = pack(weight)
    whole = linear(x, matrix, bias)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ weight.T + 3.0, atol=1e-3)
    for row in range(30):
        np.testing.assert_array_equal(linear(x[row : row + 1], matrix, bias)[0], whole[row])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_row_is_the_same_in_every_batch(instruction_set, threads):
    rng = np.random.default_rng(2)
    x, weight = random_product(70, 300, 190)
    matrix = pack(weight)
    alone = np.concatenate([linear(x[i : i + 1], matrix, threads=1) for i in range(70)])
    for _ in range(12):
        rows = rng.permutation(70)[: rng.integers(1, 71)]
        batch = padded_rows(len(rows), 190, pad=1)
        batch[:] = x[rows]
        np.testing.assert_array_equal(linear(batch, matrix, threads=threads), alone[rows])


def test_one_chain_of_fused_multiply_adds_over_k():
    fused = [name for name in INSTRUCTION_SETS if name != "portable"]
    if len(fused) < 2:
        pytest.skip("needs two instruction sets with fused multiply-adds")
    x, weight = random_product(37, 210, 1100)
    matrix, results = pack(weight), []
    before = _native.instruction_set()
    for name in fused:
        _native.set_instruction_set(name)
        results.append(linear(x, matrix))
    _native.set_instruction_set(before)
    np.testing.assert_array_equal(results[0], results[1])
    # In float64 a float32 product is exact, so rounding product + sum once to float32 is a fused operation
    # but for double rounding, which these few sizes do not meet often.
    total = np.zeros((37, 210), np.float32)
    for i in range(1100):
        total = (x[:, i : i + 1].astype(np.float64) * weight[:, i] + total).astype(np.float32)
    assert (results[0] == total).mean() > 0.99


def test_writes_nothing_but_its_columns(instruction_set):
    x, weight = random_product(13, 45, 20)
    out = np.full((15, 64), 7.0, np.float32)
    matrix = pack(weight)
    run(
        lambda plan: plan.linear(address(x), stride(x), matrix, 0, address(out), 64, on_outputs=False),
        tokens=13,
    )
    assert (out[:, 45:] == 7.0).all() and (out[13:] == 7.0).all() and (out[:13, :45] != 7.0).all()


def test_rows_come_from_outputs_if_asked(instruction_set):
    x, weight = random_product(5, 8, 8)
    out = np.zeros((5, 8), np.float32)
    matrix = pack(weight)
    run(
        lambda plan: plan.linear(address(x), stride(x), matrix, 0, address(out), 8, on_outputs=True),
        tokens=5,
        outputs=2,
    )
    assert out[:2].all() and not out[2:].any()


def test_pack_in_parts_equals_pack_at_once(instruction_set):
    """Parts that end within a panel of 32, taken out of a wider array."""
    x, weight = random_product(4, 77, 35)
    bias = np.arange(77, dtype=np.float32)
    wide = np.zeros((77, 50), np.float32)
    wide[:, :35] = weight
    matrix = pack_parts(35, [("float32", wide[a:b]) for a, b in [(0, 1), (1, 33), (33, 40), (40, 77)]])
    np.testing.assert_array_equal(linear(x, matrix, bias), linear(x, pack(weight), bias))
    assert (matrix.n, matrix.k, matrix.num_bytes) == (77, 35, (1 + 1 + 1 + 2) * 32 * 35 * 4)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_weights_are_their_float32_values(instruction_set, name):
    for rows, n, k in [(1, 33, 7), (2, 64, 100), (7, 50, 129), (30, 100, 700)]:
        x, weight = random_product(rows, n, k)
        weight[0, :3] = (0.0, 6e-8, 60000.0)  # a subnormal float16 too
        bits = weight.view(np.uint32)
        stored = weight.astype(np.float16) if name == "float16" else (bits >> 16).astype(np.uint16)
        exact = stored.astype(np.float32) if name == "float16" else (bits & 0xFFFF0000).view(np.float32)
        matrix = pack_parts(k, [(name, stored)])
        np.testing.assert_array_equal(linear(x, matrix), linear(x, pack(exact)))
        assert matrix.num_bytes == -(-n // 32) * 32 * k * 2


def test_bad_matrix_arguments_are_named():
    with pytest.raises(ValueError, match="k must be between"):
        _native.PackedMatrix(0)
    matrix = _native.PackedMatrix(4)
    source = np.zeros((8, 4), np.float32)
    with pytest.raises(ValueError, match="'q3' is not known; choose one of float32, float16"):
        matrix.append_rows("q3", source.ctypes.data, 8, 16)
    with pytest.raises(ValueError, match="rows of 4 elements cannot be q4_0: its blocks have 32"):
        matrix.append_rows("q4_0", source.ctypes.data, 8, 16)
    with pytest.raises(ValueError, match="row_stride must be at least 16, not 15"):
        matrix.append_rows("float32", source.ctypes.data, 8, 15)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        matrix.append_rows("float32", source.ctypes.data, 0, 16)
    plan = _native.Plan(_native.ThreadPool(1))
    with pytest.raises(ValueError, match=r"weight\.n must be at least 1, not 0"):
        plan.linear(address(source), 4, matrix, 0, address(source), 8, on_outputs=False)
    matrix.append_rows("float32", source.ctypes.data, 8, 16)
    with pytest.raises(ValueError, match="x_stride must be at least 4, not 2"):
        plan.linear(address(source), 2, matrix, 0, address(source), 8, on_outputs=False)
    with pytest.raises(ValueError, match="out must be an address"):
        plan.linear(address(source), 4, matrix, 0, 0, 8, on_outputs=False)
    assert plan.num_ops == 0
