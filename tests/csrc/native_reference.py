"""What the native kernels must compute, in float64 numpy, and small helpers to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

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
    """One layer's key and value cache with a random block order; unused slots hold NaN or infinity."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    kv_dtype: Literal["float32", "float16"] = "float32"
    seed: int = 0
    keys: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        dtype = np.dtype(self.kv_dtype)
        tiles = self.block_size // 16
        self.keys = np.full((self.num_blocks, self.num_kv_heads, tiles, self.head_dim, 16), np.nan, dtype)
        self.values = np.full(
            (self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim), np.inf, dtype
        )
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
        for position in range(keys.shape[0]):
            block, offset = table[position // self.block_size], position % self.block_size
            self.keys[block, :, offset // 16, :, offset % 16] = keys[position]
            self.values[block, :, offset, :] = values[position]

    def read(self, table: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 keys and values [tokens, num_kv_heads, head_dim]."""
        positions = np.arange(num_tokens)
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        keys = self.keys[blocks, :, offsets // 16, :, offsets % 16]
        return keys.astype(np.float64), self.values[blocks, :, offsets, :].astype(np.float64)


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
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[seen, head // group] / weights.sum()
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
