"""Copies of KV blocks (csrc/cuda/copy_blocks.cu), emulated. Emulation has one memory: that pinned host memory
can be an end of a copy is for a GPU to show."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda_emulation import EmulatedLibrary, address, emulated
from helpers.guarded_arrays import GuardedArray

from streamllm.ops.gpu.cuda.elementwise import CopyBlocksArgs

# Around 16 bytes, and around what one block of threads copies at once, by words of 1 and of 16 bytes.
BLOCK_BYTES = [1, 15, 16, 17, 48, 1000, 1024, 1040, 4096, 16384, 16400, 40000]


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return emulated("copy_blocks.cu")


def pool(planes: int, blocks: int, block_bytes: int, seed: int, **place: int) -> GuardedArray:
    rng = np.random.default_rng(seed)
    return GuardedArray(rng.integers(0, 256, (planes, blocks, block_bytes), np.uint8), **place)


def copy_blocks(
    library: EmulatedLibrary, source: GuardedArray, destination: GuardedArray, pairs: list[tuple[int, int]]
) -> None:
    planes, _, block_bytes = source.array.shape
    table = np.array(pairs, np.int32).reshape(-1, 2)
    arguments = CopyBlocksArgs(
        source.address, destination.address, address(table), source.stride, destination.stride, block_bytes,
        planes, len(pairs),
    )  # fmt: skip
    library.call("copy_blocks", arguments)
    source.assert_nothing_beside_it_changed()
    destination.assert_nothing_beside_it_changed()


@pytest.mark.parametrize("place", [{}, {"gap": 32}, {"gap": 5}, {"shift": 8}], ids=str)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_copies_within_a_pool(library, block_bytes, place):
    blocks = pool(3, 9, block_bytes, 0, **place)
    expected = blocks.array.copy()
    pairs = [(0, 8), (0, 3), (5, 1), (7, 2)]
    for source, destination in pairs:
        expected[:, destination] = expected[:, source]
    copy_blocks(library, blocks, blocks, pairs)
    np.testing.assert_array_equal(blocks.array, expected)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_copies_between_pools_of_different_size(library, block_bytes):
    near, far = pool(4, 5, block_bytes, 1), pool(4, 11, block_bytes, 2, gap=16 * 3)
    expected = far.array.copy()
    expected[:, [10, 0, 4]] = near.array[:, [1, 4, 0]]
    before = near.array.copy()
    copy_blocks(library, near, far, [(1, 10), (4, 0), (0, 4)])
    np.testing.assert_array_equal(far.array, expected)
    np.testing.assert_array_equal(near.array, before)


def test_the_order_of_threads_does_not_matter(library):
    results = []
    for seed in range(11):
        library.set_seed(seed)
        blocks = pool(2, 6, 5000, 3)
        copy_blocks(library, blocks, blocks, [(0, 1), (2, 3), (0, 5)])
        results.append(blocks.array.copy())
    library.set_seed(0)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_blocks_are_moved_16_bytes_at_a_time_and_once(library):
    blocks = pool(2, 6, 32768, 4)
    library.take_traffic()
    copy_blocks(library, blocks, blocks, [(0, 1), (2, 3)])
    assert library.take_traffic() == (2 * 2 * 32768, 2 * 2 * 32768)


def test_nothing_to_copy(library):
    blocks = pool(2, 3, 64, 5)
    before = blocks.array.copy()
    copy_blocks(library, blocks, blocks, [])
    np.testing.assert_array_equal(blocks.array, before)


def test_impossible_sizes_are_refused(library):
    for fields in (
        {"planes": 70_000},
        {"planes": -1},
        {"num_pairs": -1},
        {"block_bytes": -16},
        {"block_bytes": 2**31},
    ):
        with pytest.raises(ValueError, match="copy_blocks: a size"):
            library.call(
                "copy_blocks", CopyBlocksArgs(**{"planes": 1, "num_pairs": 1, "block_bytes": 16, **fields})
            )
