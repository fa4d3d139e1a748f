"""The kernels that loadtest/gpu.py measures, in the shapes of one layer of a model.

A case is a few launches of the same work over different memory, enough to outgrow the GPU's cache: a model's
step finds none of its weights and keys there either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu_device import Device, Launch
from gpu_model import ModelShape
from kernel_cases import stored_weight
from torch import Tensor

from streamllm.ops import Experts
from streamllm.ops.gpu.decode_work import decode_work
from streamllm.ops.gpu.expert_weights import ExpertWeights
from streamllm.ops.gpu.kernels import (
    AttentionShape,
    DecodeWork,
    DeviceSampling,
    GpuKernels,
    PagedCache,
    PagedContext,
)
from streamllm.ops.gpu.quantized_matrix import (
    QuantizedMatrix,
    WeightRows,
    quantize_float8,
    quantize_int8,
)
from streamllm.ops.step_inputs import SamplingBuffers

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
ITEM = 2
"""Bytes of an activation, and of a key's or value's element."""
NUM_EXPERTS, TOP_K = 8, 2
FORMATS = ("bfloat16", "q4_0", "q8_0", "int8", "float8_e4m3")
SAMPLING: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9})


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rows: of operations that treat rows alike, and of matrix products.
        output_rows: of sampling.
        decodes: (sequences, context of each).
        prefills: (rows of each of the sequences, context with them, sequences).
        copied_blocks: at once.
    """

    rows: tuple[int, ...]
    output_rows: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int, int], ...]
    copied_blocks: int


