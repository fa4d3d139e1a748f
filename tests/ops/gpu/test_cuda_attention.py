"""Paged decode attention (csrc/cuda/attention_decode.cu), emulated, against float64.

Emulation runs blocks one after the other and threads in turns, and lets an asynchronous copy take place when
it is waited for: it cannot see coalescing, bank conflicts, two blocks at once, a copy that begins before its
place is free, how a matrix unit rounds its sums, or what the compiler for a GPU makes of the code.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.cuda_emulation import EmulatedLibrary, emulated
from helpers.decode_case import DecodeCase
from helpers.number_formats import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT8,
    NumberFormat,
    assert_rounds_to,
)
from helpers.pairwise import pairwise_cover

from streamllm.ops.gpu.kernels import SPLIT_SIZE

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
BLOCK_SIZES = (16, 32, 48, 64, 128, 256)
# Around the ends of blocks, of the kernel's tiles and of splits.
LENGTHS = (
    0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129,
    255, 256, 257, 511, 512, 513, 767, 768, 769, 1025,
)  # fmt: skip
DTYPES = [(dtype, cache) for dtype in (FLOAT32, FLOAT16, BFLOAT16) for cache in (dtype, FLOAT8, INT8)]

PARAMETERS = {
    "head_dim": HEAD_DIMS,
    "dtypes": DTYPES,
    "group": GROUPS,
    "block_size": BLOCK_SIZES,
    "length": (0, 1, 15, 16, 17, 48, 255, 256, 257, 513, 769),
    "window": (0, 1, 17, 100, 256, 300),
    "soft_cap": (0.0, 2.0, 30.0),
    "sinks": (False, True),
    "kv_heads": (1, 2, 3),
    "matrix_units_from": (0, 1),
}
COVER = pairwise_cover(PARAMETERS)


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return emulated("attention_decode.cu")


def make_case(values: dict, seed: int) -> DecodeCase:
    """A case of PARAMETERS, with some more sequences of random lengths."""
    choice = random.Random(seed)
    dtype, cache_dtype = values.pop("dtypes")
    lengths = [values.pop("length"), choice.choice(LENGTHS), choice.randrange(1, 700)]
    choice.shuffle(lengths)
    is_float8 = cache_dtype is FLOAT8
    return DecodeCase(
        contexts=[*lengths, 5],
        decoded=[True, True, True, False],
        dtype=dtype,
        cache_dtype=cache_dtype,
        key_scale=choice.choice((0.25, 1.5)) if is_float8 else 1.0,
        value_scale=choice.choice((0.125, 3.0)) if is_float8 else 1.0,
        names=[100 * seed + i for i in range(4)],
        seed=seed,
        num_multiprocessors=choice.choice((1, 3, 1000)),
        **values,
    )


def check(library: EmulatedLibrary, case: DecodeCase, rtol: float = 1e-5) -> None:
    """Every decoded row is float64's but for ``rtol`` of its values' magnitude and its own rounding; no other
    row is touched."""
    assert_rounds_to(case.run(library), case.expected(), case.dtype, rtol=rtol, atol=rtol * case.values_scale)


@pytest.mark.parametrize("index", range(len(COVER)))
def test_any_two_parameters(library: EmulatedLibrary, index: int) -> None:
    check(library, make_case(dict(COVER[index]), index))


@pytest.mark.parametrize("seed", range(20))
def test_random_parameters(library: EmulatedLibrary, seed: int) -> None:
    choice = random.Random(1000 + seed)
    check(
        library, make_case({name: choice.choice(values) for name, values in PARAMETERS.items()}, 1000 + seed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400))
def test_more_random_parameters(library: EmulatedLibrary, seed: int) -> None:
    choice = random.Random(2000 + seed)
    values = {name: choice.choice(values) for name, values in PARAMETERS.items()}
    multiple = 16 if values["dtypes"][1] in (FLOAT8, INT8) else 8
    values |= {"head_dim": choice.randrange(multiple, 257, multiple), "group": choice.randrange(1, 25)}
    values |= {"block_size": choice.randrange(16, 257, 16), "length": choice.randrange(2500)}
    values |= {"window": choice.choice((0, choice.choice(LENGTHS), choice.randrange(1, 600)))}
    check(library, make_case(values, 2000 + seed))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("dtype", "head_dim"), [(FLOAT32, 256), (FLOAT16, 128), (BFLOAT16, 64)])
def test_lengths_around_every_boundary(
    library: EmulatedLibrary, dtype: NumberFormat, head_dim: int, block_size: int
) -> None:
    check(
        library,
        DecodeCase(
            LENGTHS, kv_heads=1, head_dim=head_dim, block_size=block_size, dtype=dtype, cache_dtype=dtype
        ),
    )


@pytest.mark.parametrize("window", [1, 15, 16, 17, 255, 256, 257, 511, 600])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows(library: EmulatedLibrary, window: int, sinks: bool) -> None:
    check(library, DecodeCase([window - 1, window, window + 1, 700, 768, 769], window=window, sinks=sinks))


def test_long_context(library: EmulatedLibrary) -> None:
    """More splits than the warps that merge them, in uneven runs."""
    check(library, DecodeCase([9 * SPLIT_SIZE + 1, 18 * SPLIT_SIZE - 1], kv_heads=1, group=4, sinks=True))


def test_without_sequences_to_decode(library: EmulatedLibrary) -> None:
    check(library, DecodeCase([7, 300], decoded=[False, False]))


def test_contexts_of_nothing_give_zeros(library: EmulatedLibrary) -> None:
    out = DecodeCase([0, 0, 0], sinks=True, dtype=BFLOAT16, cache_dtype=BFLOAT16).run(library)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("group", [2, 8])
def test_large_values(library: EmulatedLibrary, group: int, dtype: NumberFormat) -> None:
    check(library, DecodeCase([1, 40, 600], group=group, dtype=dtype, cache_dtype=dtype, values_scale=1e4))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("group", [2, 8])
def test_large_scores(library: EmulatedLibrary, group: int, dtype: NumberFormat) -> None:
    """Scores of some 10^4 overflow exp() without the maximum; float32's own rounding of them is 10^-3."""
    case = DecodeCase(
        [1, 40, 600], group=group, dtype=dtype, cache_dtype=dtype, queries_scale=100, keys_scale=100
    )
    check(library, case, rtol=5e-3)
    check(library, replace(case, soft_cap=20.0), rtol=1e-4)


