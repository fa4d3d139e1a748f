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

def instruction_sets() -> list[str]:
    """Those that this CPU supports, best first: out of "avx512_vnni", "avx512",
    "avx_vnni", "avx2" and "portable"."""

GROUP: int
"""Elements of a row that are quantised together: 32."""

def quantized_bytes(rows: int, width: int) -> int:
    """What so many quantised rows take."""

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
    def append_rows(self, format: str, address: int, rows: int, row_stride: int) -> None:
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

class Plan:
    """A list of operations over preallocated buffers.

    Recording methods append one operation. Most work on the first ``num_tokens`` rows of a run; those said
    to be on outputs work on ``num_outputs`` rows. RuntimeError if one is recorded while the plan runs.
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
    ) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over rows of `dim`; `out` may be `x`.

        With a `residual` (not 0): residual += x in place, and out is computed from residual.
        """

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
        k_norm: int,
        norm_eps: float,
        cos: int,
        sin: int,
        rope_rows: int,
        slot_mapping: int,
        key_cache: int,
        value_cache: int,
        kv_dtype: Literal["float32", "float16"],
        block_size: int,
    ) -> None:
        """Normalises and rotates the heads of qkv = [q heads | k heads | v heads]; stores K and V.

        q_norm, k_norm: RMSNorm weights of head_dim floats, or 0. The first rotary_dim elements of a head are
        rotated as two halves (NeoX order) by cos and sin, [positions, rotary_dim / 2], row rope_rows[t]. q is
        rewritten in place; k and v are not, they go to slot slot_mapping[t] (int64: block * block_size +
        offset; negative: nowhere). float16 saturates.

        key_cache: [num_blocks, num_kv_heads, block_size / 16, head_dim, 16]; value_cache: [num_blocks,
        num_kv_heads, block_size, head_dim].
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
        query_start: int,
        context_lens: int,
        block_tables: int,
        key_cache: int,
        value_cache: int,
        kv_dtype: Literal["float32", "float16"],
        block_size: int,
        quantized: bool = False,
    ) -> None:
        """Causal attention of each sequence's rows over its cached context, these rows included.

        Sequence s has the rows query_start[s] .. query_start[s + 1]; the last one sits at position
        context_lens[s] - 1. block_tables: int64[num_sequences], addresses of int32 arrays of block ids.
        window: a row sees itself and the window - 1 positions before (0: all). soft_cap: scores become
        cap * tanh(score / cap) (0: as they are). Caches as in `rotary_and_cache`.
        """

    def silu_and_mul(
        self, x: int, x_stride: int, dim: int, out: int, out_stride: int, quantized: bool = False
    ) -> None:
        """out = silu(gate) * up for rows x = [gate(dim) | up(dim)]; `out` must not overlap `x`."""

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
