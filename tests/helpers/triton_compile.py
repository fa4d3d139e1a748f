"""Compiles Triton's kernels for an architecture without a GPU, as their own callers would launch them.

``python -m helpers.triton_compile sm_90`` prints what each kernel takes, as JSON. It is a program because a
process in which Triton interprets cannot compile. Launches are turned into compilations, so that arguments,
alignments and configurations are those of a server.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from streamllm.ops.gpu.kernels import (
    AdapterStack,
    AttentionShape,
    DecodeWork,
    DeviceSampling,
    PagedCache,
    PagedContext,
)
from streamllm.ops.gpu.triton_kernels import (
    attention_decode,
    attention_prefill,
    copy_blocks,
    elementwise,
    expert_routing,
    experts,
    lora,
    rotary_cache,
    sampling,
)
from streamllm.ops.step_inputs import SamplingBuffers

Resources = dict[str, int]
"""Registers a thread, bytes of spills (stores and loads) a thread, shared memory a program in bytes."""


class _Driver:
    """What a launch asks a GPU's driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Compiler:
    """Turns launches into compilations for ``architecture`` and records their resources."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.label = ""
        self.found: dict[str, Resources] = {}

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        launch = JITFunction.run
        driver.set_active(_Driver(int(self.architecture.removeprefix("sm_"))))

        def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
            self._record(kernel.__name__, compiled, log.getvalue())
            return compiled

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch

    def _record(self, name: str, compiled: Any, log: str) -> None:
        """ptxas speaks only when it runs: its words are kept beside what Triton has cached."""
        kept = Path(triton.knobs.cache.dir) / f"{compiled.hash}.ptxas"
        if log:
            kept.write_text(log)
        words = kept.read_text()
        registers = re.search(r"Used (\d+) registers", words)
        spills = re.findall(r"(\d+) bytes spill", words)
        assert registers and len(spills) == 2, words
        resources = {
            "registers": int(registers[1]),
            "spills": sum(map(int, spills)),
            "shared": compiled.metadata.shared,
        }
        self.found[f"{self.label}: {name}"] = resources

    def compile(self, label: str, launch: Callable[..., object], *arguments: Any) -> None:
        """Compiles what ``launch(*arguments)`` launches."""
        self.label = label
        launch(*arguments)


def _attention_arguments(
    dtype: torch.dtype, head_dim: int, group: int, cache_dtype: torch.dtype | None = None, **layer: Any
) -> tuple[Any, ...]:
    """Output, queries, cache, context and layer of a step; none of it is ever read."""
    kv_heads = 8
    if layer.pop("sinks", False):
        layer["sinks"] = torch.zeros(kv_heads * group)
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, scale=0.125, **layer)
    if cache_dtype == INT8:
        plane = torch.empty(2, kv_heads, 16 * (head_dim + 4), dtype=INT8)
        cache = PagedCache.of_int8(plane, plane, head_dim)
    else:
        plane = torch.empty(2, kv_heads, 16, head_dim, dtype=torch.float32).to(cache_dtype or dtype)
        cache = PagedCache(plane, plane, 0.5, 0.5)
    integers = torch.zeros(16, 64, dtype=torch.int32)
    q = torch.empty(4, kv_heads * group * head_dim, dtype=dtype)
    context = PagedContext(integers[0], integers[1], integers[2], integers)
    return torch.empty_like(q), q, cache, context, shape


def _decode_work(shape: AttentionShape) -> DecodeWork:
    integers = torch.zeros(16, 64, dtype=torch.int32)
    partials = torch.empty(8, shape.num_heads, shape.head_dim + 2)
    return DecodeWork(integers[:, :2].contiguous(), integers[0], integers[1], integers[2], partials)


BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
ATTENTION_LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "bfloat16 head=64 group=8": ((BFLOAT16, 64, 8), {}),
    "bfloat16 head=64 group=8 float8 cache": ((BFLOAT16, 64, 8, FLOAT8), {}),
    "bfloat16 head=64 group=8 int8 cache": ((BFLOAT16, 64, 8, INT8), {}),
    "bfloat16 head=80 group=1": ((BFLOAT16, 80, 1), {}),
    "bfloat16 head=128 group=4": ((BFLOAT16, 128, 4), {}),
    "bfloat16 head=128 group=4 window sinks": ((BFLOAT16, 128, 4), {"window": 4096, "sinks": True}),
    "bfloat16 head=128 group=4 float8 cache": ((BFLOAT16, 128, 4, FLOAT8), {}),
    "bfloat16 head=128 group=4 int8 cache": ((BFLOAT16, 128, 4, INT8), {}),
    "bfloat16 head=256 group=4 int8 cache": ((BFLOAT16, 256, 4, INT8), {}),
    "float32 head=128 group=4 int8 cache": ((FLOAT32, 128, 4, INT8), {}),
    "bfloat16 head=256 group=2 window soft cap": ((BFLOAT16, 256, 2), {"window": 4096, "soft_cap": 50.0}),
    "float16 head=128 group=4": ((FLOAT16, 128, 4), {}),
    "float32 head=64 group=4": ((FLOAT32, 64, 4), {}),
    "float32 head=128 group=4": ((FLOAT32, 128, 4), {}),
    "float32 head=256 group=4": ((FLOAT32, 256, 4), {}),
}


def compile_attention(compiler: Compiler) -> None:
    sequences = torch.zeros(4, dtype=torch.int32)
    for name, (arguments, layer) in ATTENTION_LAYERS.items():
        out, q, cache, context, shape = _attention_arguments(*arguments, **layer)
        compiler.compile(
            name, attention_prefill.paged_prefill, out, q, cache, context, sequences, 4096, shape
        )
        work = _decode_work(shape)
        compiler.compile(name, attention_decode.paged_decode, out, q, cache, context, work, shape)


def compile_elementwise(compiler: Compiler) -> None:
    for dtype in (BFLOAT16, FLOAT32):
        name = str(dtype).removeprefix("torch.")
        x, weight = torch.empty(4, 8192, dtype=dtype), torch.empty(8192)
        compiler.compile(f"{name} 8192", elementwise.rms_norm, x, x, weight, 1e-5)
        compiler.compile(f"{name} 8192 residual", elementwise.rms_norm, x, x, weight, 1e-5, x)
        for activation in ("silu", "gelu", "gelu_tanh", "relu"):
            compiler.compile(f"{name} {activation}", elementwise.act_and_mul, x[:, :4096], x, activation)
        compiler.compile(f"{name} limited", elementwise.act_and_mul, x[:, :4096], x, "silu", 7.0)


def compile_rotary(compiler: Compiler) -> None:
    for cache_dtype, norms in ((BFLOAT16, True), (FLOAT16, False), (FLOAT8, False), (INT8, True)):
        _, _, cache, _, shape = _attention_arguments(BFLOAT16, 128, 4, cache_dtype)
        qkv = torch.empty(4, (shape.num_heads + 16) * 128, dtype=BFLOAT16)
        slots, rows = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
        table, weight = torch.empty(8, 64), torch.empty(128)
        name = f"bfloat16 cache={str(cache_dtype).removeprefix('torch.')}" + norms * " norms"
        compiler.compile(
            name, rotary_cache.rotary_and_cache, qkv, cache, slots, rows, table, table, shape, 128,
            (weight, weight, 1e-6) if norms else None,
        )  # fmt: skip


def compile_experts(compiler: Compiler) -> None:
    """All but the products."""
    route = functools.partial(expert_routing.route, normalize=True, block_rows=16)
    compiler.compile("8 of 128", route, torch.empty(4, 128, dtype=BFLOAT16), 128, 8)
    out, results = torch.empty(4, 4096, dtype=BFLOAT16), torch.empty(4 * 8, 4096, dtype=BFLOAT16)
    compiler.compile("8 of 128", experts.add_results, out, results, torch.empty(4, 8))


def compile_lora(compiler: Compiler) -> None:
    """Of a matrix of three parts."""
    slots = torch.zeros(4, dtype=torch.int32)
    for dtype, rank in ((BFLOAT16, 16), (BFLOAT16, 64), (FLOAT16, 128), (FLOAT32, 16)):
        stack = AdapterStack(
            torch.empty(4, 3 * rank, 4096, dtype=dtype),
            torch.empty(4, 6144, rank, dtype=dtype),
            slots,
            (0, 4096, 5120),
        )
        out, x = torch.empty(4, 6144, dtype=dtype), torch.empty(4, 4096, dtype=dtype)
        name = f"{str(dtype).removeprefix('torch.')} 4096 rank={rank}"
        compiler.compile(name, lora.lora_add, out, x, slots, stack)


def compile_copies(compiler: Compiler) -> None:
    pairs = torch.zeros(4, 2, dtype=torch.int32)
    for size in (4096, 4097):
        planes = torch.empty(2, 4, size, dtype=torch.uint8)
        compiler.compile(f"{size} bytes", copy_blocks.copy_blocks, planes, planes, pairs)


def compile_sampling(compiler: Compiler) -> None:
    buffers = SamplingBuffers.allocate(8)
    tensors = {
        field.name: torch.from_numpy(getattr(buffers, field.name).view(np.int64))
        if field.name == "seed"
        else torch.from_numpy(getattr(buffers, field.name))
        for field in fields(DeviceSampling)
    }
    logits = torch.empty(8, 4096)
    compiler.compile("float32", sampling.sample, logits, 4096, DeviceSampling(**tensors), 8)


def main(architecture: str) -> None:
    """Prints ``{"label: kernel": resources}`` of every kernel but the matrix products'."""
    compiler = Compiler(architecture)
    for module in (attention_prefill, attention_decode, rotary_cache):
        module.gpu_architecture = lambda device: architecture  # type: ignore[attr-defined]
    with compiler.compiling():
        compile_attention(compiler)
        compile_elementwise(compiler)
        compile_rotary(compiler)
        compile_experts(compiler)
        compile_lora(compiler)
        compile_copies(compiler)
        compile_sampling(compiler)
    json.dump(compiler.found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
