"""The interface to GPU kernels: what CUDA C++, Triton and the reference in torch all implement.

Tensors lie on one device. ``T`` tokens of ``S`` sequences are in a step, ``H`` query heads share ``KH``
key/value heads, ``D`` is a head's width. Activations have the model's dtype (float32, float16, bfloat16);
arithmetic is float32. Every output is allocated by the caller, none is left unwritten, and all work goes to
the current stream, so that a CUDA graph can capture it: sizes that change from step to step are read from
device memory, never from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamllm.ops import Activation, Experts

Tensor = Any
"""A ``torch.Tensor``; a server that runs on a CPU never imports torch, this module included."""

SPLIT_SIZE = 256
"""Positions of a context that one thread block of the decode kernel attends to. Splits begin at multiples of
it, whatever the batch, so that a row's sums have one order."""


@dataclass(frozen=True, slots=True)
class PagedCache:
    """K and V of one layer.

    Attributes:
        keys, values: ``[num_blocks, KH, block_size, D]``: float32, float16, bfloat16 or float8_e4m3fn,
            contiguous; or int8, with room behind each block's head for its scales (:meth:`of_int8`).
        key_scale, value_scale: what a stored float8 value is multiplied by; 1 for the other dtypes.
        key_scales, value_scales: what stored int8 values are multiplied by: float32
            ``[num_blocks, KH, block_size]``; ``None`` for the other dtypes.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def of_int8(cls, key_plane: Tensor, value_plane: Tensor, head_dim: int) -> PagedCache:
        """Views of planes int8 ``[num_blocks, KH, block_size * (D + 4)]``: a head's elements, then its
        scales."""
        keys, key_scales = _elements_and_scales(key_plane, head_dim)
        values, value_scales = _elements_and_scales(value_plane, head_dim)
        return cls(keys, values, key_scales=key_scales, value_scales=value_scales)

    @property
    def head_stride(self) -> int:
        """Elements from a block's head to the next one."""
        _, _, block_size, head_dim = self.keys.shape
        return int(block_size * (head_dim + (0 if self.key_scales is None else 4)))

    @property
    def is_laid_out(self) -> bool:
        """Whether elements and scales lie where kernels look for them."""
        heads, block_size, head_dim = self.keys.shape[1:]
        if self.key_scales is None or self.value_scales is None:
            is_plain = self.key_scales is None and self.value_scales is None and not _is_int8(self.keys)
            return bool(is_plain and self.keys.is_contiguous() and self.values.is_contiguous())
        head = self.head_stride
        return all(
            _is_int8(elements)
            and _has_strides(elements, (heads * head, head, head_dim, 1))
            and scales.shape == elements.shape[:3]
            and _has_strides(scales, (heads * head // 4, head // 4, 1))
            and scales.data_ptr() == elements.data_ptr() + block_size * head_dim
            for elements, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        )


def _elements_and_scales(plane: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    import torch

    block_size = plane.shape[2] // (head_dim + 4)
    elements, scales = plane.split([block_size * head_dim, block_size * 4], dim=2)
    return elements.unflatten(2, (block_size, head_dim)), scales.view(torch.float32)


def _has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    return all(
        size == 1 or found == wanted
        for size, found, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def _is_int8(tensor: Tensor) -> bool:
    return bool(tensor.element_size() == 1 and not tensor.is_floating_point())


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Where the sequences of a step stand in the batch and in the cache, for one KV group.

    Attributes:
        query_start: int32 ``[S + 1]``; sequence ``s`` owns rows ``[query_start[s], query_start[s + 1])``.
        context_lens: int32 ``[S]``: tokens of the sequence up to and with its last row here; 0 for padding,
            whose rows become zeros.
        table_rows: int32 ``[S]``: the row of ``block_tables`` that belongs to the sequence.
        block_tables: int32 ``[slots, max_blocks]``; -1 for a block that left the window, which is not read.
    """

    query_start: Tensor
    context_lens: Tensor
    table_rows: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Which splits of which contexts the decode kernel attends to; made anew for every step and KV group.

    Attributes:
        items: int32 ``[max_items, 2]``: (sequence, split), the splits of a sequence side by side in order; of
            a layer with a window only those that reach into it.
        num_items: int32 ``[1]``: how many of them count.
        first_item: int32 ``[S]``: a sequence's first item; -1 for a sequence that is not decoded here.
        num_splits: int32 ``[S]``: its number of items.
        partials: float32 ``[max_items, H, D + 2]``: scratch for each split's sum of values, its largest score
            and its sum of weights.
    """

    items: Tensor
    num_items: Tensor
    first_item: Tensor
    num_splits: Tensor
    partials: Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention (see :class:`streamllm.ops.Attention`)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    """float32 ``[H]``: a score that joins each head's softmax and has no value (gpt-oss), or ``None``."""


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """What the slots of LoRA adapters add to the products of one matrix ``W [n, k]``.

    Attributes:
        a: ``[slots, parts * rank, k]``, part by part; ``b``: ``[slots, n, rank]``; in the activations' dtype,
            zeros beyond an adapter's own rank, which is the same for all parts.
        ranks: int32 ``[slots]``: the columns of ``b`` that count; 0: the slot adds nothing.
        first_rows: of the matrix's parts.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    first_rows: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes + self.ranks.nbytes)

    @property
    def part_ends(self) -> tuple[int, ...]:
        return *self.first_rows[1:], int(self.b.shape[1])


PADDING_TARGET = -2
"""``DeviceSampling.target`` of a row that is none: sampling neither reads its other settings nor its logits,
and writes nothing for it. So a captured graph can have as many rows as its buffers."""


@dataclass(slots=True)
class DeviceSampling:
    """What sampling reads and writes: the fields of :class:`streamllm.ops.step_inputs.SamplingBuffers`, each
    a tensor on the device with the same shape and dtype (``seed`` as int64 bits). Addresses (``edits``, its
    arrays, masks, ``replacement``) are of device memory: :mod:`streamllm.ops.gpu.sampling_upload` fills it.
    ``num_logprobs`` above ``top_ids.shape[1]`` count as that."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    num_logprobs: Tensor
    logprobs_mode: Tensor
    edits: Tensor
    allowed_mask: Tensor
    grammar_mask: Tensor
    replacement: Tensor
    target: Tensor
    token: Tensor
    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class GpuKernels(Protocol):
    """Every operation that is neither a product with one matrix nor put together from torch's operations.

    Attributes:
        name: ``"cuda"``, ``"triton"`` or ``"reference"``.
    """

    name: str

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> None:
        """``out = norm(x + residual) * weight``; the sum, rounded to the dtype, replaces ``residual`` and is
        what is normalised.

        Args:
            out, x, residual: ``[rows, size]``, rows contiguous.
            weight: float32 ``[size]``.
        """

    def act_and_mul(self, out: Tensor, x: Tensor, activation: Activation, limit: float = 0.0) -> None:
        """``activation(gate) * up`` of rows ``[gate | up]``: ``x [rows, 2 * width]``,
        ``out [rows, width]``.

        Args:
            limit: above 0: gpt-oss's join instead (:class:`streamllm.ops.Gate`).
        """

    def experts(self, out: Tensor, x: Tensor, router_logits: Tensor, experts: Experts) -> None:
        """The weighted sum of each row's experts (:meth:`streamllm.ops.Ops.experts`), each expert's result
        rounded to the dtype; no row's bits depend on the others.

        Args:
            out, x: ``[T, hidden]``, rows contiguous.
            router_logits: ``[T, num_experts]``, rows contiguous.
            experts: its matrices are :class:`streamllm.ops.gpu.expert_weights.ExpertWeights`.
        """

    def lora_add(self, out: Tensor, x: Tensor, slots: Tensor, stack: AdapterStack) -> None:
        """``out += b @ (a @ x)`` in the rows whose slot is not negative, by that slot's matrices; no row's
        bits depend on the others.

        Args:
            out: ``[T, n]``; ``x``: ``[T, k]``; rows contiguous.
            slots: int32 ``[T]``.
        """

    def rotary_and_cache(
        self,
        qkv: Tensor,
        cache: PagedCache,
        slot_mapping: Tensor,
        rope_rows: Tensor,
        rope_cos: Tensor,
        rope_sin: Tensor,
        shape: AttentionShape,
        rotary_dim: int,
        norms: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        """Norms (if any) and rotates each row's q in place; norms and rotates k, and writes k and v into the
        cache (float16 and float8 saturate).

        Args:
            qkv: ``[T, (H + 2 KH) * D]``: ``[q heads | k heads | v heads]``.
            slot_mapping: int64 ``[T]``: ``block * block_size + offset``; negative: nothing is written.
            rope_rows: int32 ``[T]``: rows of ``rope_cos`` and ``rope_sin``, float32 ``[*, rotary_dim / 2]``,
                which are not read where ``rotary_dim`` is 0.
            norms: float32 ``[D]`` weights of q's and of k's norm over each head, and their eps.
        """

    def paged_decode(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        context: PagedContext,
        work: DecodeWork,
        shape: AttentionShape,
    ) -> None:
        """Attention of the last row of every sequence with a ``first_item``: split over the context, then
        combined.

        Args:
            out: ``[T, H * D]``.
            q: ``[T, H * D]``, rows ``q.stride(0)`` apart.
        """

    def paged_prefill(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        context: PagedContext,
        sequences: Tensor,
        max_query_len: int,
        shape: AttentionShape,
    ) -> None:
        """Causal attention of all rows of the sequences named in ``sequences``, int32 ``[n]``, whose chunks
        are ``max_query_len`` rows at most; ``out`` and ``q`` as in :meth:`paged_decode`."""

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copies blocks in every plane: copy-on-write within a pool, swapping between two.

        Args:
            source, destination: ``[planes, num_blocks, bytes]`` uint8; they may be the same memory, and one
                may be pinned host memory.
            pairs: int32 ``[n, 2]`` (source block, destination block); no block that is written is read or
                written by another pair.
        """

    def sample(self, logits: Tensor, vocab_size: int, sampling: DeviceSampling, num_outputs: int) -> None:
        """A token from each of the leading ``num_outputs`` rows of float32 ``logits [outputs, columns]``
        (rows ``logits.stride(0)`` apart, columns beyond ``vocab_size`` are padding), as
        :mod:`streamllm.runner.sampler` defines it; of at most 2^19 ids.

        Its sums are exact, so a row's results do not depend on the batch. They are the definition's unless
        the row's random number, or the edge of top-k, top-p or min-p, lies within the rounding of exp().
        """


def copy_waves(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cuts copies, in order, into lists that may run at once: none writes what another of them touches."""
    waves: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in copies:
        if not waves or source in written or destination in written or destination in read:
            waves.append([])
            read, written = set(), set()
        waves[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return waves
