"""Norms and rotation of q and k with the cache write (csrc/cuda/rotary_cache.cu), emulated, against float64.

Emulation cannot see coalescing or what a launch costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from helpers.cuda_emulation import EmulatedLibrary, address, emulated
from helpers.guarded_arrays import GuardedArray
from helpers.int8_cache import elements_and_scales, hard_heads, quantize_heads, unwritten_plane
from helpers.number_formats import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT8,
    NumberFormat,
    assert_rounds_to,
)

from streamllm.ops.gpu.cuda.elementwise import RotaryAndCacheArgs

DTYPES = [pytest.param(dtype, id=dtype.name) for dtype in (FLOAT32, FLOAT16, BFLOAT16)]
CACHE_DTYPES = [
    pytest.param(dtype, id=f"cache_{dtype.name}") for dtype in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8)
]
EPS, NUM_BLOCKS, ROPE_ROWS = 1e-6, 7, 50


@dataclass
class Case:
    """Inputs, drawn from ``seed``; ``slots`` and ``qkv`` may be given."""

    head_dim: int = 128
    rotary_dim: int = 128
    dtype: NumberFormat = BFLOAT16
    cache_dtype: NumberFormat = BFLOAT16
    num_heads: int = 6
    num_kv_heads: int = 2
    tokens: int = 5
    block_size: int = 16
    has_norms: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0
    gap: int = 0
    shift: int = 0
    seed: int = 0
    qkv: np.ndarray = field(default_factory=lambda: np.empty(0))
    slots: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        angles = rng.uniform(0, 6, (ROPE_ROWS, self.rotary_dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.rope_rows = rng.integers(0, ROPE_ROWS, self.tokens, np.int32)
        self.norms = rng.standard_normal((2, self.head_dim), np.float32)
        if not self.qkv.size:
            self.qkv = self.dtype.encode(3 * rng.standard_normal((self.tokens, width)))
        if not self.slots.size:
            self.slots = rng.permutation(NUM_BLOCKS * self.block_size)[: self.tokens]
        self.slots = self.slots.astype(np.int64)
        shape = (NUM_BLOCKS, self.num_kv_heads, self.block_size, self.head_dim)
        # What a cache holds before its first write may be anything.
        is_int8 = self.cache_dtype is INT8
        self.old_cache = unwritten_plane(*shape) if is_int8 else self.cache_dtype.nan(shape)

    def run(self, library: EmulatedLibrary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows, the keys and the values after the call, which has written nothing beside them."""
        rows = GuardedArray(self.qkv, gap=self.gap, shift=self.shift)
        keys, values = GuardedArray(self.old_cache), GuardedArray(self.old_cache)
        q_norm, k_norm = self.norms if self.has_norms else (None, None)
        arguments = RotaryAndCacheArgs(
            rows.address, keys.address, values.address, address(self.slots), address(self.rope_rows),
            address(self.cos), address(self.sin), address(q_norm), address(k_norm), rows.stride, self.tokens,
            self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim, self.block_size,
            self.dtype.code, self.cache_dtype.code, EPS, self.key_scale, self.value_scale,
        )  # fmt: skip
        library.call("rotary_and_cache", arguments)
        for array in (rows, keys, values):
            array.assert_nothing_beside_it_changed()
        return rows.array, keys.array, values.array

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rotated q heads, and what the cache gets of k and v: float64 ``[tokens, heads, head_dim]``."""
        heads = self.dtype.decode(self.qkv).reshape(self.tokens, -1, self.head_dim)
        q, k, v = np.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        if self.has_norms:
            q, k = (self._normalized(x, weight) for x, weight in zip((q, k), self.norms, strict=True))
        return (
            self._rotated(q),
            self._stored(self._rotated(k), self.key_scale),
            self._stored(v, self.value_scale),
        )

    @staticmethod
    def _normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.rotary_dim // 2
        cos, sin = (table[self.rope_rows][:, None].astype(np.float64) for table in (self.cos, self.sin))
        x1, x2, others = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, others], axis=-1)

    def _stored(self, x: np.ndarray, scale: float) -> np.ndarray:
        if self.cache_dtype in (FLOAT16, FLOAT8):
            return np.clip(x / scale, -self.cache_dtype.largest, self.cache_dtype.largest)
        return x


def check(case: Case, library: EmulatedLibrary) -> None:
    """Every element of q and of the cache is what it should be, and k and v in the rows are as they were."""
    rows, keys, values = case.run(library)
    q, k, v = case.expected()
    q_width = case.num_heads * case.head_dim
    # A rotation may cancel: its error is relative to what is rotated.
    tolerances = {"rtol": 1e-5, "atol": 1e-5}
    assert_rounds_to(rows[:, :q_width], q.reshape(case.tokens, -1), case.dtype, **tolerances)
    np.testing.assert_array_equal(rows[:, q_width:], case.qkv[:, q_width:])
    written = np.flatnonzero(case.slots >= 0)
    block, offset = np.divmod(case.slots[written], case.block_size)
    for cache, new in ((keys, k), (values, v)):
        expected = np.full(cache.shape, np.nan)
        expected[block, :, offset] = new[written]
        assert_rounds_to(cache, expected, case.cache_dtype, **tolerances)


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return emulated("rotary_cache.cu")


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(2, 2), (8, 4), (32, 32), (40, 20), (64, 64), (64, 16), (72, 72), (80, 32), (96, 0), (112, 112),
     (128, 128), (128, 64), (160, 160), (192, 128), (256, 256), (256, 64)],
)  # fmt: skip
def test_rotary_and_cache(library, head_dim, rotary_dim, dtype, cache_dtype):
    for seed in (0, 1):
        rng = np.random.default_rng([head_dim, rotary_dim, seed])
        heads, kv_heads = [(1, 1), (4, 4), (6, 2), (8, 1), (5, 5)][rng.integers(5)]
        scales = rng.uniform(0.01, 0.1, 2) if cache_dtype is FLOAT8 else (1.0, 1.0)
        case = Case(
            head_dim, rotary_dim, dtype, cache_dtype, heads, kv_heads,
            tokens=int(rng.integers(1, 8)), block_size=int(rng.choice([1, 5, 16, 32])),
            has_norms=bool(seed), key_scale=float(np.float32(scales[0])),
            value_scale=float(np.float32(scales[1])), seed=seed,
        )  # fmt: skip
        check(case, library)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gap", "shift"), [(8, 0), (3, 0), (0, 1), (5, 3)])
def test_rows_anywhere(library, gap, shift, dtype):
    check(Case(dtype=dtype, gap=gap, shift=shift, has_norms=True), library)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_a_token_without_a_slot_writes_nothing_but_its_queries(library, head_dim, has_norms):
    for slots in ([-1, 17, -5, 0, -1], [-1] * 5):
        check(Case(head_dim, head_dim, has_norms=has_norms, slots=np.array(slots)), library)


def test_only_one_of_the_norms(library):
    case = Case(has_norms=True, seed=3)
    whole = case.run(library)
    without = replace(case, has_norms=False).run(library)
    q_width = case.num_heads * case.head_dim
    rows, cache = GuardedArray(case.qkv), [GuardedArray(case.old_cache) for _ in range(2)]
    arguments = RotaryAndCacheArgs(
        rows.address, cache[0].address, cache[1].address, address(case.slots), address(case.rope_rows),
        address(case.cos), address(case.sin), None, address(case.norms[1]), rows.stride, case.tokens,
        case.num_heads, case.num_kv_heads, case.head_dim, case.rotary_dim, case.block_size, case.dtype.code,
        case.cache_dtype.code, EPS, 1.0, 1.0,
    )  # fmt: skip
    library.call("rotary_and_cache", arguments)
    np.testing.assert_array_equal(rows.array[:, :q_width], without[0][:, :q_width])
    np.testing.assert_array_equal(cache[0].array, whole[1])


@pytest.mark.parametrize("cache_dtype", [FLOAT16, FLOAT8], ids=lambda dtype: dtype.name)
def test_what_the_cache_cannot_hold_becomes_its_largest(library, cache_dtype):
    shape = (3, (2 + 2) * 64)
    values = np.random.default_rng(0).standard_normal(shape) * 10.0 ** np.random.default_rng(1).integers(
        0, 8, shape
    )
    values[0, 130], values[1, 200] = np.inf, -np.inf
    case = Case(
        64, 0, FLOAT32, cache_dtype, num_heads=2, num_kv_heads=1, tokens=3,
        qkv=FLOAT32.encode(values), slots=np.array([3, 20, 1]), key_scale=2.0, value_scale=0.5,
    )  # fmt: skip
    if cache_dtype is FLOAT16:
        case.key_scale = case.value_scale = 1.0
    check(case, library)
    _, keys, _ = case.run(library)
    assert cache_dtype.decode(keys[0, 0, 3, 2]) == cache_dtype.largest


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_nan_stays_in_its_head(library, has_norms, cache_dtype):
    case = Case(cache_dtype=cache_dtype, has_norms=has_norms, tokens=3, slots=np.array([0, 1, 2]))
    clean_rows, clean_keys, clean_values = case.run(library)
    nan, dim = BFLOAT16.encode(np.array([np.nan]))[0], case.head_dim
    for head in (1, case.num_heads, case.num_heads + 3):  # of q, k and v
        case.qkv[1, head * dim + 5] = nan
    rows, keys, values = case.run(library)
    changed_heads = (BFLOAT16.decode(rows) != BFLOAT16.decode(clean_rows)).reshape(3, -1, dim).any(-1)
    assert np.argwhere(changed_heads).tolist() == [[1, 1], [1, case.num_heads], [1, case.num_heads + 3]]
    partner = 5 + case.rotary_dim // 2
    places = slice(None) if has_norms else [5, partner]
    assert np.isnan(cache_dtype.decode(keys[0, 0, 1, places])).all()
    np.testing.assert_array_equal(keys[0, 1], clean_keys[0, 1])
    assert np.flatnonzero(np.isnan(cache_dtype.decode(values[0, 1, 1]))).tolist() == [5]
    np.testing.assert_array_equal(values[0, 0], clean_values[0, 0])


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BFLOAT16), (72, FLOAT16), (256, FLOAT32)])
def test_the_same_bits_in_every_batch_and_order(library, head_dim, dtype):
    case = Case(head_dim, head_dim, dtype, FLOAT8, has_norms=True, key_scale=0.02, value_scale=0.03)
    batch = case.run(library)
    for seed in range(1, 11):
        library.set_seed(seed)
        for one, other in zip(case.run(library), batch, strict=True):
            np.testing.assert_array_equal(one, other)
    library.set_seed(0)
    for row in range(case.tokens):
        alone = replace(case, tokens=1, qkv=case.qkv[row : row + 1], slots=case.slots[row : row + 1])
        alone.cos, alone.sin, alone.norms = case.cos, case.sin, case.norms
        alone.rope_rows = case.rope_rows[row : row + 1]
        rows, keys, values = alone.run(library)
        block, offset = divmod(int(case.slots[row]), case.block_size)
        np.testing.assert_array_equal(rows[0], batch[0][row])
        np.testing.assert_array_equal(keys[block, :, offset], batch[1][block, :, offset])
        np.testing.assert_array_equal(values[block, :, offset], batch[2][block, :, offset])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 40, 64, 128, 256])
def test_an_int8_cache_has_the_elements_and_scales_that_it_has_on_a_cpu(library, head_dim, dtype):
    slots = np.random.default_rng(0).permutation(NUM_BLOCKS * 16)[:24]
    slots[11] = -1
    case = Case(
        head_dim, 0, dtype, INT8, num_heads=2, num_kv_heads=2, tokens=24,
        qkv=dtype.encode(hard_heads(6, head_dim).reshape(24, -1)), slots=slots,
    )  # fmt: skip
    rows, *planes = case.run(library)
    np.testing.assert_array_equal(rows, case.qkv)
    heads = dtype.decode(case.qkv).reshape(24, 6, head_dim)
    written = np.flatnonzero(case.slots >= 0)
    block, offset = np.divmod(case.slots[written], 16)
    for plane, first in zip(planes, (2, 4), strict=True):
        expected = elements_and_scales(case.old_cache.copy(), head_dim)
        quantized = quantize_heads(heads[written, first : first + 2].astype(np.float32))
        for found, whole, new in zip(elements_and_scales(plane, head_dim), expected, quantized, strict=True):
            whole[block, :, offset] = new
            np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (72, 32), (128, 128), (256, 64)])
def test_an_int8_cache_of_normed_and_rotated_keys(library, head_dim, rotary_dim, dtype):
    case = Case(head_dim, rotary_dim, dtype, INT8, has_norms=True, slots=np.array([3, -1, 20, 0, 40]))
    _, *planes = case.run(library)
    _, *expected = case.expected()
    written = np.flatnonzero(case.slots >= 0)
    block, offset = np.divmod(case.slots[written], case.block_size)
    for plane, heads in zip(planes, expected, strict=True):
        elements, scales = elements_and_scales(plane, head_dim)
        found, scale = elements[block, :, offset], scales[block, :, offset]
        np.testing.assert_allclose(scale, np.abs(heads[written]).max(-1) / 127, rtol=1e-5)
        error = np.abs(found * scale[..., None].astype(np.float64) - heads[written])
        assert (error <= 0.501 * scale[..., None]).all()
        elements[block, :, offset], scales[block, :, offset] = 99, np.nan
        assert (elements == 99).all() and np.isnan(scales).all()


def test_no_tokens_are_no_work(library):
    library.call("rotary_and_cache", RotaryAndCacheArgs(tokens=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 258, "rotary_dim": 2}, "head size"),
        ({"head_dim": 33, "rotary_dim": 2}, "head size"),
        ({"rotary_dim": 3}, "size or stride"),
        ({"rotary_dim": 66}, "size or stride"),
        ({"block_size": 0}, "size or stride"),
        ({"dtype": FLOAT8.code}, "dtype"),
        ({"cache_dtype": 5}, "dtype"),
        ({"cache_dtype": INT8.code, "block_size": 8}, "size or stride"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(library, changes, message):
    fields = {"tokens": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, **changes}
    with pytest.raises(ValueError, match=f"rotary_and_cache: .*{message}"):
        library.call("rotary_and_cache", RotaryAndCacheArgs(**fields))
