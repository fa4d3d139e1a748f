"""CPU kernels, recorded into plans and replayed by native threads.

Addresses are integers (``array.ctypes.data``) of memory that must outlive the plan's runs; strides are the
distance between rows in elements. Arrays are float32 and index arrays int32 unless said otherwise. An
argument out of range raises ValueError naming it. A row's result does not depend on the other rows of a
batch, on how a prompt is cut into chunks, or on the number of threads: equality is exact within one
instruction set. Products with quantised weights are equal between instruction sets too, "portable" excepted.

Where an operation takes ``quantized``, true means that the rows it writes (``linear``: reads) are not float32
but rounded to 8 bits in groups of 32 elements, as ``linear`` describes it. They take quantized_bytes() bytes,
aligned to 16; the stride is not used, and widths are multiples of 32.
"""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""gelu is exact (erf)."""

def instruction_sets() -> list[str]:
    """Those that this CPU supports, best first: out of "avx512_vnni", "avx512",
    "avx_vnni", "avx2" and "portable"."""

GROUP: int
"""Elements of a row that are quantised together: 32."""

def quantized_bytes(rows: int, width: int) -> int:
    """What so many quantised rows take."""

def quantize_q8_0(values: int, rows: int, k: int, out: int) -> None:
    """Rows of float32 ``[rows, k]`` as GGML's Q8_0 blocks, 34 bytes for every 32 elements, all of them side
    by side in ``out``; rounded to the nearest. ``k`` is a multiple of 32."""

def quantize_q4_1(values: int, importance: int, rows: int, k: int, out: int) -> None:
    """Rows of float32 ``[rows, k]`` as GGML's Q4_1 blocks, 20 bytes for every 32 elements, all of them side
    by side in ``out``. Of each block scale and minimum are searched that make the least of
    ``sum(importance * (stored - value)^2)``. The same bytes with every instruction set.

    Args:
        importance: float32 ``[k]``, not negative.
        k: a multiple of 32.
    """

def instruction_set() -> str:
    """The one in use; at first the best."""

def set_instruction_set(name: str) -> None:
    """Chooses another one, for all plans; not while one runs."""

def weight_formats() -> list[str]:
    """Formats of weights that there are kernels for."""

def interleave_memory_over(nodes: list[int]) -> bool:
    """Spreads the pages of memory placed from now on, weights included, evenly over these NUMA nodes (none:
    pages lie where they are touched first). Returns whether the kernel lets us; if not, it is as with
    none."""

def place_memory(start: int, num_bytes: int) -> None:
    """Asks for huge pages, and for the nodes of interleave_memory_over, for memory at a page's start that
    nobody has touched."""

def measure_read_bandwidth(num_threads: int, bytes_per_thread: int, seconds: float) -> float:
    """Bytes a second that threads read together, each its own `bytes_per_thread` bytes over and over. Like
    the other two it takes about `seconds`, uses the instruction set in use, and releases the GIL."""

def measure_float32_peak(num_threads: int, seconds: float) -> float:
    """Float32 operations a second on registers; a multiply-add is two."""

def measure_int8_peak(num_threads: int, seconds: float) -> float:
    """Operations a second on 8-bit integers in registers; a multiply-add is two."""

def philox4x32(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011) of a 128-bit counter and a 64-bit key, as 32-bit words."""

class ThreadPool:
    """The threads that replay plans, one plan at a time. They sleep when idle; deletion joins them."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class PackedMatrix:
    """The weight W[n, k] of a product x @ W.T, its rows in whatever formats they were stored.

    "float32", "float16" and "bfloat16" multiply as float32. "q4_0", "q4_1" and "q8_0" are GGML's types, in
    groups of 32 along k. At first there are no rows.
    """

    def __init__(self, k: int) -> None: ...
    def append_rows(
        self, format: str, address: int, rows: int, row_stride: int, num_threads: int = 1
    ) -> None:
        """Copies rows that lie `row_stride` bytes apart to the matrix's end. Releases the GIL.

        ValueError for an unknown format, one whose groups do not divide k, or a row_stride too short.
        Recorded operations see the rows that were there when they were recorded.
        """

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def is_quantized(self) -> bool:
        """All rows are, so that a product may read x quantised."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def formats(self) -> list[str]:
        """One a call of `append_rows`."""

class LoraUpdate:
    """What an adapter adds to the rows of one part of a matrix: ``b @ a``, packed for the kernels."""

    def __init__(self, a: int, b: int, rows: int, rank: int, k: int, format: str) -> None:
        """Copies row-major ``a[rank, k]`` and ``b[rows, rank]``. Releases the GIL.

        Args:
            format: "float32", or "bfloat16": rounded to the nearest.
        """

    @property
    def num_bytes(self) -> int: ...

class LoraSlots:
    """By slot the adapters' updates of one matrix, whose parts have `part_rows` rows; at first none.

    Plans read it when they run: it must not change meanwhile.
    """

    def __init__(self, part_rows: list[int], k: int, max_loras: int, max_rank: int) -> None: ...
    def set(self, slot: int, part: int, update: LoraUpdate) -> None:
        """ValueError for a slot or part that there is not, or an update that does not fit it."""

    def clear(self, slot: int) -> None: ...

