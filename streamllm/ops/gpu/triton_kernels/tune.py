"""Measures the tiles of the attention kernels on this GPU: the work of ``streamllm tune-gpu``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from streamllm.ops.gpu.kernels import SPLIT_SIZE, AttentionShape, DecodeWork, PagedCache, PagedContext
from streamllm.ops.gpu.triton_kernels.attention_decode import paged_decode
from streamllm.ops.gpu.triton_kernels.attention_prefill import paged_prefill
from streamllm.ops.gpu.triton_kernels.tuning import (
    TileConfig,
    attention_config,
    attention_problem,
    gpu_architecture,
)

AttentionKernel = Literal["prefill", "decode"]
Timer = Callable[[Callable[[], object]], float]
"""Milliseconds that a call takes on the GPU."""

QUERY_ROWS = (16, 32, 64, 128)
KEYS = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (2, 3)
LARGEST_FLOAT32_TILE = 32 * 32
"""Scores; float32 has no matrix unit, and the compiler takes minutes over larger ones."""


@dataclass(frozen=True)
class Workload:
    """Steps that stand for a server's: one that decodes, one that reads a whole prompt and parts of others.

    Attributes:
        decodes: sequences that decode.
        context: tokens of each, and before the parts of prompts.
        prompt, chunk: rows of the whole prompt and of each part.
        chunks: parts.
        block_size: of the cache.
    """

    decodes: int = 32
    context: int = 4096
    prompt: int = 2048
    chunk: int = 512
    chunks: int = 4
    block_size: int = 16


@dataclass(frozen=True)
class Measured:
    """One configuration's time in milliseconds; ``None`` where it does not run on this GPU."""

    config: TileConfig
    milliseconds: float | None


def candidates(kernel: AttentionKernel, dtype: torch.dtype, known: TileConfig) -> Iterator[TileConfig]:
    """What is measured: the configuration in use first, so that it wins a tie."""
    yield known
    rows = QUERY_ROWS if kernel == "prefill" else (known.block_m,)
    for block_m, block_n, num_warps, num_stages in itertools.product(rows, KEYS, WARPS, STAGES):
        config = TileConfig(block_m, block_n, num_warps, num_stages)
        too_large = dtype == torch.float32 and block_m * block_n > LARGEST_FLOAT32_TILE
        if config != known and not too_large:
            yield config


def median_time(call: Callable[[], object]) -> float:
    """The median of many calls, in milliseconds, with the caches emptied in between."""
    return float(triton.testing.do_bench(call, return_mode="median"))


def measure(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
    timer: Timer = median_time,
) -> Iterator[Measured]:
    """Each candidate in turn."""
    case = _Case(kernel, shape, dtype, cache_dtype, device, workload)
    known = attention_config(kernel, gpu_architecture(device), case.q, case.cache.keys, shape)
    for config in candidates(kernel, dtype, known):
        yield Measured(config, time_of(functools.partial(case.run, config), timer))


def time_of(call: Callable[[], object], timer: Timer) -> float | None:
    """The time, or ``None`` for tiles that the GPU or the compiler refuses."""
    try:
        call()
        return timer(call)
    except triton.runtime.errors.TritonError:
        return None
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        return None


def fastest(measured: list[Measured]) -> TileConfig | None:
    """The first of the fastest; ``None`` if nothing runs."""
    timed = [(found.milliseconds, found.config) for found in measured if found.milliseconds is not None]
    return min(timed, key=lambda one: one[0])[1] if timed else None


def problem_name(shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """The problem that a measurement stands for in a table."""
    return attention_problem(torch.empty(0, dtype=dtype), torch.empty(0, dtype=cache_dtype), shape)


class _Case:
    """A step with random keys, values and queries."""

    def __init__(
        self,
        kernel: AttentionKernel,
        shape: AttentionShape,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        workload: Workload,
    ) -> None:
        self._kernel, self._shape, self._device = kernel, shape, device
        if kernel == "decode":
            sequences = [(workload.context, 1)] * workload.decodes
        else:
            parts = [(workload.context + workload.chunk, workload.chunk)] * workload.chunks
            sequences = [(workload.prompt, workload.prompt), *parts]
        blocks = [math.ceil(context / workload.block_size) for context, _ in sequences]
        plane = (sum(blocks), shape.num_kv_heads, workload.block_size, shape.head_dim)
        keys, values = (torch.randn(plane, device=device, dtype=dtype).to(cache_dtype) for _ in range(2))
        self.cache = PagedCache(keys, values)
        tables = torch.full((len(sequences), max(blocks)), -1, dtype=torch.int32)
        order = iter(torch.randperm(sum(blocks)).to(torch.int32).split(blocks))
        for table, count in zip(tables, blocks, strict=True):
            table[:count] = next(order)
        starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0)
        self._context = PagedContext(
            query_start=self._int32(starts),
            context_lens=self._int32([context for context, _ in sequences]),
            table_rows=self._int32(range(len(sequences))),
            block_tables=tables.to(device),
        )
        self._sequences = self._context.table_rows
        self._max_query_len = max(rows for _, rows in sequences)
        self.q = torch.randn(int(starts[-1]), shape.num_heads * shape.head_dim, device=device, dtype=dtype)
        self._out = torch.empty_like(self.q)
        self._work = self._decode_work([context for context, _ in sequences])

    def _int32(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(list(values), dtype=torch.int32).to(self._device)

    def _decode_work(self, contexts: list[int]) -> DecodeWork:
        splits = [math.ceil(context / SPLIT_SIZE) for context in contexts]
        items = [(sequence, split) for sequence, count in enumerate(splits) for split in range(count)]
        first = torch.tensor([0, *splits[:-1]]).cumsum(0)
        partials = (len(items), self._shape.num_heads, self._shape.head_dim + 2)
        return DecodeWork(
            items=self._int32(items),
            num_items=self._int32([len(items)]),
            first_item=self._int32(first),
            num_splits=self._int32(splits),
            partials=torch.empty(partials, device=self._device),
        )

    def run(self, config: TileConfig) -> None:
        if self._kernel == "decode":
            paged_decode(self._out, self.q, self.cache, self._context, self._work, self._shape, config)
        else:
            paged_prefill(
                self._out, self.q, self.cache, self._context, self._sequences, self._max_query_len,
                self._shape, config,
            )  # fmt: skip
