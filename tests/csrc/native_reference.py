"""What the native kernels must compute, in float64 numpy, and small helpers to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from helpers.int8_cache import quantize_heads

from streamllm import _native

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def stride(array: np.ndarray) -> int:
    """Row stride in elements."""
    return array.strides[0] // array.itemsize


def padded_rows(rows: int, columns: int, pad: int = 3) -> np.ndarray:
    """float32[rows, columns] whose rows lie `columns + pad` apart, all NaN."""
    return np.full((rows + 1, columns + pad), np.nan, np.float32)[:rows, :columns]


def pack(weight: np.ndarray) -> _native.PackedMatrix:
    return pack_parts(weight.shape[1], [("float32", np.ascontiguousarray(weight, np.float32))])


def pack_parts(k: int, parts: list[tuple[str, np.ndarray]]) -> _native.PackedMatrix:
    """Rows of k elements as arrays [rows, *], each in a format of its own."""
    matrix = _native.PackedMatrix(k)
    for name, rows in parts:
        matrix.append_rows(name, rows.ctypes.data, rows.shape[0], rows.strides[0])
    return matrix


def run(
    record: Callable[[_native.Plan], None],
    *,
    tokens: int = 0,
    sequences: int = 0,
    outputs: int = 0,
    threads: int = 2,
) -> None:
    plan = _native.Plan(_native.ThreadPool(threads))
    record(plan)
    plan.run(tokens, sequences, outputs)


def linear(
    x: np.ndarray, matrix: _native.PackedMatrix, bias: np.ndarray | None = None, *, threads: int = 2
) -> np.ndarray:
    out = padded_rows(x.shape[0], matrix.n)
    run(
        lambda plan: plan.linear(
            address(x), stride(x), matrix, address(bias), address(out), stride(out), on_outputs=False
        ),
        tokens=x.shape[0],
        threads=threads,
    )
    return out


@dataclass
class PagedCache:
    """One layer's key and value cache with a random block order; unused slots hold NaN or infinity.

    Attributes:
        keys: [num_blocks, num_kv_heads, block_size / 16, head_dim, 16], a view of key_memory.
        values: [num_blocks, num_kv_heads, block_size / 16, 16, head_dim], a view of value_memory.
        key_scales, value_scales: in int8, float32[num_blocks, num_kv_heads, block_size / 16, 16].
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    kv_dtype: Literal["float32", "float16", "int8"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        quantized = self.kv_dtype == "int8"
        elements = 16 * self.head_dim
        tiles = (self.num_blocks, self.num_kv_heads, self.block_size // 16)
        shape = (*tiles, elements + (64 if quantized else 0))
        key_unused, value_unused = (99, -99) if quantized else (np.nan, np.inf)
        self.key_memory = np.full(shape, key_unused, self.kv_dtype)
        self.value_memory = np.full(shape, value_unused, self.kv_dtype)
        self.keys = self.key_memory[..., :elements].reshape(*tiles, self.head_dim, 16)
        self.values = self.value_memory[..., :elements].reshape(*tiles, 16, self.head_dim)
        if quantized:
            self.key_scales = self.key_memory.view(np.float32)[..., -16:]
            self.value_scales = self.value_memory.view(np.float32)[..., -16:]
            self.key_scales[:], self.value_scales[:] = np.nan, np.inf
        self.free = list(np.random.default_rng(self.seed).permutation(self.num_blocks))

    def allocate(self, num_tokens: int) -> np.ndarray:
        count = -(-num_tokens // self.block_size)
        return np.array([self.free.pop() for _ in range(count)], np.int32)

    def slots(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return (
            table[positions // self.block_size].astype(np.int64) * self.block_size
            + positions % self.block_size
        )

    def write(self, table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """keys, values: [tokens, num_kv_heads, head_dim] of positions 0, 1, ..."""
        self.put(self.slots(table, np.arange(len(keys))), keys, values)

    def put(self, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """The same of any slots."""
        block, tile, lane = self._places(slots)
        if self.kv_dtype == "int8":
            keys, self.key_scales[block, :, tile, lane] = quantize_heads(keys)
            values, self.value_scales[block, :, tile, lane] = quantize_heads(values)
        self.keys[block, :, tile, :, lane] = keys
        self.values[block, :, tile, lane] = values

    def read(self, table: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 keys and values [tokens, num_kv_heads, head_dim]."""
        return self.at(self.slots(table, np.arange(num_tokens)))

    def at(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of any slots."""
        block, tile, lane = self._places(slots)
        keys = self.keys[block, :, tile, :, lane].astype(np.float64)
        values = self.values[block, :, tile, lane].astype(np.float64)
        if self.kv_dtype == "int8":
            keys *= self.key_scales[block, :, tile, lane][..., None]
            values *= self.value_scales[block, :, tile, lane][..., None]
        return keys, values

    def _places(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, tile in it, position in the tile."""
        return slots // self.block_size, slots % self.block_size // 16, slots % 16


@dataclass
class AttentionSequence:
    query: np.ndarray  # float32[rows, num_heads, head_dim]
    context: int  # tokens in the cache, the rows included
    table: np.ndarray  # int32 block ids


def paged_attention(
    cache: PagedCache,
    sequences: list[AttentionSequence],
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
    threads: int = 2,
) -> list[np.ndarray]:
    """Runs the kernel on a batch; one [rows, num_heads, head_dim] result per sequence."""
    num_heads = sequences[0].query.shape[1]
    lengths = [s.query.shape[0] for s in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    width = num_heads * cache.head_dim
    q = padded_rows(int(starts[-1]), width, pad=5)
    q[:] = np.concatenate([s.query.reshape(-1, width) for s in sequences])
    out = padded_rows(int(starts[-1]), width, pad=7)
    contexts = np.array([s.context for s in sequences], np.int32)
    tables = np.array([s.table.ctypes.data for s in sequences], np.int64)
    run(
        lambda plan: plan.paged_attention(
            address(q),
            stride(q),
            address(out),
            stride(out),
            num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            scale,
            window,
            soft_cap,
            address(sinks),
            address(starts),
            address(contexts),
            address(tables),
            address(cache.keys),
            address(cache.values),
            cache.kv_dtype,
            cache.block_size,
        ),
        tokens=int(starts[-1]),
        sequences=len(sequences),
        threads=threads,
    )
    return [out[a:b].reshape(-1, num_heads, cache.head_dim) for a, b in pairwise(starts)]


def attention_reference(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64 attention of the last rows of a context, causal and windowed."""
    rows, num_heads, head_dim = query.shape
    context, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    out = np.empty((rows, num_heads, head_dim))
    for row in range(rows):
        position = context - rows + row
        begin = max(0, position - window + 1) if window else 0
        for head in range(num_heads):
            seen = slice(begin, position + 1)
            scores = keys[seen, head // group] @ query[row, head].astype(np.float64) * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[head])
            maximum = max(scores.max(), sink)
            weights = np.exp(scores - maximum)
            total = weights.sum() + np.exp(sink - maximum)
            out[row, head] = weights @ values[seen, head // group] / total
    return out


def philox_uniform(seed: int, choice: int, position: int) -> float:
    """One number of Philox4x32-10 in [0, 1), as the sampler draws it."""
    counter = [position, choice, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = PHILOX_MULTIPLIERS[0] * counter[0], PHILOX_MULTIPLIERS[1] * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, PHILOX_WEYL, strict=True)]
    return (counter[0] >> 8) * 2.0**-24
