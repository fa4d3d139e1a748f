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


def layer_norm_reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


@pytest.mark.parametrize("dim", DIMS)
def test_layer_norm(instruction_set, dim):
    """Of rows far from zero too: the variance is that of the differences from the mean."""
    x, residual, out = random_rows(7, dim), random_rows(7, dim, 1), padded_rows(7, dim, 9)
    x[3] += 50
    weight, bias = random_rows(1, dim, 2)[0], random_rows(1, dim, 3)[0]
    total = x + residual
    for first, second, expected in ((0, 0, x.copy()), (address(residual), stride(residual), total)):
        run(
            lambda plan, first=first, second=second: plan.layer_norm(
                address(x), stride(x), first, second, address(weight), address(bias), dim, 1e-5,
                address(out), stride(out),
            ),
            tokens=7,
        )  # fmt: skip
        np.testing.assert_allclose(
            out, layer_norm_reference(expected, weight, bias, 1e-5), rtol=1e-5, atol=2e-5
        )
    np.testing.assert_array_equal(residual, total)


def test_sums_and_factors(instruction_set):
    for dim in DIMS:
        x, other, gate = random_rows(9, dim), random_rows(9, dim, 1), random_rows(9, 1, 2) * np.float32(20)
        scaled, capped, gated, total = (random_rows(9, dim) for _ in range(4))
        capped *= 40

        def record(plan: _native.Plan, rows=(other, gate, scaled, capped, gated, total), n=dim) -> None:
            other, gate, scaled, capped, gated, total = rows
            plan.add(address(other), stride(other), address(total), stride(total), n)
            plan.scale(address(scaled), stride(scaled), n, 0.25)
            plan.soft_cap(address(capped), stride(capped), n, 30.0)
            plan.sigmoid_scale(address(gated), stride(gated), n, address(gate), stride(gate))

        run(record, tokens=9)
        np.testing.assert_array_equal(total, x + other)
        np.testing.assert_array_equal(scaled, x * np.float32(0.25))
        expected = 30 * np.tanh(x.astype(np.float64) * 40 / 30)
        np.testing.assert_allclose(capped, expected, rtol=1e-6, atol=6e-6)
        with np.errstate(over="ignore"):
            factor = 1 / (1 + np.exp(-gate.astype(np.float64)))
        np.testing.assert_allclose(gated, x * factor, rtol=1e-6, atol=1e-30)


