"""Which splits of which contexts a decode step attends to: what fills a :class:`kernels.DecodeWork`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamllm.ops.gpu.kernels import SPLIT_SIZE


class DecodeItems(NamedTuple):
    """A step's splits, on the host.

    Attributes:
        items: int32 ``[num_items, 2]``: (sequence, split), the splits of a sequence side by side in order.
        first_item: int32 ``[S]``: a sequence's first item; -1 for a sequence that is not decoded.
        num_splits: int32 ``[S]``: its number of items; 0 for an empty context, whose row becomes zeros.
    """

    items: np.ndarray
    first_item: np.ndarray
    num_splits: np.ndarray


def decode_work(context_lens: np.ndarray, decoded: np.ndarray, window: int = 0) -> DecodeItems:
    """The splits of the sequences that ``decoded`` names.

    Args:
        context_lens: int32 ``[S]``.
        decoded: bool ``[S]``.
        window: positions that a row sees, its own included; 0 for all.
    """
    first_split = (
        np.maximum(context_lens - window, 0) // SPLIT_SIZE if window else np.zeros_like(context_lens)
    )
    num_splits = np.where(decoded, -(-context_lens // SPLIT_SIZE) - first_split, 0)
    first_item = num_splits.cumsum() - num_splits
    items = np.empty((int(num_splits.sum()), 2), np.int32)
    items[:, 0] = np.repeat(np.arange(len(num_splits)), num_splits)
    items[:, 1] = np.arange(len(items)) - np.repeat(first_item - first_split, num_splits)
    return DecodeItems(items, np.where(decoded, first_item, -1).astype(np.int32), num_splits.astype(np.int32))


def max_splits(context_len: int, window: int = 0) -> int:
    """The most splits that a context of at most ``context_len`` positions has."""
    splits = -(-context_len // SPLIT_SIZE)
    return min(splits, -(-(window - 1) // SPLIT_SIZE) + 1) if window else splits
