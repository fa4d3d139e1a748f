"""The interface of GPU kernels, implemented in Triton."""

from __future__ import annotations

from streamllm.ops import Activation, Experts
from streamllm.ops.gpu.kernels import (
    AdapterStack,
    AttentionShape,
    DecodeWork,
    DeviceSampling,
    PagedCache,
    PagedContext,
    Tensor,
)
from streamllm.ops.gpu.triton_kernels import (
    attention_decode,
    attention_prefill,
    copy_blocks,
    elementwise,
    lora,
    rotary_cache,
)
from streamllm.ops.gpu.triton_kernels import experts as expert_kernels
from streamllm.ops.gpu.triton_kernels import sampling as sampling_kernels


class TritonKernels:
    """The protocol :class:`streamllm.ops.gpu.kernels.GpuKernels`. A kernel is compiled at its first call for
    a shape (seconds; kept in Triton's cache), which must not happen while a graph is captured."""

    name = "triton"

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> None:
        elementwise.rms_norm(out, x, weight, eps, residual)

    def act_and_mul(self, out: Tensor, x: Tensor, activation: Activation, limit: float = 0.0) -> None:
        elementwise.act_and_mul(out, x, activation, limit)

    def experts(self, out: Tensor, x: Tensor, router_logits: Tensor, experts: Experts) -> None:
        expert_kernels.experts(out, x, router_logits, experts)

    def lora_add(self, out: Tensor, x: Tensor, slots: Tensor, stack: AdapterStack) -> None:
        lora.lora_add(out, x, slots, stack)

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
        rotary_cache.rotary_and_cache(
            qkv, cache, slot_mapping, rope_rows, rope_cos, rope_sin, shape, rotary_dim, norms
        )

    def paged_decode(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        context: PagedContext,
        work: DecodeWork,
        shape: AttentionShape,
    ) -> None:
        attention_decode.paged_decode(out, q, cache, context, work, shape)

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
        attention_prefill.paged_prefill(out, q, cache, context, sequences, max_query_len, shape)

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        copy_blocks.copy_blocks(source, destination, pairs)

    def sample(self, logits: Tensor, vocab_size: int, sampling: DeviceSampling, num_outputs: int) -> None:
        sampling_kernels.sample(logits, vocab_size, sampling, num_outputs)