class LoraRows:
    """Which rows of the next run have which slot; at first none."""

    def __init__(self, max_loras: int, num_threads: int) -> None:
        """`num_threads` of the pool that runs the plans."""

    def assign(self, slots: int, count: int) -> None:
        """int32[count], one entry a token, -1 for none; a count of 0: no row has an adapter."""

class Plan:
    """A list of operations over preallocated buffers.

    Recording methods append one operation. Most work on the first ``num_tokens`` rows of a run; those said
    to be on outputs, or recorded with a true ``on_outputs``, work on ``num_outputs`` rows. RuntimeError if
    one is recorded while the plan runs.
    """

    def __init__(self, pool: ThreadPool) -> None: ...
    @property
    def num_ops(self) -> int: ...
    def run(self, num_tokens: int, num_sequences: int, num_outputs: int) -> None:
        """Replays the plan and waits for it. Releases the GIL.

        RuntimeError if the pool is busy; ValueError if index arrays contradict the counts.
        """

    def submit(self, num_tokens: int, num_sequences: int, num_outputs: int, event_fd: int) -> None:
        """Starts a replay and returns; 1 (uint64) is written to `event_fd` when it is done (-1: to nothing).

        Index arrays are checked before it returns; errors as for `run`. The pool is free again when the
        event arrives.
        """

    def wait(self) -> None:
        """Blocks until the submitted run is done; at once if there is none. Releases the GIL."""

    def embedding(self, token_ids: int, weight: PackedMatrix, out: int, out_stride: int) -> None:
        """out[t, :k] = weight[token_ids[t]]; ids outside 0 .. n-1 give zeros."""

    def rms_norm(
        self,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        dim: int,
        eps: float,
        out: int,
        out_stride: int,
        quantized: bool = False,
        on_outputs: bool = False,
    ) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over rows of `dim`; `out` may be `x`.

        With a `residual` (not 0): residual += x in place, and out is computed from residual.
        """

    def layer_norm(
        self,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        bias: int,
        dim: int,
        eps: float,
        out: int,
        out_stride: int,
        quantized: bool = False,
        on_outputs: bool = False,
    ) -> None:
        """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, otherwise as `rms_norm`."""

    def add(
        self, x: int, x_stride: int, other: int, other_stride: int, dim: int, on_outputs: bool = False
    ) -> None:
        """other += x, over rows of `dim`."""

    def scale(self, x: int, x_stride: int, dim: int, factor: float, on_outputs: bool = False) -> None:
        """x *= factor, over rows of `dim`."""

    def soft_cap(self, x: int, x_stride: int, dim: int, cap: float, on_outputs: bool = False) -> None:
        """x = cap * tanh(x / cap), within 2e-7 of cap, over rows of `dim`."""

    def sigmoid_scale(
        self, x: int, x_stride: int, dim: int, gate: int, gate_stride: int, on_outputs: bool = False
    ) -> None:
        """x *= sigmoid(gate), over rows of `dim` with one gate each."""

    def linear(
        self,
        x: int,
        x_stride: int,
        weight: PackedMatrix,
        bias: int,
        out: int,
        out_stride: int,
        on_outputs: bool,
        quantized: bool = False,
    ) -> None:
        """out[:, :n] = x[:, :k] @ weight.T + bias; `bias` is the address of n floats, or 0.

        For quantised weights x is first rounded, in an operation of its own if it was not written so, to 8
        bits in groups of 32 along k: integers times a scale of max|x| / 127. A group that holds NaN or
        infinity makes all outputs of its row NaN, and touches no other row. ``quantized`` takes weights
        whose rows are all quantised, and x of this plan's tokens.
        """

    def rotary_and_cache(
        self,
        qkv: int,
        qkv_stride: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        q_norm: int,
        q_norm_dim: int,
        k_norm: int,
        k_norm_dim: int,
        norm_eps: float,
        cos: int,
        sin: int,
        rope_rows: int,
        slot_mapping: int,
        key_cache: int,
        value_cache: int,
        kv_dtype: Literal["float32", "float16", "int8"],
        block_size: int,
    ) -> None:
        """Normalises and rotates the heads of qkv = [q heads | k heads | v heads]; stores K and V.

        q_norm, k_norm: RMSNorm weights, or 0 for none: of head_dim floats, a norm of each head, or of as many
        as all heads of q, or of k, have, a norm of all together. The first rotary_dim elements of a head are
        rotated as two halves (NeoX order) by cos and sin, [positions, rotary_dim / 2], row rope_rows[t]; with
        a rotary_dim of 0 all three may be 0. q is rewritten in place; k and v are not, they go to slot
        slot_mapping[t] (int64: block * block_size + offset; negative: nowhere). float16 saturates.

        key_cache: [num_blocks, num_kv_heads, block_size / 16] tiles [head_dim, 16]; value_cache: as many
        [16, head_dim]. In int8 each tile is followed by the float32 scales of its 16 positions: of a key or
        value x is stored round(x / scale), scale = max|x| / 127, NaN if there is NaN in x.
        block_size: a multiple of 16; head_dim: a multiple of 8 up to 256.
        """

    def paged_attention(
        self,
        q: int,
        q_stride: int,
        out: int,
        out_stride: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: int,
        query_start: int,
        context_lens: int,
        block_tables: int,
        key_cache: int,
        value_cache: int,
        kv_dtype: Literal["float32", "float16", "int8"],
        block_size: int,
        quantized: bool = False,
    ) -> None:
        """Causal attention of each sequence's rows over its cached context, these rows included.

        Sequence s has the rows query_start[s] .. query_start[s + 1]; the last one sits at position
        context_lens[s] - 1. block_tables: int64[num_sequences], addresses of int32 arrays of block ids.
        window: a row sees itself and the window - 1 positions before (0: all). soft_cap: scores become
        cap * tanh(score / cap) (0: as they are). sinks: num_heads floats, scores that join each head's
        softmax, unscaled and without a value (0: none). Caches as in `rotary_and_cache`.
        """

    def activate(
        self,
        x: int,
        x_stride: int,
        dim: int,
        activation: Activation,
        out: int,
        out_stride: int,
        quantized: bool = False,
        on_outputs: bool = False,
    ) -> None:
        """out = activation(x) over rows of `dim`; `out` may be `x` if it is not quantised."""

    def gate_and_mul(
        self,
        x: int,
        x_stride: int,
        dim: int,
        activation: Activation,
        limit: float,
        out: int,
        out_stride: int,
        quantized: bool = False,
        on_outputs: bool = False,
    ) -> None:
        """out = activation(gate) * up for rows x = [gate(dim) | up(dim)]; `out` must not overlap `x`.

        With a `limit` above 0: out = g * sigmoid(1.702 g) * (u + 1), where g = min(gate, limit) and u is up
        clamped to [-limit, limit].
        """

    def experts(
        self,
        x: int,
        x_stride: int,
        x_quantized: bool,
        router_logits: int,
        router_stride: int,
        gate_up: list[PackedMatrix],
        gate_up_bias: int,
        down: list[PackedMatrix],
        down_bias: int,
        top_k: int,
        normalize: bool,
        activation: Activation,
        limit: float,
        active: int,
        active_stride: int,
        active_quantized: bool,
        out: int,
        out_stride: int,
        on_outputs: bool = False,
    ) -> None:
        """out = the weighted sum of each row's experts, added in order of their numbers.

        A row uses the `top_k` experts with the largest logits, the lower number among equals; if its logits
        hold NaN or their maximum is not finite, its result is NaN. Weights are the softmax over the chosen
        logits, or over all. `gate_up` holds [2 * intermediate, hidden] an expert and `down` [hidden,
        intermediate]; biases are float32 [experts, 2 * intermediate] and [experts, hidden] (0: none). The
        intermediate rows, joined as `gate_and_mul` does, go to `active`, which has room for `top_k` rows for
        each row of `x`; they can be quantised if all of `down` is, `x` if all of `gate_up` is.
        """

    def lora_add(
        self,
        x: int,
        x_stride: int,
        quantized: bool,
        slots: LoraSlots,
        rows: LoraRows,
        out: int,
        out_stride: int,
    ) -> None:
        """``out[row] += b @ (a @ x[row])`` for all parts that the row's adapter changes, on rows of tokens.

        ``x[rows, k]`` may have been written ``quantized``. A run raises ValueError if `rows` were assigned
        for another number of tokens.
        """

    def gather_rows(self, x: int, x_stride: int, indices: int, dim: int, out: int, out_stride: int) -> None:
        """On outputs: out[o, :dim] = x[indices[o], :dim]."""

    def sample(
        self,
        logits: int,
        logits_stride: int,
        vocab_size: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        seed: int,
        choice: int,
        position: int,
        num_logprobs: int,
        logprobs_mode: int,
        edits: int,
        allowed_mask: int,
        grammar_mask: int,
        replacement: int,
        target: int,
        token: int,
        logprob: int,
        rank: int,
        top_ids: int,
        top_logprobs: int,
        max_logprobs: int,
    ) -> None:
        """On outputs: one token a row, with logprobs where num_logprobs (-1: none) asks for them.

        Inputs a row: float32 temperature (below 1e-5: greedy), top_p, min_p; int32 top_k (0: off), choice,
        position, num_logprobs, logprobs_mode, target (-1: draw); uint64 seed; int64 addresses, 0 for none:
        edits, allowed_mask, grammar_mask, replacement (SamplingBuffers says of what). Results a row: int32
        token (-1 if the row holds NaN or +inf, or only -inf; -2 if all are forbidden), float32 logprob,
        int32 rank, and top_ids (int32) and top_logprobs of [outputs, max_logprobs], the first num_logprobs of
        which are written (id -1 beyond the vocabulary).

        The filters are min_p, then top_k (ties kept), then top_p, on exp((logit - max) / temperature); the
        draw inverts the cumulative sum in id order at a Philox number keyed by seed, choice and position.
        """
