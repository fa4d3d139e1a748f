from __future__ import annotations

import numpy as np
import pytest
from native_reference import PagedCache, address, pack, padded_rows, run, stride

from streamllm import _native

DIMS = [1, 8, 15, 16, 17, 64, 100, 576]


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def random_rows(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    x = padded_rows(rows, columns)
    x[:] = np.random.default_rng(seed).standard_normal((rows, columns))
    return x


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm(instruction_set, dim):
    for rows in (0, 1, 5, 40):
        x, weight, out = random_rows(rows, dim), random_rows(1, dim, 1)[0], padded_rows(rows, dim, 9)
        run(
            lambda plan, x=x, weight=weight, out=out, n=dim: plan.rms_norm(
                address(x), stride(x), 0, 0, address(weight), n, 1e-5, address(out), stride(out)
            ),
            tokens=rows,
        )
        np.testing.assert_allclose(out, rms(x, weight, 1e-5), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm_adds_to_the_residual_and_may_overwrite_x(instruction_set, dim):
    x, residual, weight = random_rows(7, dim), random_rows(7, dim, 1), random_rows(1, dim, 2)[0]
    total = x + residual
    run(
        lambda plan: plan.rms_norm(
            address(x),
            stride(x),
            address(residual),
            stride(residual),
            address(weight),
            dim,
            1e-6,
            address(x),
            stride(x),
        ),
        tokens=7,
    )
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_allclose(x, rms(total, weight, 1e-6), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dim", DIMS)
def test_silu_and_mul(instruction_set, dim):
    x, out = random_rows(11, 2 * dim) * np.float32(5), padded_rows(11, dim)
    x[0], x[1, 0] = 100.0, -1000.0
    run(lambda plan: plan.silu_and_mul(address(x), stride(x), dim, address(out), stride(out)), tokens=11)
    gate, up = x[:, :dim].astype(np.float64), x[:, dim:].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-30)


def test_silu_keeps_nan(instruction_set):
    x, out = np.ones((1, 40), np.float32), padded_rows(1, 20)
    x[0, [3, 17]] = np.nan
    run(lambda plan: plan.silu_and_mul(address(x), 40, 20, address(out), stride(out)), tokens=1)
    assert np.flatnonzero(np.isnan(out[0])).tolist() == [3, 17]


@pytest.mark.parametrize("k", [1, 16, 50])
def test_embedding(instruction_set, k):
    weight = random_rows(70, k)
    matrix, out = pack(weight), padded_rows(6, k)
    ids = np.array([0, 69, 31, 32, -1, 70], np.int32)
    run(lambda plan: plan.embedding(address(ids), matrix, address(out), stride(out)), tokens=6)
    np.testing.assert_array_equal(out[:4], weight[ids[:4]])
    assert not out[4:].any()


def test_gather_rows(instruction_set):
    x, out = random_rows(9, 21), padded_rows(4, 21)
    indices = np.array([8, 0, 8, 3], np.int32)

    def record(plan: _native.Plan) -> None:
        plan.gather_rows(address(x), stride(x), address(indices), 21, address(out), stride(out))

    run(record, tokens=9, outputs=4)
    np.testing.assert_array_equal(out, x[indices])
    with pytest.raises(ValueError, match="indices must be below num_tokens = 8, not 8"):
        run(record, tokens=8, outputs=4)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(8, 8), (16, 4), (64, 64), (80, 40), (128, 128), (256, 0)]
)
def test_rotary_and_cache(instruction_set, head_dim, rotary_dim, qk_norm, kv_dtype):
    heads, kv_heads, tokens, half = 6, 2, 9, rotary_dim // 2
    rng = np.random.default_rng(0)
    cache = PagedCache(kv_heads, head_dim, 32, 4, kv_dtype)
    cache.keys[:], cache.values[:] = 7.0, 7.0
    qkv = random_rows(tokens, (heads + 2 * kv_heads) * head_dim)
    before = qkv.copy()
    angles = rng.uniform(0, 6, (20, max(half, 1))).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    positions = rng.integers(0, 20, tokens).astype(np.int32)
    slots = rng.permutation(128)[:tokens].astype(np.int64)
    slots[4] = -1
    q_norm, k_norm = (
        (random_rows(1, head_dim, 3)[0], random_rows(1, head_dim, 4)[0]) if qk_norm else (None, None)
    )
    run(
        lambda plan: plan.rotary_and_cache(
            address(qkv), stride(qkv), heads, kv_heads, head_dim, rotary_dim,
            address(q_norm), address(k_norm), 1e-6, address(cos), address(sin),
            address(positions), address(slots), address(cache.keys), address(cache.values), kv_dtype, 32,
        ),
        tokens=tokens,
    )  # fmt: skip

    split = before.reshape(tokens, -1, head_dim).astype(np.float64)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]

    def rotated(x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        x = x.copy() if norm is None else rms(x, norm, 1e-6)
        c, s = (table[positions][:, None, :half].astype(np.float64) for table in (cos, sin))
        x1, x2 = x[..., :half].copy(), x[..., half:rotary_dim].copy()
        x[..., :half], x[..., half:rotary_dim] = x1 * c - x2 * s, x2 * c + x1 * s
        return x

    result = qkv.reshape(tokens, -1, head_dim)
    np.testing.assert_allclose(result[:, :heads], rotated(q, q_norm), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(result[:, heads:], before.reshape(tokens, -1, head_dim)[:, heads:])
    error = 1e-3 if kv_dtype == "float16" else 2e-6
    written = slots >= 0
    blocks, offsets = slots[written] // 32, slots[written] % 32
    keys = cache.keys[blocks, :, offsets // 16, :, offsets % 16]
    np.testing.assert_allclose(keys, rotated(k, k_norm)[written], rtol=error, atol=error)
    np.testing.assert_array_equal(cache.values[blocks, :, offsets], v[written].astype(kv_dtype))
    assert (cache.values != 7.0).any(-1).sum() == kv_heads * written.sum()
    assert (cache.keys != 7.0).any(-2).sum() == kv_heads * written.sum()


def test_float16_cache_rounds_to_even_saturates_and_keeps_nan(instruction_set):
    every_half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = every_half[np.isfinite(every_half)]
    between = np.sort(np.concatenate([finite, (finite[:-1] + finite[1:]) / 2, finite * np.float32(1.0003)]))
    special = np.array([1e6, -1e6, np.inf, -np.inf, np.nan, 65519, 65520, 1e-9, -1e-9, 1e-30], np.float32)
    values = np.concatenate([between, special])
    values = np.concatenate([values, np.zeros(-len(values) % 128, np.float32)]).reshape(-1, 128)
    tokens = len(values)
    qkv = np.concatenate([np.zeros_like(values), values, values], axis=1)
    cache = PagedCache(1, 128, 16, -(-tokens // 16), "float16")
    slots, rows, angle = (
        np.arange(tokens, dtype=np.int64),
        np.zeros(tokens, np.int32),
        np.zeros(1, np.float32),
    )
    run(
        lambda plan: plan.rotary_and_cache(
            address(qkv), stride(qkv), 1, 1, 128, 0, 0, 0, 0.0, address(angle), address(angle),
            address(rows), address(slots), address(cache.keys), address(cache.values), "float16", 16,
        ),
        tokens=tokens,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -65504, 65504).astype(np.float16)
    stored = cache.values[:, 0].reshape(-1, 128)[:tokens]
    np.testing.assert_array_equal(stored, expected)
    keys = cache.keys[:, 0, 0].transpose(0, 2, 1).reshape(-1, 128)[:tokens]
    np.testing.assert_array_equal(keys, expected)


def test_rows_do_not_depend_on_the_batch(instruction_set):
    x = random_rows(60, 500)
    weight = random_rows(1, 250, 1)[0]

    def results(rows: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
        norm, silu = padded_rows(len(rows), 250), padded_rows(len(rows), 250)

        def record(plan: _native.Plan) -> None:
            plan.rms_norm(
                address(rows), stride(rows), 0, 0, address(weight), 250, 1e-5, address(norm), stride(norm)
            )
            plan.silu_and_mul(address(rows), stride(rows), 250, address(silu), stride(silu))

        run(record, tokens=len(rows), threads=threads)
        return norm, silu

    together = results(x, 4)
    for i in range(0, 60, 7):
        for whole, alone in zip(together, results(x[i : i + 1], 1), strict=True):
            np.testing.assert_array_equal(alone[0], whole[i])


def test_bad_rotary_dim_is_named():
    plan, memory = _native.Plan(_native.ThreadPool(1)), np.zeros(512, np.float32)
    here = address(memory)
    with pytest.raises(ValueError, match="rotary_dim must be even and at most head_dim = 16, not 18"):
        plan.rotary_and_cache(
            here, 64, 2, 1, 16, 18, 0, 0, 0.0, here, here, here, here, here, here, "float32", 16
        )
