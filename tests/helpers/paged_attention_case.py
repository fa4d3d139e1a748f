"""Random steps over a paged cache on torch tensors, and their attention in float64.

Every slot that a sequence does not own holds NaN, the rows of the batch lie in wider rows of NaN, and blocks
beyond a context or before its window stand as -1 in the tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from helpers.int8_cache import elements_and_scales, quantize_heads, unwritten_plane
from helpers.triton_device import DEVICE
from torch import Tensor

from streamllm.ops.gpu.kernels import SPLIT_SIZE, AttentionShape, DecodeWork, PagedCache, PagedContext


@dataclass
class PagedCase:
    """Sequences of (context, rows in this step) and the layer that attends.

    Attributes:
        inputs: the seed of keys, values and queries, which depend on a sequence's name and a position only.
        placement: the seed of where blocks lie.
        names: of the sequences; those of one name have the same keys, values and queries.
        magnitude: of the queries and keys.
    """

    sequences: Sequence[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0
    magnitude: float = 1.0
    inputs: int = 0
    placement: int = 0
    names: Sequence[int] = ()
    device: str = DEVICE
    shape: AttentionShape = field(init=False)
    cache: PagedCache = field(init=False)
    context: PagedContext = field(init=False)
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.names = self.names or range(len(self.sequences))
        self.cache_dtype = self.cache_dtype or self.dtype
        self.shape = AttentionShape(
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=1 / math.sqrt(self.head_dim),
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self._random(10**6, self.kv_heads * self.group).to(self.device) if self.sinks else None,
        )
        self._fill_cache()
        self._fill_queries()

    def _random(self, stream: int, *shape: int) -> Tensor:
        values = np.random.default_rng([self.inputs, stream]).standard_normal(shape)
        return torch.from_numpy(values.astype(np.float32))

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence in the cache's dtype, of int8 as they are written: ``[context, KH,
        D]``."""
        length = max(self.sequences[index][0], 1)
        # Drawn a position at a time: a longer context of the same name begins with the same keys.
        kv = self._random(2 * self.names[index], length, 2, self.kv_heads, self.head_dim)
        kv = kv[: self.sequences[index][0]]
        scales = torch.tensor([self.key_scale / self.magnitude, self.value_scale])[:, None, None]
        kv = kv / scales if self.cache_dtype == torch.int8 else (kv / scales).to(self.cache_dtype)
        return kv[:, 0], kv[:, 1]

    def _fill_cache(self) -> None:
        blocks = [-(-context // self.block_size) for context, _ in self.sequences]
        total = sum(blocks) + 3
        shuffled = np.random.default_rng(self.placement)
        free = iter(shuffled.permutation(total).tolist())
        slots = len(self.sequences) + 2
        rows = shuffled.permutation(slots)[: len(self.sequences)]
        tables = torch.full((slots, max([*blocks, 1]) + 1), -1, dtype=torch.int32)
        # A block of NaN lies before block 0, where -1 would be read.
        size = (total + 1, self.kv_heads, self.block_size, self.head_dim)
        if self.cache_dtype == torch.int8:
            planes = torch.from_numpy(np.stack([unwritten_plane(*size)] * 2))
        else:
            planes = torch.full((2, *size), math.nan).to(self.cache_dtype)
        for index, (context, queries) in enumerate(self.sequences):
            first = max(context - queries - self.window + 1, 0) if self.window else 0
            keys, values = self.stored(index)
            for number in range(first // self.block_size, blocks[index]):
                block = next(free)
                tables[rows[index], number] = block
                start = max(number * self.block_size, first)
                end = min((number + 1) * self.block_size, context)
                inside = slice(start - number * self.block_size, end - number * self.block_size)
                for plane, heads in zip(planes, (keys, values), strict=True):
                    self._store(plane[block + 1], inside, heads[start:end].transpose(0, 1))
        keys, values = planes.to(self.device)[:, 1:]
        if self.cache_dtype == torch.int8:
            self.cache = PagedCache.of_int8(keys, values, self.head_dim)
        else:
            self.cache = PagedCache(keys, values, self.key_scale, self.value_scale)
        self.context = PagedContext(
            query_start=self._int32(np.cumsum([0, *(rows for _, rows in self.sequences)])),
            context_lens=self._int32([context for context, _ in self.sequences]),
            table_rows=self._int32(rows),
            block_tables=tables.to(self.device),
        )

    def _store(self, block: Tensor, positions: slice, heads: Tensor) -> None:
        if self.cache_dtype == torch.int8:
            elements, scales = elements_and_scales(block.numpy(), self.head_dim)
            elements[:, positions], scales[:, positions] = quantize_heads(heads.numpy())
        else:
            block[:, positions] = heads

    def _fill_queries(self) -> None:
        width = self.shape.num_heads * self.head_dim
        total = sum(rows for _, rows in self.sequences)
        wide = torch.full((total, width + 16), math.nan, dtype=self.dtype)
        start = 0
        for index, (context, rows) in enumerate(self.sequences):
            drawn = self._random(2 * self.names[index] + 1, max(context, rows), width) * self.magnitude
            wide[start : start + rows, :width] = drawn[max(context - rows, 0) :][:rows].to(self.dtype)
            start += rows
        self.q = wide.to(self.device)[:, :width]

    def _int32(self, values: object) -> Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=self.device)

    def new_output(self) -> Tensor:
        return torch.full_like(self.q, math.nan)

    def all_sequences(self) -> Tensor:
        return self._int32(range(len(self.sequences)))

    @property
    def max_query_len(self) -> int:
        return max(rows for _, rows in self.sequences)

    def rows_of(self, index: int) -> slice:
        start, end = self.context.query_start[index : index + 2].tolist()
        return slice(start, end)

    def decode_work(self, decoded: Sequence[int] | None = None, spare: int = 3) -> DecodeWork:
        """The work of the sequences ``decoded`` (all); what does not count is wrong or NaN."""
        items: list[tuple[int, int]] = []
        first_item, num_splits = [-1] * len(self.sequences), [0] * len(self.sequences)
        for index in range(len(self.sequences)) if decoded is None else decoded:
            context = self.sequences[index][0]
            lowest = max(context - self.window, 0) if self.window else 0
            splits = range(lowest // SPLIT_SIZE, -(-context // SPLIT_SIZE))
            first_item[index], num_splits[index] = len(items), len(splits)
            items += [(index, split) for split in splits]
        most = len(items) + spare
        width = self.head_dim + 2
        return DecodeWork(
            items=self._int32([*items, *[(-(10**6), -(10**6))] * spare]).view(most, 2),
            num_items=self._int32([len(items)]),
            first_item=self._int32(first_item),
            num_splits=self._int32(num_splits),
            partials=torch.full((most, self.shape.num_heads, width), math.nan, device=self.device),
        )

    def expected(self, index: int) -> np.ndarray:
        """Attention of the sequence's rows, float64 ``[rows, H * D]``."""
        context, rows = self.sequences[index]
        keys, values = map(self._dequantized, self.stored(index), (self.key_scale, self.value_scale))
        q = self.q[self.rows_of(index)].cpu().double().numpy()
        q = q.reshape(rows, self.kv_heads, self.group, self.head_dim)
        scores = np.einsum("rkgd,pkd->rkgp", q, keys) * self.shape.scale
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        position, row = np.arange(context), np.arange(context - rows, context)[:, None]
        seen = (position <= row) & ((position > row - self.window) if self.window else True)
        scores = np.where(seen[:, None, None], scores, -np.inf)
        sinks = np.full((self.kv_heads, self.group, 1), -np.inf)
        if self.shape.sinks is not None:
            sinks = self.shape.sinks.cpu().double().numpy().reshape(self.kv_heads, self.group, 1)
        largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sinks)
        largest = np.where(np.isneginf(largest), 0.0, largest)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        weights = weights / np.where(total == 0, 1, total)
        return np.einsum("rkgp,pkd->rkgd", weights, values).reshape(
            rows, self.shape.num_heads * self.head_dim
        )

    def _dequantized(self, stored: Tensor, scale: float) -> np.ndarray:
        if self.cache_dtype != torch.int8:
            return stored.double().numpy() * scale
        integers, scales = quantize_heads(stored.numpy())
        return integers * scales[..., None].astype(np.float64)
