"""What GPU kernels move between their chip and its memory, derived from their loop bounds.

A kernel that is bound by memory is as good as its traffic is close to what it cannot do without. Caches are
left out: what is read twice counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamllm.ops.gpu.cuda.attention import MATRIX_UNITS_FROM
from streamllm.ops.gpu.decode_work import decode_work

LANES_HEADS, MATRIX_HEADS = 8, 16
"""Query heads that a thread block of the decode kernel takes at most, without matrix units and with them; a
larger group is read in pieces."""

PART_INTEGERS, SEQUENCE_INTEGERS = 7, 3
"""int32 that a thread block reads to know its work, and that the combine pass reads for a sequence's head."""


@dataclass(frozen=True)
class DecodeLayer:
    """One layer's attention in a decode step; sizes of an element in bytes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation_bytes: int = 2
    cache_bytes: int = 2
    block_size: int = 16
    window: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class DecodeTraffic:
    """Bytes.

    Attributes:
        needed: keys, values, queries, block tables and outputs, each once.
        keys_and_values, queries, partials, outputs, integers: what is moved; partial results are written and
            read, integers are tables and the list of the work.
    """

    needed: int
    keys_and_values: int
    queries: int
    partials: int
    outputs: int
    integers: int

    @property
    def moved(self) -> int:
        return self.keys_and_values + self.queries + self.partials + self.outputs + self.integers

    @property
    def ratio(self) -> float:
        return self.moved / self.needed


def decode_traffic(layer: DecodeLayer, context_lens: Sequence[int]) -> DecodeTraffic:
    """Of ``csrc/cuda/attention_decode.cu``, for one row of each sequence."""
    lengths = np.asarray(context_lens, np.int64)
    splits = decode_work(lengths.astype(np.int32), np.ones(len(lengths), np.bool_), layer.window).num_splits
    first_seen = np.maximum(lengths - layer.window, 0) if layer.window else np.zeros_like(lengths)
    position_bytes = 2 * layer.num_kv_heads * layer.head_dim * layer.cache_bytes
    seen_bytes = int((lengths - first_seen).sum()) * position_bytes
    row_bytes = layer.num_heads * layer.head_dim * layer.activation_bytes
    table_entries = int((-(-lengths // layer.block_size) - first_seen // layer.block_size).sum())

    pieces = -(-layer.group // (MATRIX_HEADS if _is_for_matrix_units(layer) else LANES_HEADS))
    tiles = int((-(-lengths // _tile(layer)) - first_seen // _tile(layer)).sum())
    parts = int(splits.sum()) * layer.num_kv_heads * pieces
    partial_items = int(splits[splits > 1].sum())
    return DecodeTraffic(
        needed=seen_bytes + 2 * len(lengths) * row_bytes + 4 * table_entries,
        keys_and_values=seen_bytes * pieces,
        queries=int(splits.sum()) * row_bytes,
        partials=2 * 4 * partial_items * layer.num_heads * (layer.head_dim + 2),
        outputs=len(lengths) * row_bytes,
        integers=4
        * (
            tiles * layer.num_kv_heads * pieces
            + parts * PART_INTEGERS
            + len(lengths) * layer.num_heads * SEQUENCE_INTEGERS
        ),
    )


def _is_for_matrix_units(layer: DecodeLayer) -> bool:
    sizes = (layer.activation_bytes, layer.cache_bytes)
    return sizes == (2, 2) and layer.group >= MATRIX_UNITS_FROM and layer.head_dim in (64, 128)


def _tile(layer: DecodeLayer) -> int:
    """Positions for each of which a warp looks up its block: ``DecodeShape::kPositions``."""
    widest = next(size for size in (64, 128, 256) if layer.head_dim <= size)
    return min(max(4096 // (widest * layer.cache_bytes), 4), 16)