def test_rows_of_outputs_are_counted_by_themselves(instruction_set):
    """Recorded on outputs an operation leaves the rows beyond alone, and does those beyond num_tokens."""
    dim, ones = 20, np.ones(20, np.float32)
    here = address(ones)
    operations = [
        lambda plan, x, out: plan.rms_norm(*x, 0, 0, here, dim, 1e-5, *out, on_outputs=True),
        lambda plan, x, out: plan.layer_norm(*x, 0, 0, here, here, dim, 1e-5, *out, on_outputs=True),
        lambda plan, x, out: plan.add(*x, *out, dim, on_outputs=True),
        lambda plan, _, out: plan.scale(*out, dim, 2.0, on_outputs=True),
        lambda plan, _, out: plan.soft_cap(*out, dim, 2.0, on_outputs=True),
        lambda plan, x, out: plan.sigmoid_scale(*out, dim, *x, on_outputs=True),
        lambda plan, x, out: plan.activate(*x, dim, "relu", *out, on_outputs=True),
        lambda plan, x, out: plan.gate_and_mul(*x, dim, "silu", 0.0, *out, on_outputs=True),
    ]
    for operation in operations:
        x, out = random_rows(9, 2 * dim), random_rows(9, dim, 1)
        before = out.copy()

        def record(plan: _native.Plan, operation=operation, x=x, out=out) -> None:
            operation(plan, (address(x), stride(x)), (address(out), stride(out)))

        run(record, tokens=2, outputs=5)
        assert (out != before).any(1).tolist() == [True] * 5 + [False] * 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda plan, x: plan.layer_norm(x, 8, 0, 0, x, 0, 8, 1e-5, x, 8), "bias must be an address"),
        (
            lambda plan, x: plan.layer_norm(x, 8, x, 7, x, x, 8, 1e-5, x, 8),
            "residual_stride must be at least 8",
        ),
        (lambda plan, x: plan.add(x, 8, x, 7, 8), "other_stride must be at least 8, not 7"),
        (lambda plan, x: plan.scale(x, 8, 8, float("inf")), "factor must be finite"),
        (lambda plan, x: plan.soft_cap(x, 8, 8, 0.0), "cap must be finite and above 0"),
        (lambda plan, x: plan.sigmoid_scale(x, 8, 8, 0, 1), "gate must be an address"),
    ],
)
def test_bad_arguments_are_named(record, message):
    memory = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=message):
        record(_native.Plan(_native.ThreadPool(1)), address(memory))


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
@pytest.mark.parametrize("qk_norm", [None, "each head", "all heads"])
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
    normed = (heads, kv_heads) if qk_norm == "all heads" else (1, 1)
    q_norm, k_norm = (
        random_rows(1, count * head_dim, seed)[0] if qk_norm else None
        for count, seed in zip(normed, (3, 4), strict=True)
    )
    tables = (address(cos), address(sin), address(positions)) if rotary_dim else (0, 0, 0)
    run(
        lambda plan: plan.rotary_and_cache(
            address(qkv), stride(qkv), heads, kv_heads, head_dim, rotary_dim,
            address(q_norm), normed[0] * head_dim, address(k_norm), normed[1] * head_dim, 1e-6, *tables,
            address(slots), address(cache.keys), address(cache.values), kv_dtype, 32,
        ),
        tokens=tokens,
    )  # fmt: skip

    split = before.reshape(tokens, -1, head_dim).astype(np.float64)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]

    def rotated(x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        if norm is not None:
            x = rms(x.reshape(tokens, -1, len(norm)), norm, 1e-6).reshape(x.shape)
        x = x.copy()
        c, s = (table[positions][:, None, :half].astype(np.float64) for table in (cos, sin))
        x1, x2 = x[..., :half].copy(), x[..., half:rotary_dim].copy()
        x[..., :half], x[..., half:rotary_dim] = x1 * c - x2 * s, x2 * c + x1 * s
        return x

    result = qkv.reshape(tokens, -1, head_dim)
    np.testing.assert_allclose(result[:, :heads], rotated(q, q_norm), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(result[:, heads:], before.reshape(tokens, -1, head_dim)[:, heads:])
    error = 1e-3 if kv_dtype == "float16" else 2e-6
    written = slots >= 0
    keys, values = cache.at(slots[written])
    np.testing.assert_allclose(keys, rotated(k, k_norm)[written], rtol=error, atol=error)
    np.testing.assert_array_equal(values, v[written].astype(kv_dtype))
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
    slots = np.arange(tokens, dtype=np.int64)
    run(
        lambda plan: plan.rotary_and_cache(
            address(qkv), stride(qkv), 1, 1, 128, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, address(slots),
            address(cache.keys), address(cache.values), "float16", 16,
        ),
        tokens=tokens,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -65504, 65504).astype(np.float16)
    stored = cache.values[:, 0].reshape(-1, 128)[:tokens]
    np.testing.assert_array_equal(stored, expected)
    keys = cache.keys[:, 0, 0].transpose(0, 2, 1).reshape(-1, 128)[:tokens]
    np.testing.assert_array_equal(keys, expected)


@pytest.mark.parametrize("head_dim", [8, 24, 32, 80, 256])
def test_int8_cache_has_a_scale_for_each_token_and_head(instruction_set, head_dim):
    rng = np.random.default_rng(1)
    tokens, heads = 24, 3
    qkv = rng.standard_normal((tokens, 3 * heads, head_dim)).astype(np.float32)
    qkv *= 10.0 ** rng.integers(-20, 4, (tokens, 3 * heads, 1)).astype(np.float32)
    qkv[1] = 0
    qkv[2] *= np.float32(1e-31) / np.abs(qkv[2]).max()
    # With a maximum of 127, halves are rounded as they are.
    qkv[3] = rng.integers(-252, 253, (3 * heads, head_dim)) / 2
    qkv[3, :, 1] = -127
    for token, special in enumerate([np.nan, np.inf, -np.inf, 3e38, -65504, 65505], start=4):
        qkv[token, heads + token % 6, token % head_dim] = special
    slots = rng.permutation(64)[:tokens].astype(np.int64)
    slots[11] = -1
    cache = PagedCache(heads, head_dim, 32, 2, "int8")
    expected = PagedCache(heads, head_dim, 32, 2, "int8")
    written = slots >= 0
    expected.put(slots[written], qkv[written, heads : 2 * heads], qkv[written, 2 * heads :])
    rows = qkv.reshape(tokens, -1).copy()
    run(
        lambda plan: plan.rotary_and_cache(
            address(rows), stride(rows), heads, heads, head_dim, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, address(slots),
            address(cache.key_memory), address(cache.value_memory), "int8", 32,
        ),
        tokens=tokens,
    )  # fmt: skip
    for name in ("keys", "values", "key_scales", "value_scales"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(expected, name), err_msg=name)
    assert np.isnan(cache.value_scales).any() and (cache.key_scales == 0).sum() == 2 * heads


def test_rows_do_not_depend_on_the_batch(instruction_set):
    x = random_rows(60, 250)
    weight, bias = random_rows(1, 250, 1)[0], random_rows(1, 250, 2)[0]

    def results(rows: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
        rms_normed, layer_normed = padded_rows(len(rows), 250), padded_rows(len(rows), 250)

        def record(plan: _native.Plan) -> None:
            source = address(rows), stride(rows), 0, 0, address(weight)
            plan.rms_norm(*source, 250, 1e-5, address(rms_normed), stride(rms_normed))
            plan.layer_norm(*source, address(bias), 250, 1e-5, address(layer_normed), stride(layer_normed))

        run(record, tokens=len(rows), threads=threads)
        return rms_normed, layer_normed

    together = results(x, 4)
    for i in range(0, 60, 7):
        for whole, alone in zip(together, results(x[i : i + 1], 1), strict=True):
            np.testing.assert_array_equal(alone[0], whole[i])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 18}, "rotary_dim must be even and at most head_dim = 16, not 18"),
        ({"rotary_dim": 8, "cos": 0}, "cos must be an address"),
        ({"rotary_dim": 8, "rope_rows": 0}, "rope_rows must be an address"),
        ({"q_norm_dim": 48}, r"q_norm_dim must be 16 \(each head\) or 64 \(all heads\), not 48"),
        ({"k_norm_dim": 64}, "k_norm_dim must be 16 .* or 32 .*, not 64"),
    ],
)
def test_bad_rotary_arguments_are_named(changes, message):
    plan, memory = _native.Plan(_native.ThreadPool(1)), np.zeros(512, np.float32)
    addresses = (
        "qkv",
        "q_norm",
        "k_norm",
        "cos",
        "sin",
        "rope_rows",
        "slot_mapping",
        "key_cache",
        "value_cache",
    )
    arguments = dict.fromkeys(addresses, address(memory)) | {
        "qkv_stride": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 0,
        "q_norm_dim": 64, "k_norm_dim": 16, "norm_eps": 1e-6, "kv_dtype": "float32", "block_size": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        plan.rotary_and_cache(**(arguments | changes))
    plan.rotary_and_cache(**arguments)
    assert plan.num_ops == 1
