"""The splits of a decode step."""

from __future__ import annotations

import time

import numpy as np
import pytest

from streamllm.ops.gpu.decode_work import decode_work, max_splits
from streamllm.ops.gpu.kernels import SPLIT_SIZE

EDGES = [0, 1, 2, 255, 256, 257, 511, 512, 513, 1000, 4096]


@pytest.mark.parametrize("window", [0, 1, 2, 255, 256, 257, 258, 512, 700])
@pytest.mark.parametrize("seed", range(3))
def test_lists_the_splits_that_each_row_sees(window: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    context_lens = random.permutation(EDGES + random.integers(0, 2000, 9).tolist()).astype(np.int32)
    decoded = random.random(len(context_lens)) < 0.7
    work = decode_work(context_lens, decoded, window)
    assert {array.dtype for array in work} == {np.dtype(np.int32)}
    seen = 0
    for sequence, length in enumerate(context_lens.tolist()):
        if not decoded[sequence]:
            assert work.first_item[sequence] == -1 and work.num_splits[sequence] == 0
            continue
        positions = np.arange(max(length - window, 0) if window else 0, length)
        splits = np.unique(positions // SPLIT_SIZE)
        assert work.first_item[sequence] == seen and work.num_splits[sequence] == len(splits)
        items = work.items[seen : seen + len(splits)]
        assert (items[:, 0] == sequence).all()
        np.testing.assert_array_equal(items[:, 1], splits)
        assert len(splits) <= max_splits(length, window)
        seen += len(splits)
    assert len(work.items) == seen


@pytest.mark.parametrize("window", [0, 1, 2, 256, 257, 258, 1000])
@pytest.mark.parametrize("context_len", [1, 256, 257, 2000])
def test_max_splits_is_reached(context_len: int, window: int) -> None:
    context_lens = np.arange(1, context_len + 1, dtype=np.int32)
    work = decode_work(context_lens, np.ones(context_len, np.bool_), window)
    assert work.num_splits.max() == max_splits(context_len, window)


def test_no_sequences() -> None:
    work = decode_work(np.empty(0, np.int32), np.empty(0, np.bool_))
    assert work.items.shape == (0, 2) and len(work.first_item) == len(work.num_splits) == 0


def test_takes_little_time() -> None:
    context_lens = np.random.default_rng(0).integers(1, 9000, 256).astype(np.int32)
    decoded = np.ones(256, np.bool_)
    fastest = min(_seconds(context_lens, decoded) for _ in range(50))
    assert fastest < 3e-4, "a step waits for it"


def _seconds(context_lens: np.ndarray, decoded: np.ndarray) -> float:
    start = time.perf_counter()
    decode_work(context_lens, decoded, 4096)
    return time.perf_counter() - start
