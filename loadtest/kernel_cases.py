"""The kernels that loadtest/kernel_speed.py measures, in the shapes of the default model (SmolLM2-135M).

A case is a plan that runs one operation many times over. Weights and KV blocks are as many different ones as
it takes to outgrow the last-level cache: a model's step finds none of its weights there either. Activations
lie in the caches, as they do in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from streamllm.ops import Attention, Experts, Gate, RMSNorm, float8_rows
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.plan_recorder import PlanBuffer, row_stride
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.ops.stored_rows import StoredRows

HIDDEN, INTERMEDIATE, VOCAB = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
"""Name -> (n, k)."""
EXPERTS = (2048, 768, 128, 8)
"""Hidden and intermediate size, experts and how many a row uses: a layer of Qwen3-30B-A3B."""
ROWS = (1, 8, 32, 128)
DECODES = tuple((batch, context) for batch in (1, 8, 32) for context in (192, 2048))
PREFILLS = ((192, 192), (256, 2048))
"""(Rows, context with them) of one sequence."""
BLOCK_SIZE = 16
MAX_ROWS = 256
QUANTIZED_BLOCKS = {
    "q4_0": (32, 18, (0,)), "q4_1": (32, 20, (0, 2)), "q5_0": (32, 22, (0,)), "q5_1": (32, 24, (0, 2)),
    "q8_0": (32, 34, (0,)), "q2_k": (256, 84, (80, 82)), "q3_k": (256, 110, (108,)),
    "q4_k": (256, 144, (0, 2)), "q5_k": (256, 176, (0, 2)), "q6_k": (256, 210, (208,)),
    "iq4_nl": (32, 18, (0,)), "iq4_xs": (256, 136, (0,)), "mxfp4": (32, 17, ()),
    "int4_32": (32, 24, (0, 4)), "int4_64": (64, 40, (0, 4)), "int4_128": (128, 72, (0, 4)),
    "int8_32": (32, 40, (0, 4)), "int8_64": (64, 72, (0, 4)), "int8_128": (128, 136, (0, 4)),
}  # fmt: skip
"""A block's elements and bytes, and where its factors lie: float32 in ``int*``, float16 in the others; of
``mxfp4`` it is an exponent at the beginning."""
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SAMPLING: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9})
NUM_LAYERS = 30

CACHE_MULTIPLE = 4
"""How many times the last-level cache is outgrown: caches of these days keep part of a longer cycle than they
hold."""
MOST_OPS = 1000
"""In one plan."""


@dataclass(frozen=True)
class Work:
    """What one run of a kernel does.

    Attributes:
        kernel, shape: what the table calls them.
        rows: of the batch.
        bytes, operations: that the run cannot do without; a multiply-add is two operations.
        source: where the bytes come from, ``"memory"`` or ``"cache"``.
        unit: what the operations are done with, ``"float32"`` or ``"int8"``.
    """

    kernel: str
    shape: str
    rows: int
    bytes: float
    operations: float
    source: Literal["memory", "cache"]
    unit: Literal["float32", "int8"]


@dataclass(frozen=True)
class Case:
    """A call that does the same work ``repeats`` times. It holds the weights; ``work`` does not."""

    work: Work
    repeats: int
    run: Callable[[], None]


CaseSource = Callable[[], Iterator[Case]]


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=32 * 2**20)


def copies_for(num_bytes: int) -> int:
    """How many different ones of that size outgrow the last-level cache, within reason."""
    return min(-(-CACHE_MULTIPLE * last_level_cache() // num_bytes), MOST_OPS)


def fits(stored_as: str, *sizes: int) -> bool:
    """Whether rows of so many elements are whole blocks of a format."""
    elements = QUANTIZED_BLOCKS[stored_as][0] if stored_as in QUANTIZED_BLOCKS else 1
    return all(size % elements == 0 for size in sizes)


def stored_weight(stored_as: str, n: int, k: int, seed: int = 0) -> StoredRows:
    """Random rows in a format, as a file would hold them."""
    rng = np.random.default_rng(seed)
    if stored_as in QUANTIZED_BLOCKS:
        elements, num_bytes, factors = QUANTIZED_BLOCKS[stored_as]
        rows = rng.integers(0, 256, (n, k // elements, num_bytes), np.uint8)
        dtype = np.dtype(np.float32 if stored_as.startswith("int") else np.float16)
        for offset in factors:
            factor = rng.uniform(0.001, 0.01, (n, k // elements, 1)).astype(dtype)
            rows[..., offset : offset + dtype.itemsize] = factor.view(np.uint8)
        if stored_as == "mxfp4":
            rows[..., 0] = 120
        return StoredRows(stored_as, rows.reshape(n, -1))
    if stored_as == float8_rows.FORMAT:
        codes = rng.integers(0, 127, (n, k), np.uint8)  # 127 is NaN
        return float8_rows.pack_float8(codes, np.full((n, -(-k // float8_rows.BLOCK)), 1e-3, np.float32))
    values = rng.standard_normal((n, k), np.float32) * np.float32(0.05)
    if stored_as == "float16":
        return StoredRows(stored_as, values.astype(np.float16).view(np.uint8))
    if stored_as == "bfloat16":
        return StoredRows(stored_as, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return StoredRows(stored_as, values.view(np.uint8))


class CaseMaker:
    """Makes cases on one thread pool. Every method gives its cases one after the other: memory for one group
    of them is all that is held."""

    def __init__(self, threads: int) -> None:
        self.ops = CpuOps(threads=threads, max_tokens=MAX_ROWS, max_outputs=MAX_ROWS)
        self._arrays: list[np.ndarray] = []

    def linear(self, stored_as: str, name: str, rows: tuple[int, ...] = ROWS) -> Iterator[Case]:
        """Products with a weight, the rounding of the activations included."""
        n, k = SHAPES[name]
        stored = stored_weight(stored_as, n, k)
        copies = copies_for(stored.data.nbytes)
        weights = [self.ops.matrix(n, k, [stored]) for _ in range(copies)]
        x = self._buffer(k)
        for weight in weights:
            self.ops.linear(x, weight)
        run = self._runner()
        for num_rows in rows:
            work = Work(
                kernel=f"linear {stored_as}", shape=f"{name} [{n}, {k}]", rows=num_rows,
                bytes=stored.data.nbytes, operations=2.0 * num_rows * n * k, source="memory",
                unit="int8" if stored_as in QUANTIZED_BLOCKS else "float32",
            )  # fmt: skip
            yield Case(work, copies, partial(run, num_rows, num_rows, num_rows))

    def experts(self, stored_as: str, rows: tuple[int, ...] = ROWS) -> Iterator[Case]:
        """A mixture-of-experts layer; every repetition routes its rows anew."""
        hidden, width, count, top_k = EXPERTS
        gate_up, down = stored_weight(stored_as, 2 * width, hidden), stored_weight(stored_as, hidden, width)
        layer = Experts(
            self.ops.expert_matrices(2 * width, hidden, ([gate_up] for _ in range(count))),
            self.ops.expert_matrices(hidden, width, ([down] for _ in range(count))),
            num_experts=count, top_k=top_k, normalize=True,
        )  # fmt: skip
        for num_rows in rows:
            used = count * (1 - (1 - top_k / count) ** num_rows)  # experts, as evenly as they are drawn
            used_bytes = used * (gate_up.data.nbytes + down.data.nbytes)
            repeats, x = copies_for(int(used_bytes)), self._buffer(hidden)
            for repeat in range(repeats):
                self.ops.experts(x, self._buffer(count, rows=num_rows, seed=repeat), layer)
            run = self._runner()
            work = Work(
                kernel=f"experts {stored_as}", shape=f"{top_k} of {count} [{width}, {hidden}]", rows=num_rows,
                bytes=used_bytes, operations=6.0 * num_rows * top_k * hidden * width, source="memory",
                unit="int8" if stored_as in QUANTIZED_BLOCKS else "float32",
            )  # fmt: skip
            yield Case(work, repeats, partial(run, num_rows, num_rows, num_rows))

    def decode(self, batch: int, context: int, kv_cache_dtype: str = "float16") -> Iterator[Case]:
        """Attention of one new token in each of ``batch`` sequences."""
        yield self._attention("decode", [(1, context)] * batch, kv_cache_dtype)

    def prefill(self, rows: int, context: int, kv_cache_dtype: str = "float16") -> Iterator[Case]:
        """Attention of the last ``rows`` tokens of one sequence."""
        yield self._attention("prefill", [(rows, context)], kv_cache_dtype)

    def rms_norm(self, rows: int) -> Iterator[Case]:
        """A norm with the sum of the residual before it."""
        norm = RMSNorm(self.ops.vector(np.ones(HIDDEN, np.float32)), HIDDEN, 1e-5)
        x, residual = self._buffer(HIDDEN), self._buffer(HIDDEN)
        for _ in range(NUM_LAYERS):
            self.ops.rms_norm(x, norm, residual)
        yield self._light("rms_norm", f"[{HIDDEN}]", rows, floats=4 * HIDDEN, operations=5 * HIDDEN)

    def gate_and_mul(self, rows: int) -> Iterator[Case]:
        """The halves of a gated MLP's rows, joined with SiLU."""
        x = self._buffer(2 * INTERMEDIATE)
        for _ in range(NUM_LAYERS):
            self.ops.gate_and_mul(x, Gate())
        yield self._light(
            "gate_and_mul", f"[{INTERMEDIATE}]", rows, floats=3 * INTERMEDIATE, operations=15 * INTERMEDIATE
        )

    def rotary_and_cache(self, rows: int) -> Iterator[Case]:
        """Rotation of q and k, and the write of k and v into a float16 cache."""
        batch, attention = self._batch([(1, 1)] * rows, 1, "float16")
        qkv = self._buffer(SHAPES["qkv"][0])
        for _ in range(NUM_LAYERS):
            self.ops.rotary_and_cache(qkv, batch, attention(0))
        rotated, cached = (HEADS + KV_HEADS) * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM
        yield self._light(
            "rotary_and_cache", "", rows, floats=2 * rotated + KV_HEADS * HEAD_DIM + cached // 2,
            operations=3 * rotated,
        )  # fmt: skip

    def sample(self, rows: int, settings: dict[str, float]) -> Iterator[Case]:
        """A token a row, out of the whole vocabulary."""
        logits = self._buffer(VOCAB, on_outputs=True, rows=rows)
        sampling = SamplingBuffers.allocate(MAX_ROWS)
        sampling.num_logprobs[:] = sampling.target[:] = -1
        sampling.temperature[:] = sampling.top_p[:] = 1
        for name, value in settings.items():
            getattr(sampling, name)[:] = value
        self.ops.sample(logits, VOCAB, sampling)
        run = self._runner()
        label = ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "temperature 1"
        work = Work(
            kernel="sample", shape=label, rows=rows, bytes=4.0 * rows * VOCAB, operations=float(rows * VOCAB),
            source="cache", unit="float32",
        )  # fmt: skip
        yield Case(work, 1, partial(run, rows, rows, rows))

    # -- inside --------------------------------------------------------------------------------------------

    def _buffer(
        self, width: int, *, on_outputs: bool = False, rows: int = MAX_ROWS, seed: int = 1
    ) -> PlanBuffer:
        """Random activations; their deviation of 3 is that of a model's logits."""
        stride = row_stride(width)
        values = 3 * np.random.default_rng(seed).standard_normal((rows + 1, stride), np.float32)
        self._arrays.append(values)
        # Rows of a plan begin at cache lines.
        address = values.ctypes.data + -values.ctypes.data % 64
        return PlanBuffer(on_outputs, width, stride, address)

    def _runner(self) -> Callable[[int, int, int], None]:
        """Compiles what was recorded. The plan and its arrays live as long as the function."""
        plan, arrays, self._arrays = self.ops.compile(), self._arrays, []

        def run(num_tokens: int, num_sequences: int, num_outputs: int) -> None:
            plan.native.run(num_tokens, num_sequences, num_outputs)
            assert arrays

        return run

    def _light(self, kernel: str, shape: str, rows: int, *, floats: int, operations: int) -> Case:
        """An operation whose data, ``floats`` a row read and written, lies in the caches."""
        run = self._runner()
        work = Work(
            kernel=kernel, shape=shape, rows=rows, bytes=4.0 * rows * floats,
            operations=float(rows * operations), source="cache", unit="float32",
        )  # fmt: skip
        return Case(work, NUM_LAYERS, partial(run, rows, rows, rows))

    def _attention(self, name: str, sequences: list[tuple[int, int]], kv_cache_dtype: str) -> Case:
        itemsize = FLOAT_BYTES[kv_cache_dtype]
        kv_bytes = sum(context for _, context in sequences) * 2 * KV_HEADS * HEAD_DIM * itemsize
        copies = copies_for(kv_bytes)
        batch, attention = self._batch(sequences, copies, kv_cache_dtype)
        q = self._buffer(SHAPES["qkv"][0])
        for place in range(copies):
            self.ops.paged_attention(q, batch, attention(place))
        run = self._runner()
        num_rows = sum(rows for rows, _ in sequences)
        pairs = sum(rows * context - rows * (rows - 1) // 2 for rows, context in sequences)
        work = Work(
            kernel=f"attention, {name}", shape=f"context {sequences[0][1]}, {kv_cache_dtype}", rows=num_rows,
            bytes=float(kv_bytes), operations=4.0 * pairs * HEADS * HEAD_DIM, source="memory", unit="float32",
        )  # fmt: skip
        return Case(work, copies, partial(run, num_rows, len(sequences), 0))

    def _batch(
        self, sequences: list[tuple[int, int]], places: int, kv_cache_dtype: str
    ) -> tuple[StepInputs, Callable[[int], Attention]]:
        """Inputs of a step with sequences of (rows, context), over a cache of random keys and values."""
        counts = [-(-context // BLOCK_SIZE) for _, context in sequences]
        cache = KVCache(
            layers_per_block=places, num_blocks=sum(counts), block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        cache.planes[0] = np.random.default_rng(2).standard_normal(cache.planes[0].shape, np.float32)
        cache.planes[1:] = cache.planes[0]
        angles = np.outer(np.arange(MAX_ROWS), 1e4 ** -np.linspace(0, 1, HEAD_DIM // 2)).astype(np.float32)
        batch = StepInputs.allocate(MAX_ROWS, len(sequences), (np.cos(angles),), (np.sin(angles),), cache)
        batch.query_start[1:] = np.cumsum([rows for rows, _ in sequences])
        batch.context_lens[:] = [context for _, context in sequences]
        batch.slot_mapping[0] = np.arange(MAX_ROWS) % (cache.num_blocks * BLOCK_SIZE)
        tables = np.random.default_rng(3).permutation(cache.num_blocks).astype(np.int32)
        starts = np.cumsum([0, *counts[:-1]])
        batch.block_tables[0] = tables.ctypes.data + 4 * starts
        self._arrays.append(tables)
        return batch, _layer


def _layer(place: int) -> Attention:
    return Attention(
        group=0, place=place, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
    )  # fmt: skip


def cases_by_group(maker: CaseMaker, formats: tuple[str, ...]) -> dict[str, list[CaseSource]]:
    """All cases, by what they should be measured next to: the products of one shape, attention, the rest.
    A plan is made when its turn comes."""
    groups: dict[str, list[CaseSource]] = {
        name: [partial(maker.linear, stored_as, name) for stored_as in formats if fits(stored_as, k)]
        for name, (_, k) in SHAPES.items()
    }
    groups["experts"] = [
        partial(maker.experts, stored_as)
        for stored_as in formats
        if stored_as in QUANTIZED_BLOCKS and fits(stored_as, *EXPERTS[:2])
    ]
    groups["attention"] = [
        *(partial(maker.decode, batch, context) for batch, context in DECODES),
        *(partial(maker.prefill, rows, context) for rows, context in PREFILLS),
    ]
    groups["others"] = [
        partial(make, rows)
        for make in (maker.rms_norm, maker.rotary_and_cache, maker.gate_and_mul)
        for rows in ROWS
    ]
    groups["others"] += [
        partial(maker.sample, rows, settings) for settings in SAMPLING for rows in ROWS if rows <= 32
    ]
    return groups