FULL = Sizes(
    rows=(1, 32, 256, 2048),
    output_rows=(1, 32, 256),
    decodes=((1, 1024), (1, 16384), (8, 4096), (32, 1024), (32, 4096), (128, 1024)),
    prefills=((2048, 2048, 1), (2048, 16384, 1), (256, 1024, 8)),
    copied_blocks=64,
)
SMALL = Sizes(
    rows=(1, 3),
    output_rows=(2,),
    decodes=((1, 20), (3, 300)),
    prefills=((40, 40, 1), (5, 30, 2)),
    copied_blocks=2,
)


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
        kernel, shape: what the table calls them.
        rows: of the batch.
        bytes, operations: that it cannot do without; a multiply-add is two operations.
    """

    kernel: str
    shape: str
    rows: int
    bytes: float
    operations: float = 0.0


@dataclass(frozen=True)
class Case:
    """Launches of the same work, each on memory of its own."""

    work: Work
    launches: tuple[Launch, ...]


class CaseMaker:
    """Makes the cases of one implementation; what a case holds is freed with it."""

    def __init__(self, device: Device, kernels: GpuKernels, shape: ModelShape, sizes: Sizes) -> None:
        self._device, self._kernels, self._model, self._sizes = device, kernels, shape, sizes
        self._attention = AttentionShape(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, scale=shape.head_dim**-0.5
        )
        self._generator = torch.Generator(device.device).manual_seed(0)

    def cases(self) -> Iterator[Callable[[], Case]]:
        """Every case of :class:`GpuKernels`, each made when its turn comes."""
        sizes = self._sizes
        for rows in sizes.rows:
            yield from (
                partial(make, rows)
                for make in (self.rms_norm, self.act_and_mul, self.rotary_and_cache, self.experts)
            )
        yield from (partial(self.decode, *decode) for decode in sizes.decodes)
        yield from (partial(self.prefill, *prefill) for prefill in sizes.prefills)
        yield self.copy_blocks
        for rows in sizes.output_rows:
            yield from (partial(self.sample, rows, settings) for settings in SAMPLING)

    def products(self) -> Iterator[Callable[[], Case]]:
        """Products with a weight of the gated layer, dense and quantised."""
        for stored_as in FORMATS:
            yield from (partial(self.product, stored_as, rows) for rows in self._sizes.rows)

    # -- operations ----------------------------------------------------------------------------------------

    def rms_norm(self, rows: int) -> Case:
        """With the sum of a residual before it."""
        size = self._model.hidden_size
        num_bytes = 4 * rows * size * ITEM
        weight = torch.ones(size, device=self._device.device)

        def launch() -> Launch:
            x, residual, out = self._random(rows, size), self._random(rows, size), self._empty(rows, size)
            return lambda: self._kernels.rms_norm(out, x, weight, 1e-5, residual)

        return self._case(Work("rms_norm", f"[{size}]", rows, num_bytes), launch)

    def act_and_mul(self, rows: int) -> Case:
        width = self._model.intermediate_size

        def launch() -> Launch:
            x, out = self._random(rows, 2 * width), self._empty(rows, width)
            return lambda: self._kernels.act_and_mul(out, x, "silu")

        return self._case(Work("act_and_mul", f"[{width}]", rows, 3 * rows * width * ITEM), launch)

    def rotary_and_cache(self, rows: int) -> Case:
        model = self._model
        half, positions = model.head_dim // 2, 4096
        angles = torch.rand(positions, half, device=self._device.device)
        cos, sin = angles.cos(), angles.sin()
        q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        num_bytes = rows * (2 * q_width + 4 * kv_width) * ITEM

        def launch() -> Launch:
            qkv, cache = self._random(rows, model.qkv_width), self._cache(-(-rows // BLOCK_SIZE))
            slots = torch.randperm(len(cache.keys) * BLOCK_SIZE, device=self._device.device)[:rows]
            rope_rows = torch.arange(rows, dtype=torch.int32, device=self._device.device) % positions
            return lambda: self._kernels.rotary_and_cache(
                qkv, cache, slots, rope_rows, cos, sin, self._attention, model.head_dim
            )

        return self._case(Work("rotary_and_cache", f"{q_width} + {2 * kv_width}", rows, num_bytes), launch)

    def experts(self, rows: int) -> Case:
        """A quarter as wide as the gated layer; read are those that chance lets some row use."""
        hidden, inner = self._model.hidden_size, self._model.intermediate_size // 4
        used = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** rows)
        num_bytes = (3 * used * inner * hidden + 2 * rows * hidden) * ITEM
        operations = 6.0 * rows * TOP_K * inner * hidden
        gate_up, down = (
            ExpertWeights(WeightRows("dense", NUM_EXPERTS * n, k, 0.02 * self._random(NUM_EXPERTS * n, k)), n)
            for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        experts = Experts(gate_up, down, NUM_EXPERTS, TOP_K, normalize=True)

        def launch() -> Launch:
            x, out, logits = (
                self._random(rows, hidden),
                self._empty(rows, hidden),
                self._random(rows, NUM_EXPERTS),
            )
            return lambda: self._kernels.experts(out, x, logits, experts)

        shape = f"{TOP_K} of {NUM_EXPERTS} x [{inner}, {hidden}]"
        return self._case(Work("experts", shape, rows, num_bytes, operations), launch)

    def decode(self, batch: int, context_len: int) -> Case:
        """One new token in each of ``batch`` sequences."""
        work = self._attention_work("paged_decode", batch, 1, context_len)

        def launch() -> Launch:
            cache, context = self._sequences(batch, 1, context_len)
            out, q = self._empty(batch, self._q_width), self._random(batch, self._model.qkv_width)
            splits = self._decode_work(batch, context_len)
            return lambda: self._kernels.paged_decode(
                out, q[:, : self._q_width], cache, context, splits, self._attention
            )

        return self._case(work, launch)

    def prefill(self, rows: int, context_len: int, batch: int) -> Case:
        """The last ``rows`` tokens of each of ``batch`` sequences."""
        work = self._attention_work("paged_prefill", batch, rows, context_len)

        def launch() -> Launch:
            cache, context = self._sequences(batch, rows, context_len)
            out = self._empty(batch * rows, self._q_width)
            q = self._random(batch * rows, self._model.qkv_width)[:, : self._q_width]
            sequences = self._int32(np.arange(batch))
            return lambda: self._kernels.paged_prefill(
                out, q, cache, context, sequences, rows, self._attention
            )

        return self._case(work, launch)

    def copy_blocks(self) -> Case:
        """Within the pool of all layers."""
        model, count = self._model, self._sizes.copied_blocks
        planes = 2 * model.num_layers
        block_bytes = model.num_kv_heads * BLOCK_SIZE * model.head_dim * ITEM
        work = Work("copy_blocks", f"{planes} x {block_bytes} bytes", count, 2 * count * planes * block_bytes)

        def launch() -> Launch:
            shape = (planes, 2 * count, block_bytes)
            pool = torch.zeros(shape, dtype=torch.uint8, device=self._device.device)
            pairs = self._int32(np.random.default_rng(0).permutation(2 * count).reshape(count, 2))
            return lambda: self._kernels.copy_blocks(pool, pool, pairs)

        return self._case(work, launch)

    def sample(self, rows: int, settings: dict[str, float]) -> Case:
        """A token a row, out of the whole vocabulary."""
        vocab_size = self._model.vocab_size
        label = ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "temperature 1"
        sampling = self._sampling(rows, settings)

        def launch() -> Launch:
            # A deviation of 3 is that of a model's logits.
            logits = 3 * self._random(rows, vocab_size).float()
            return lambda: self._kernels.sample(logits, vocab_size, sampling, rows)

        return self._case(Work("sample", label, rows, 4 * rows * vocab_size), launch)

    def product(self, stored_as: str, rows: int) -> Case:
        """With the weight of gate and up."""
        n, k = 2 * self._model.intermediate_size, self._model.hidden_size
        make = partial(self._weight, stored_as, n, k)
        weight = make()
        num_bytes = weight.nbytes + rows * (n + k) * ITEM
        kernel = "linear, torch" if stored_as == "bfloat16" else f"linear {stored_as}"
        work = Work(kernel, f"[{n}, {k}]", rows, num_bytes, 2.0 * rows * n * k)
        weights = iter([weight])

        def launch() -> Launch:
            used = next(weights, None)
            used = make() if used is None else used
            x, out = self._random(rows, k), self._empty(rows, n)
            if isinstance(used, Tensor):
                return lambda: torch.mm(x, used.t(), out=out)
            return lambda: used.multiply(out, x)

        return self._case(work, launch)

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def _q_width(self) -> int:
        return self._model.num_heads * self._model.head_dim

    def _case(self, work: Work, launch: Callable[[], Launch]) -> Case:
        copies = self._device.copies_for(int(work.bytes))
        return Case(work, tuple(launch() for _ in range(copies)))

    def _random(self, *shape: int) -> Tensor:
        values = torch.empty(shape, dtype=DTYPE, device=self._device.device)
        return values.normal_(generator=self._generator)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self._device.device)

    def _int32(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device.device)

    def _cache(self, num_blocks: int) -> PagedCache:
        shape = (num_blocks, self._model.num_kv_heads, BLOCK_SIZE, self._model.head_dim)
        return PagedCache(self._random(*shape), self._random(*shape))

    def _sequences(self, batch: int, rows: int, context_len: int) -> tuple[PagedCache, PagedContext]:
        """Sequences whose blocks lie anywhere."""
        blocks = -(-context_len // BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
        context = PagedContext(
            query_start=self._int32(rows * np.arange(batch + 1)),
            context_lens=self._int32(np.full(batch, context_len)),
            table_rows=self._int32(np.arange(batch)),
            block_tables=self._int32(tables),
        )
        return self._cache(batch * blocks), context

    def _decode_work(self, batch: int, context_len: int) -> DecodeWork:
        found = decode_work(np.full(batch, context_len, np.int32), np.ones(batch, np.bool_))
        shape = (len(found.items), self._model.num_heads, self._model.head_dim + 2)
        return DecodeWork(
            items=self._int32(found.items),
            num_items=self._int32(np.array([len(found.items)])),
            first_item=self._int32(found.first_item),
            num_splits=self._int32(found.num_splits),
            partials=torch.empty(shape, device=self._device.device),
        )

    def _attention_work(self, kernel: str, batch: int, rows: int, context_len: int) -> Work:
        """Keys and values of every context once, queries and outputs; the products of visible pairs."""
        position_bytes = 2 * self._model.num_kv_heads * self._model.head_dim * ITEM
        num_bytes = batch * (context_len * position_bytes + 2 * rows * self._q_width * ITEM)
        pairs = batch * (rows * context_len - rows * (rows - 1) / 2)
        shape = f"{batch} x context {context_len}"
        return Work(kernel, shape, batch * rows, num_bytes, 4.0 * pairs * self._q_width)

    def _sampling(self, rows: int, settings: dict[str, float]) -> DeviceSampling:
        host = SamplingBuffers.allocate(rows)
        host.temperature[:] = 1.0
        host.seed[:] = np.arange(rows)
        for name, value in settings.items():
            getattr(host, name)[:] = value
        arrays = {name: getattr(host, name) for name in SamplingBuffers.__slots__}
        arrays["seed"] = host.seed.view(np.int64)
        return DeviceSampling(
            **{name: torch.from_numpy(array).to(self._device.device) for name, array in arrays.items()}
        )

    def _weight(self, stored_as: str, n: int, k: int) -> Tensor | QuantizedMatrix:
        if stored_as in ("q4_0", "q8_0"):
            return QuantizedMatrix.from_parts(
                n, k, [stored_weight(stored_as, n, k)], self._device.device, DTYPE
            )
        weight = 0.02 * self._random(n, k)
        if stored_as == "bfloat16":
            return weight
        return QuantizedMatrix([{"int8": quantize_int8, "float8_e4m3": quantize_float8}[stored_as](weight)])
