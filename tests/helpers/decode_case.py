"""Random decode steps over a paged cache in numpy, for the CUDA kernel; their attention in float64.

What the kernel must not read holds NaN: slots beyond a context and before its window, blocks of nobody, rows
between queries. Tables hold -1 for blocks that left the window, and behind the last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from helpers.cuda_emulation import EmulatedLibrary, address
from helpers.int8_cache import elements_and_scales, quantize_heads, unwritten_plane
from helpers.number_formats import FLOAT32, INT8, NumberFormat

from streamllm.ops.gpu.cuda.attention import MATRIX_UNITS_FROM, PagedDecodeArgs
from streamllm.ops.gpu.decode_work import decode_work
from streamllm.ops.gpu.kernels import SPLIT_SIZE


@dataclass
class DecodeCase:
    """A layer and the contexts of a step's sequences.

    Attributes:
        decoded: which of the sequences are; the others have three rows, which belong to another kernel.
        names: seeds of the sequences' keys, values and queries.
        seed: of where blocks lie.
        queries_scale, keys_scale, values_scale: magnitudes.
    """

    contexts: Sequence[int]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: NumberFormat = FLOAT32
    cache_dtype: NumberFormat = FLOAT32
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0
    queries_scale: float = 1.0
    keys_scale: float = 1.0
    values_scale: float = 1.0
    decoded: Sequence[bool] | None = None
    names: Sequence[int] = ()
    seed: int = 0
    num_multiprocessors: int = 3
    matrix_units_from: int = MATRIX_UNITS_FROM
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        if self.decoded is None:
            self.decoded = [True] * len(self.contexts)
        self.names = self.names or range(len(self.contexts))
        self.scale = self.head_dim**-0.5
        self.num_heads = self.kv_heads * self.group
        self.query_start = np.cumsum([0, *(1 if one else 3 for one in self.decoded)]).astype(np.int32)
        self.context_lens = np.asarray(self.contexts, np.int32)
        self.sink_scores = np.random.default_rng(99).normal(size=self.num_heads).astype(np.float32)
        self._draw_queries()
        self._fill_cache()
        self._list_work()

    @property
    def total_rows(self) -> int:
        return int(self.query_start[-1])

    @property
    def decoded_rows(self) -> list[int]:
        return [int(self.query_start[s + 1]) - 1 for s, one in enumerate(self.decoded or ()) if one]

    def keys_and_values(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """``[context, KH, D]``, float64 (and so not rounded) in int8, else as stored; a longer context of the
        same name begins with the same ones."""
        random = np.random.default_rng([1, self.names[sequence]])
        drawn = random.normal(size=(self.contexts[sequence], 2, self.kv_heads, self.head_dim))
        keys = drawn[:, 0] * self.keys_scale / self.key_scale
        values = drawn[:, 1] * self.values_scale / self.value_scale
        if self.cache_dtype is INT8:
            return keys, values
        return self.cache_dtype.encode(keys), self.cache_dtype.encode(values)

    def _draw_queries(self) -> None:
        width = self.num_heads * self.head_dim
        gap = 16  # to the next row
        wide = self.dtype.nan((self.total_rows * (width + gap) - gap,))
        strides = ((width + gap) * wide.itemsize, wide.itemsize)
        self.q = np.lib.stride_tricks.as_strided(wide, (self.total_rows, width), strides)
        for sequence, row in enumerate(self.query_start[1:] - 1):
            drawn = np.random.default_rng([2, self.names[sequence]]).normal(size=width)
            self.q[row] = self.dtype.encode(drawn * self.queries_scale)

    def _fill_cache(self) -> None:
        random = np.random.default_rng([3, self.seed])
        blocks = [-(-context // self.block_size) for context in self.contexts]
        total = sum(blocks) + 2
        free = iter(random.permutation(total).tolist())
        slots = len(self.contexts) + 2
        self.table_rows = random.permutation(slots)[: len(self.contexts)].astype(np.int32)
        self.block_tables = np.full((slots, max(blocks) + 1), -1, np.int32)
        shape = (total, self.kv_heads, self.block_size, self.head_dim)
        if self.cache_dtype is INT8:
            self.keys, self.values = unwritten_plane(*shape), unwritten_plane(*shape)
        else:
            self.keys, self.values = self.cache_dtype.nan(shape), self.cache_dtype.nan(shape)
        for sequence, context in enumerate(self.contexts):
            first = max(context - self.window, 0) if self.window else 0
            keys, values = self.keys_and_values(sequence)
            for number in range(first // self.block_size, blocks[sequence]):
                block = next(free)
                self.block_tables[self.table_rows[sequence], number] = block
                start = max(number * self.block_size, first)
                end = min((number + 1) * self.block_size, context)
                inside = slice(start - number * self.block_size, end - number * self.block_size)
                self._store(self.keys, block, inside, keys[start:end].swapaxes(0, 1))
                self._store(self.values, block, inside, values[start:end].swapaxes(0, 1))

    def _store(self, plane: np.ndarray, block: int, positions: slice, heads: np.ndarray) -> None:
        if self.cache_dtype is INT8:
            elements, scales = elements_and_scales(plane, self.head_dim)
            elements[block, :, positions], scales[block, :, positions] = quantize_heads(heads)
        else:
            plane[block, :, positions] = heads

    def _list_work(self, spare: int = 2) -> None:
        work = decode_work(self.context_lens, np.asarray(self.decoded), self.window)
        self.items = np.concatenate([work.items, np.full((spare, 2), -(10**6), np.int32)])
        self.num_items = np.array([len(work.items)], np.int32)
        self.first_item, self.num_splits = work.first_item, work.num_splits
        self.partials = np.full((len(self.items), self.num_heads, self.head_dim + 2), np.nan, np.float32)

    def arguments(self, out: np.ndarray) -> PagedDecodeArgs:
        """The struct; this object keeps the arrays alive."""
        itemsize = out.itemsize
        arrays = (
            out, self.q, self.keys, self.values, self.query_start, self.context_lens, self.table_rows,
            self.block_tables, self.items, self.num_items, self.first_item, self.num_splits, self.partials,
            self.sink_scores if self.sinks else None,
        )  # fmt: skip
        return PagedDecodeArgs(
            *map(address, arrays),
            out.strides[0] // itemsize,
            self.q.strides[0] // itemsize,
            self.block_tables.shape[1],
            len(self.contexts),
            len(self.items),
            SPLIT_SIZE,
            self.num_heads,
            self.kv_heads,
            self.head_dim,
            self.block_size,
            self.window,
            self.scale,
            self.soft_cap,
            self.key_scale,
            self.value_scale,
            self.dtype.code,
            self.cache_dtype.code,
            self.num_multiprocessors,
            self.matrix_units_from,
        )

    def run(self, library: EmulatedLibrary) -> np.ndarray:
        """The output as the kernel stores it, ``[rows, H * D]``; unwritten elements are NaN."""
        out = self.dtype.nan((self.total_rows, self.num_heads * self.head_dim))
        library.call("paged_decode", self.arguments(out))
        return out

    def expected(self) -> np.ndarray:
        """Float64 ``[rows, H * D]``; NaN for rows that are not decoded."""
        out = np.full((self.total_rows, self.num_heads * self.head_dim), np.nan)
        for sequence, row in enumerate(self.query_start[1:] - 1):
            if self.decoded is not None and self.decoded[sequence]:
                out[row] = self._attend(sequence, self.dtype.decode(self.q[row])).ravel()
        return out

    def _attend(self, sequence: int, q: np.ndarray) -> np.ndarray:
        keys, values = (self._decoded(part) for part in self.keys_and_values(sequence))
        if self.window:
            keys, values = keys[-self.window :], values[-self.window :]
        q = q.reshape(self.kv_heads, self.group, self.head_dim)
        scores = np.einsum("kgd,pkd->kgp", q, keys * self.key_scale) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        sinks = np.full((self.kv_heads, self.group, 1), -np.inf)
        if self.sinks:
            sinks = self.sink_scores.astype(np.float64).reshape(sinks.shape)
        largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sinks)
        largest = np.where(np.isneginf(largest), 0.0, largest)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        return np.einsum("kgp,pkd->kgd", weights / np.where(total == 0, 1, total), values * self.value_scale)

    def _decoded(self, stored: np.ndarray) -> np.ndarray:
        if self.cache_dtype is not INT8:
            return self.cache_dtype.decode(stored)
        integers, scales = quantize_heads(stored)
        return integers * scales[..., None].astype(np.float64)