def set_key(case: DecodeCase, sequence: int, positions: slice, dimension: int, value: float) -> None:
    for position in range(case.contexts[sequence])[positions]:
        block = case.block_tables[case.table_rows[sequence], position // case.block_size]
        case.keys[block, :, position % case.block_size, dimension] = value


@pytest.mark.parametrize(("dtype", "group"), [(FLOAT32, 1), (FLOAT32, 4), (FLOAT32, 6), (FLOAT16, 6)])
def test_scores_of_minus_infinity(library: EmulatedLibrary, dtype: NumberFormat, group: int) -> None:
    """They weigh nothing; a row that has no others is zeros."""
    case = DecodeCase([40, 40, 600, 600], group=group, names=[0, 0, 1, 1], dtype=dtype, cache_dtype=dtype)
    case.q[:, :: case.head_dim] = 1.0  # each head's first dimension
    for sequence, positions in enumerate((slice(None), slice(10, 40), slice(None), slice(100, 600))):
        set_key(case, sequence, positions, 0, -np.inf)
    set_key(case, 1, slice(0, 10), 0, 0.0)
    set_key(case, 3, slice(0, 100), 0, 0.0)
    out = case.run(library)
    np.testing.assert_array_equal(out[[0, 2]], 0)
    seen = DecodeCase([10, 100], group=group, names=[0, 1], dtype=dtype, cache_dtype=dtype)
    seen.q[:] = case.q[[1, 3]]
    for sequence in range(2):
        set_key(seen, sequence, slice(None), 0, 0.0)
    tolerance = 1e-5 if dtype is FLOAT32 else 1e-3
    np.testing.assert_allclose(out[[1, 3]], seen.run(library), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(("dtype", "group"), [(FLOAT32, 2), (FLOAT16, 4)])
def test_nan_in_a_key_reaches_its_own_row_alone(
    library: EmulatedLibrary, dtype: NumberFormat, group: int
) -> None:
    case = DecodeCase([300, 300, 20], group=group, dtype=dtype, cache_dtype=dtype)
    set_key(case, 1, slice(270, 271), 3, np.nan)
    out, expected = case.run(library), case.expected()
    assert np.isnan(out[1]).all()
    np.testing.assert_allclose(out[[0, 2]], expected[[0, 2]], atol=1e-5 if dtype is FLOAT32 else 1e-3)


def test_repeated_blocks(library: EmulatedLibrary) -> None:
    """Sequences share a prefix's blocks; a table may name a block twice."""
    case = DecodeCase([64, 64], names=[5, 5])
    first, second = (case.block_tables[row] for row in case.table_rows)
    second[:4] = first[:4]
    out = case.run(library)
    np.testing.assert_array_equal(out[0], out[1])
    check(library, case)
    second[:4] = first[0]
    repeated = case.run(library)[1]
    case.context_lens[1] = 16  # the same keys four times weigh as they do once
    np.testing.assert_allclose(repeated, case.run(library)[1], atol=1e-5)


def test_a_block_that_is_gone_is_not_read(library: EmulatedLibrary) -> None:
    """Even within the context: its positions are not there."""
    case = DecodeCase([48, 300])
    table = case.block_tables[case.table_rows[0]]
    table[0] = -1
    out = case.run(library)
    case.block_tables[case.table_rows[0], :2] = table[1:3]
    case.context_lens[0] = 32
    np.testing.assert_allclose(out[0], case.run(library)[0], atol=1e-5)


@pytest.mark.parametrize(("dtype", "head_dim"), [(FLOAT32, 80), (BFLOAT16, 64)])
@pytest.mark.parametrize("seed", range(1, 11))
def test_bits_do_not_depend_on_the_order_of_threads_and_blocks(
    library: EmulatedLibrary, seed: int, dtype: NumberFormat, head_dim: int
) -> None:
    case = DecodeCase(
        [1, 255, 600, 1000],
        decoded=[True, False, True, True],
        group=5,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=dtype,
        sinks=True,
    )
    library.set_seed(0)
    expected = case.run(library)
    library.set_seed(seed)
    found = case.run(library)
    library.set_seed(0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("dtype", "group"), [(FLOAT32, 1), (FLOAT16, 4), (BFLOAT16, 8)])
def test_bits_of_a_sequence_alone_and_in_a_batch(
    library: EmulatedLibrary, dtype: NumberFormat, group: int, window: int
) -> None:
    contexts = [1, 17, 256, 257, 900]
    case = DecodeCase(contexts, group=group, dtype=dtype, cache_dtype=dtype, window=window)
    together = case.run(library)
    for name, context in enumerate(contexts):
        alone = replace(
            case, contexts=[context], names=[name], decoded=None, seed=name, num_multiprocessors=7
        )
        np.testing.assert_array_equal(alone.run(library)[0], together[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head size"),
        ({"head_dim": 264}, "head size"),
        ({"head_dim": 40, "cache_dtype": FLOAT8}, "head size"),
        ({"head_dim": 40, "cache_dtype": INT8}, "head size"),
        ({"block_size": 24}, "size"),
        ({"cache_dtype": FLOAT16}, "dtype"),
        ({"dtype": FLOAT8, "cache_dtype": FLOAT8}, "dtype"),
        ({"num_multiprocessors": 0}, "size"),
    ],
)
def test_refusals(library: EmulatedLibrary, change: dict, message: str) -> None:
    case = replace(DecodeCase([3]), **change)
    with pytest.raises(ValueError, match=message):
        case.run(library)


def test_refuses_what_is_not_aligned(library: EmulatedLibrary) -> None:
    case = DecodeCase([3])
    arguments = case.arguments(case.dtype.nan((1, 256)))
    arguments.q += 4
    with pytest.raises(ValueError, match="16 bytes"):
        library.call("paged_decode", arguments)


def test_refuses_another_split_size(library: EmulatedLibrary) -> None:
    case = DecodeCase([3])
    arguments = case.arguments(case.dtype.nan((1, 256)))
    arguments.split_size = SPLIT_SIZE // 2
    with pytest.raises(ValueError, match="size"):
        library.call("paged_decode", arguments)
