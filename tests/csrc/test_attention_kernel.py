from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from native_reference import AttentionSequence, PagedCache, attention_reference, paged_attention

from streamllm import _native


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def make_sequence(cache: PagedCache, num_heads: int, context: int, rows: int, seed: int) -> AttentionSequence:
    rng = np.random.default_rng(seed)
    table = cache.allocate(context)
    shape = (context, cache.num_kv_heads, cache.head_dim)
    cache.write(table, rng.standard_normal(shape), rng.standard_normal(shape))
    query = rng.standard_normal((rows, num_heads, cache.head_dim)).astype(np.float32)
    return AttentionSequence(query, context, table)


def check(cache: PagedCache, sequences: list[AttentionSequence], tolerance: float = 2e-6, **options) -> None:
    for sequence, result in zip(sequences, paged_attention(cache, sequences, **options), strict=True):
        options.pop("threads", None)
        expected = attention_reference(
            sequence.query, *cache.read(sequence.table, sequence.context), **options
        )
        np.testing.assert_allclose(result, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_matches_float64(instruction_set, head_dim, group, kv_dtype):
    cache = PagedCache(2, head_dim, 16, 48, kv_dtype)
    heads = 2 * group
    shapes = [(1, 1), (15, 15), (16, 1), (17, 3), (33, 20), (100, 1), (257, 2)]
    sequences = [make_sequence(cache, heads, context, rows, i) for i, (context, rows) in enumerate(shapes)]
    check(cache, sequences, scale=head_dim**-0.5)


@pytest.mark.parametrize(("head_dim", "group"), [(8, 1), (24, 3), (64, 8), (80, 4), (128, 3), (256, 1)])
@pytest.mark.parametrize("options", [{}, {"window": 70, "soft_cap": 5.0}])
def test_int8_matches_float64(instruction_set, head_dim, group, options):
    """The arithmetic is float32's: only what is stored was rounded."""
    cache = PagedCache(2, head_dim, 32, 48, "int8")
    sinks = np.linspace(-1, 2, 2 * group, dtype=np.float32) if options else None
    shapes = [(1, 1), (17, 3), (100, 1), (257, 30), (530, 2)]
    sequences = [make_sequence(cache, 2 * group, *shape, i) for i, shape in enumerate(shapes)]
    check(cache, sequences, tolerance=1e-5, scale=head_dim**-0.5, sinks=sinks, **options)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_instruction_sets_that_fuse_products_agree(kv_dtype):
    cache = PagedCache(2, 80, 16, 80, kv_dtype)
    sequences = [make_sequence(cache, 6, context, rows, context) for context, rows in ((40, 40), (600, 2))]
    before, results = _native.instruction_set(), []
    for name in _native.instruction_sets():
        if name == "portable":
            continue
        _native.set_instruction_set(name)
        results.append(np.concatenate(paged_attention(cache, sequences, scale=0.2, soft_cap=20.0)))
    _native.set_instruction_set(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("context", [255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_partition_edges(instruction_set, context, block_size):
    cache = PagedCache(1, 16, block_size, 80)
    sequences = [make_sequence(cache, 3, context, rows, rows) for rows in (1, 30)]
    check(cache, sequences, scale=0.25)


@pytest.mark.parametrize("window", [1, 2, 8, 15, 16, 17, 100, 256, 300, 1000])
def test_sliding_window(instruction_set, window):
    cache = PagedCache(2, 8, 16, 120)
    shapes = [(1, 1), (20, 20), (300, 40), (301, 1), (520, 9)]
    sequences = [make_sequence(cache, 6, context, rows, i) for i, (context, rows) in enumerate(shapes)]
    check(cache, sequences, scale=0.35, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
def test_soft_cap(instruction_set, soft_cap):
    cache = PagedCache(2, 16, 16, 60)
    sequences = [make_sequence(cache, 4, context, 3, context) for context in (5, 270)]
    check(cache, sequences, tolerance=2e-5, scale=1.0, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [0, 20])
def test_sinks(instruction_set, window):
    """From none to one that outweighs all keys; contexts of one partition and of several."""
    cache = PagedCache(2, 16, 16, 60)
    sinks = np.array([-np.inf, -3.0, 1.5, 100.0], np.float32)
    sequences = [make_sequence(cache, 4, context, 3, context) for context in (5, 600)]
    check(cache, sequences, scale=0.25, window=window, sinks=sinks)


def test_many_heads_share_one_key_head(instruction_set):
    cache = PagedCache(1, 16, 16, 40)
    check(cache, [make_sequence(cache, 71, 50, 3, 0)], scale=0.25)


def test_large_scores_do_not_overflow(instruction_set):
    cache = PagedCache(1, 64, 16, 40)
    sequence = make_sequence(cache, 1, 300, 5, 0)
    sequence.query *= 100
    check(cache, [sequence], tolerance=1e-3, scale=1.0)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("group", "kv_dtype"), [(1, "float32"), (3, "float32"), (3, "int8"), (5, "float32")])
def test_any_chunking_and_batch_gives_the_same_bits(instruction_set, group, kv_dtype, window):
    rng = np.random.default_rng(3)
    cache = PagedCache(2, 24, 16, 200, kv_dtype)
    sinks = rng.standard_normal(2 * group).astype(np.float32)
    options = {"scale": 0.2, "window": window, "sinks": sinks if window else None}
    total = 320
    whole = make_sequence(cache, 2 * group, total, total, 0)
    others = [
        make_sequence(cache, 2 * group, int(rng.integers(9, 150)), int(rng.integers(1, 9)), i)
        for i in range(6)
    ]
    expected = paged_attention(cache, [whole], **options, threads=1)[0]
    one_by_one = [AttentionSequence(whole.query[i : i + 1], i + 1, whole.table) for i in range(total)]
    decoded = paged_attention(cache, one_by_one, **options)
    np.testing.assert_array_equal(np.concatenate(decoded), expected)
    for threads in (1, 2, 4):
        edges = np.unique(np.concatenate([[0, total], rng.integers(1, total, 6)]))
        for begin, end in pairwise(edges):
            chunk = AttentionSequence(whole.query[begin:end], int(end), whole.table)
            neighbours = [others[i] for i in rng.permutation(6)[: rng.integers(0, 6)]]
            place = int(rng.integers(0, len(neighbours) + 1))
            batch = [*neighbours[:place], chunk, *neighbours[place:]]
            result = paged_attention(cache, batch, **options, threads=threads)[place]
            np.testing.assert_array_equal(result, expected[begin:end])


@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(24, "float32"), (64, "float16"), (64, "int8")])
@pytest.mark.parametrize("window", [0, 300])
def test_partitions_on_several_threads_give_the_same_bits(instruction_set, window, head_dim, kv_dtype):
    """A few long contexts are split among the threads; one thread, or a large batch, is given them whole."""
    cache = PagedCache(3, head_dim, 16, 400, kv_dtype)
    shapes = [(1300, 1), (700, 3), (200, 1)]
    long = [make_sequence(cache, 9, context, rows, i) for i, (context, rows) in enumerate(shapes)]
    options = {"scale": 0.2, "window": window, "sinks": np.linspace(-2, 4, 9, dtype=np.float32)}
    expected = paged_attention(cache, long, **options, threads=1)
    check(cache, long, tolerance=1e-5, **options, threads=4)
    crowd = [make_sequence(cache, 9, 20 + i, 1, i) for i in range(40)]
    for batch, threads in [(long, 2), (long[:1], 2), (long[:1], 8), ([*crowd, *long], 4), (long, 40)]:
        results = paged_attention(cache, batch, **options, threads=threads)
        for result, want in zip(results[-len(long) :] if len(batch) > 1 else results, expected, strict=False):
            np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_later_tokens_of_the_chunk_do_not_touch_earlier_rows(instruction_set, kv_dtype):
    cache = PagedCache(1, 64, 16, 20, kv_dtype)
    sequence = make_sequence(cache, 3, 40, 40, 0)
    expected = paged_attention(cache, [sequence], scale=0.125)[0]
    keys, values = cache.read(sequence.table, 40)
    keys[33:], values[33:] = np.nan, np.inf
    cache.write(sequence.table, keys, values)
    result = paged_attention(cache, [sequence], scale=0.125)[0]
    np.testing.assert_array_equal(result[:33], expected[:33])
    assert np.isnan(result[33:]).all()


def test_blocks_do_not_matter(instruction_set):
    shuffled, other = (
        PagedCache(2, 16, block_size, 60, seed=seed) for block_size, seed in ((16, 0), (64, 1))
    )
    results = [
        paged_attention(cache, [make_sequence(cache, 4, 300, 7, 9)], scale=0.25)[0]
        for cache in (shuffled, other)
    ]
    np.testing.assert_array_equal(*results)


def attention_arguments(**changes):
    memory = np.zeros(4096, np.float32)
    arguments = {
        "q": memory.ctypes.data,
        "q_stride": 64,
        "out": memory.ctypes.data,
        "out_stride": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.25,
        "window": 0,
        "soft_cap": 0.0,
        "sinks": 0,
        "query_start": memory.ctypes.data,
        "context_lens": memory.ctypes.data,
        "block_tables": memory.ctypes.data,
        "key_cache": memory.ctypes.data,
        "value_cache": memory.ctypes.data,
        "kv_dtype": "float32",
        "block_size": 16,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12, "q_stride": 100}, "head_dim must be a multiple of 8 up to 256, not 12"),
        ({"head_dim": 264}, "head_dim"),
        ({"block_size": 24}, "block_size must be a multiple of 16, not 24"),
        ({"block_size": 0}, "block_size"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype must be float32, float16 or int8, not 'bfloat16'"),
        ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads, not 3 for 2"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"q_stride": 63}, "q_stride must be at least 64, not 63"),
        ({"out_stride": 0}, "out_stride"),
        ({"window": -1}, "window"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"scale": float("nan")}, "scale"),
        ({"block_tables": 0}, "block_tables must be an address"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    plan = _native.Plan(_native.ThreadPool(1))
    with pytest.raises(ValueError, match=message):
        plan.paged_attention(**attention_arguments(**changes))
    plan.paged_attention(**attention_arguments())
    assert plan.num_ops == 1


def test_index_arrays_that_contradict_the_batch_are_refused():
    cache = PagedCache(1, 8, 16, 4)
    sequence = make_sequence(cache, 1, 3, 3, 0)
    sequence.context = 2
    with pytest.raises(ValueError, match=r"sequence 0: .*context_lens"):
        paged_attention(cache, [sequence], scale=1.0)
