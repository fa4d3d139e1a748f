"""The interface of GPU kernels, implemented in CUDA C++. Attention of prompts, experts and LoRA are Triton's,
whose matrix products run on tensor cores of every generation, and so are the rarer gates."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm.ops import Activation, Experts
from streamllm.ops.gpu.cuda import attention, elementwise, sampling
from streamllm.ops.gpu.cuda.library import CudaLibrary
from streamllm.ops.gpu.kernels import (
    AdapterStack,
    AttentionShape,
    DecodeWork,
    DeviceSampling,
    PagedCache,
    PagedContext,
)


class CudaKernels:
    """The protocol :class:`streamllm.ops.gpu.kernels.GpuKernels`.

    Args:
        library: the compiled kernels.
        num_multiprocessors: of the GPU.
        device_index: its number; ``None`` for kernels that run on a CPU (their emulation).
    """

    name = "cuda"

    def __init__(self, library: CudaLibrary, num_multiprocessors: int, device_index: int | None):
        self._library = library
        self._num_multiprocessors = num_multiprocessors
        self._device_index = device_index

    @classmethod
    def on(cls, device: torch.device, library: CudaLibrary) -> CudaKernels:
        """Those for one GPU."""
        properties = torch.cuda.get_device_properties(device)
        return cls(library, properties.multi_processor_count, device.index or 0)

    @property
    def _stream(self) -> int:
        if self._device_index is None:
            return 0
        # What torch.cuda.current_stream() asks, without the object that it makes of the answer.
        stream: int = torch._C._cuda_getCurrentRawStream(self._device_index)
        return stream

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> None:
        elementwise.rms_norm(self._library, out, x, weight, eps, residual, self._stream)

    def act_and_mul(self, out: Tensor, x: Tensor, activation: Activation, limit: float = 0.0) -> None:
        if activation in elementwise.ACTIVATIONS and not limit:
            elementwise.act_and_mul(self._library, out, x, activation, self._stream)
            return
        from streamllm.ops.gpu.triton_kernels import elementwise as triton_elementwise

        triton_elementwise.act_and_mul(out, x, activation, limit)

    def experts(self, out: Tensor, x: Tensor, router_logits: Tensor, experts: Experts) -> None:
        from streamllm.ops.gpu.triton_kernels import experts as triton_experts

        triton_experts.experts(out, x, router_logits, experts)

    def lora_add(self, out: Tensor, x: Tensor, slots: Tensor, stack: AdapterStack) -> None:
        from streamllm.ops.gpu.triton_kernels import lora

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
        elementwise.rotary_and_cache(
            self._library,
            qkv,
            cache,
            slot_mapping,
            rope_rows,
            rope_cos,
            rope_sin,
            shape,
            rotary_dim,
            norms,
            self._stream,
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
        attention.paged_decode(
            self._library, out, q, cache, context, work, shape, self._num_multiprocessors, self._stream
        )

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
        from streamllm.ops.gpu.triton_kernels import attention_prefill

        attention_prefill.paged_prefill(out, q, cache, context, sequences, max_query_len, shape)

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        elementwise.copy_blocks(self._library, source, destination, pairs, self._stream)

    def sample(self, logits: Tensor, vocab_size: int, settings: DeviceSampling, num_outputs: int) -> None:
        sampling.sample(self._library, logits, vocab_size, settings, num_outputs, self._stream)
