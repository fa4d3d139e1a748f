"""The backend of a GPU: a queue of steps on one stream.

What a step needs is copied into pinned memory when it is submitted, and from there to the device by the
stream itself; tokens that a step draws stay on the device, where the next one finds them. So between steps
nothing waits for the host, which looks at a step's results when its mark has been reached.

It runs on any device that torch has: on a CPU everything is computed as it is submitted.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import Family
from streamllm.ops.gpu.decode_work import max_splits
from streamllm.ops.gpu.device_inputs import DeviceBatch, DeviceInputs, TableChange
from streamllm.ops.gpu.device_kv_cache import DeviceKVCache
from streamllm.ops.gpu.gpu_ops import GpuOps
from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.ops.gpu.staged_step import StagedStep, StepSizes
from streamllm.ops.lora import LoraLimits
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.runner.graphs import ForwardGraphs, GraphRecorder
from streamllm.runner.messages import ScheduledBatch
from streamllm.runner.stream_waiter import StreamWaiter

logger = logging.getLogger("streamllm.runner")

PARTIALS_BYTES = 2**27
"""Scratch of the decode kernel at most. Where a step's contexts have more splits than it has room for, they
are attended to in several launches."""

_RESULTS = ("token", "logprob", "rank", "top_ids", "top_logprobs")


@dataclass(slots=True)
class _Mark:
    """A place in the stream at which what was drawn before it is on the host.

    Attributes:
        step: where the results arrive; ``None``: nothing was drawn since the mark before.
        num_outputs: rows that were drawn.
        error: why the work before it failed.
    """

    step: StagedStep | None
    num_outputs: int
    error: BaseException | None = None


class GpuBackend:
    """The protocol :class:`streamllm.runner.backends.Backend` on a device.

    Args:
        kernels: everything but matrix products.
        device: where it runs.
        dtype: of activations.
        lora: room for adapters.
        recorder: what captures graphs; ``None``: everything is launched one by one.
        progress: show a bar while graphs are captured.
    """

    queue_depth = 2

    def __init__(
        self,
        kernels: GpuKernels,
        device: torch.device,
        dtype: torch.dtype,
        *,
        lora: LoraLimits | None = None,
        recorder: GraphRecorder | None = None,
        progress: bool = False,
    ):
        self._device = device
        self._ops = GpuOps(kernels, device, dtype, lora)
        self._head_ops = self._ops.with_float32_products()
        self._recorder, self._progress = recorder, progress
        # Of steps without adapters, and of those with some.
        self._graphs: dict[bool, ForwardGraphs] = {}
        # Graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.event_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._waiter = StreamWaiter(self.event_fd) if self._stream is not None else None
        self._marks: collections.deque[_Mark] = collections.deque()
        self._undelivered: StagedStep | None = None
        self._rope_version = 0

    @property
    def ops(self) -> GpuOps:
        return self._ops

    def make_cache(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str,
        max_model_len: int,
    ) -> DeviceKVCache:
        self._config, self._max_model_len = config, max_model_len
        with self._on_stream():
            return DeviceKVCache(
                self._ops.kernels,
                layers_per_block=config.kv_layout.layers_per_block,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                kv_cache_dtype=kv_cache_dtype,
                device=self._device,
            )

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        self._family, self._model = family, model
        self._inputs, self._sampling, self._sampled_vocab_size = inputs, sampling, sampled_vocab_size
        sizes = self._step_sizes(inputs)
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # the weights came by another stream
        with self._on_stream():
            self._device_inputs = DeviceInputs(
                sizes,
                inputs.kv_cache,  # type: ignore[arg-type]
                inputs.rope_cos,
                inputs.rope_sin,
                self._partials(sizes.decode_items),
                self._device,
            )
            self._ops.adapter_slots = self._device_inputs.lora_slots
            pinned = self._stream is not None
            self._ring = [StagedStep(sizes, pinned=pinned) for _ in range(self.queue_depth)]
            if self._recorder is not None:
                self._capture_graphs(self._recorder)

    def run_largest_step(self) -> None:
        """A step with all tokens and outputs that there may be, all of them padding: it takes as much memory
        as a step can. Smaller ones too, so that what is compiled for a number of rows is compiled now."""
        with self._on_stream():
            device_inputs = self._device_inputs
            self._ops.has_adapters = self._ops.lora is not None
            for tokens in _sizes_compiled_apart(len(self._inputs.token_ids)):
                batch = device_inputs.send_padding(self._ring[-1], tokens, with_prefill=True)
                hidden = self._forward(batch)
            # The first block onto itself.
            batch.kv_cache.copy_blocks(torch.zeros(1, 2, dtype=torch.int32, device=self._device))
            for count in _sizes_compiled_apart(len(self._inputs.output_rows)):
                batch.output_rows = device_inputs.output_rows(count)
                selected = self._ops.select_rows(hidden, batch)
                logits = self._family.logits(self._model, self._head_ops, selected)
                if logits is not None:  # else another process has them, and draws
                    self._ops.kernels.sample(
                        logits, self._sampled_vocab_size, device_inputs.sampling, len(logits)
                    )

    def submit_forward(self, batch: ScheduledBatch) -> None:
        inputs = self._inputs
        # Its former step has been waited for.
        self._ring.append(self._ring.pop(0))
        with self._on_stream():
            if inputs.rope_version != self._rope_version:
                self._device_inputs.send_rope(inputs.rope_cos, inputs.rope_sin)
                self._rope_version = inputs.rope_version
            self._ops.assign_adapters(inputs)
            self._hidden = self._run_forward(batch)

    def hidden(self) -> np.ndarray:
        with self._on_stream():
            return self._hidden[: self._inputs.num_tokens].float().cpu().numpy()

    def submit_sample(self) -> None:
        self.submit_logits()
        with self._on_stream():
            self._draw()

    def submit_logits(self) -> None:
        with self._on_stream():
            self._send_sampling()
            self._batch.output_rows = self._device_inputs.output_rows(self._inputs.num_outputs)
            selected = self._ops.select_rows(self._hidden, self._batch)
            self._logits = self._family.logits(self._model, self._head_ops, selected)

    def submit_draw(self) -> None:
        with self._on_stream():
            self._send_sampling()
            self._draw()

    def mark(self) -> None:
        mark = _Mark(self._undelivered, self._inputs.num_outputs)
        with self._on_stream():
            if mark.step is not None:
                wanted = self._sampling.num_logprobs[: mark.num_outputs]
                self._device_inputs.fetch_results(mark.step, with_alternatives=bool((wanted > 0).any()))
                self._undelivered = None
        self._marks.append(mark)
        if self._waiter is not None and self._stream is not None:
            self._waiter.add(self._stream, functools.partial(setattr, mark, "error"))
        elif self.event_fd is not None:
            os.eventfd_write(self.event_fd, 1)

    def wait(self) -> None:
        if not self._marks or self.event_fd is None:
            return
        os.eventfd_read(self.event_fd)
        mark = self._marks.popleft()
        if mark.error is not None:
            raise mark.error
        if mark.step is not None:
            count = mark.num_outputs
            for name in _RESULTS:
                getattr(self._sampling, name)[:count] = mark.step.results[name][:count]

    def logits(self) -> np.ndarray:
        with self._on_stream():
            return self._logits.cpu().numpy()

    def close(self) -> None:
        while self._marks:
            with contextlib.suppress(RuntimeError):
                self.wait()
        if self._waiter is not None:
            self._waiter.close()
        if self.event_fd is not None:
            os.close(self.event_fd)
            self.event_fd = None

    # -- inside --------------------------------------------------------------------------------------------

    def _run_forward(self, batch: ScheduledBatch) -> Tensor:
        inputs, device_inputs = self._inputs, self._device_inputs
        graphs = self._graphs.get(self._ops.has_adapters)
        only_decodes = inputs.num_tokens == inputs.num_sequences and device_inputs.decodes_at_once(inputs)
        size = None if graphs is None else graphs.padded(inputs.num_tokens, only_decodes=only_decodes)
        self._batch = device_inputs.send_forward(
            self._ring[-1],
            inputs,
            _table_changes(batch),
            batch.block_copies,
            padded_tokens=size or inputs.num_tokens,
            padded_sequences=size if size is not None and only_decodes else inputs.num_sequences,
        )
        if graphs is None or size is None:
            return self._forward(self._batch)
        return graphs.graph(size, only_decodes=only_decodes).replay(self._ops, self._batch)

    def _forward(self, batch: DeviceBatch) -> Tensor:
        hidden: Tensor = self._family.forward(self._model, self._ops, batch)
        return hidden

    def _send_sampling(self) -> None:
        self._device_inputs.send_sampling(
            self._ring[-1], self._inputs, self._sampling, self._sampled_vocab_size
        )

    def _draw(self) -> None:
        device_inputs = self._device_inputs
        self._ops.kernels.sample(
            self._logits, self._sampled_vocab_size, device_inputs.sampling, self._inputs.num_outputs
        )
        device_inputs.keep_drawn_tokens()
        self._undelivered = self._ring[-1]

    def _capture_graphs(self, recorder: GraphRecorder) -> None:
        began = time.monotonic()
        inputs, device_inputs = self._inputs, self._device_inputs
        kinds = (False,) if self._ops.lora is None else (False, True)
        self._graphs = {
            has_adapters: ForwardGraphs(
                recorder, max_sequences=len(inputs.slots), max_tokens=len(inputs.token_ids)
            )
            for has_adapters in kinds
        }
        batch_of = functools.partial(device_inputs.send_padding, self._ring[-1])

        def captured() -> Iterator[None]:
            for has_adapters, graphs in self._graphs.items():
                self._ops.has_adapters = has_adapters
                yield from graphs.capture(self._ops, self._forward, batch_of)

        num_graphs = sum(graphs.num_graphs for graphs in self._graphs.values())
        for _ in tqdm(
            captured(),
            total=num_graphs,
            desc="Capturing graphs",
            unit="graph",
            leave=False,
            disable=None if self._progress else True,
        ):
            pass
        logger.info("captured %d graphs in %.1f s", num_graphs, time.monotonic() - began)

    def _step_sizes(self, inputs: StepInputs) -> StepSizes:
        layout, config = self._config.kv_layout, self._config
        item_bytes = 4 * config.num_heads * (config.head_dim + 2)
        longest = max_splits(self._max_model_len)
        return StepSizes(
            tokens=len(inputs.token_ids),
            sequences=len(inputs.slots),
            outputs=len(inputs.output_rows),
            slots=len(inputs.slots),
            windows=tuple(window or 0 for window in layout.windows),
            blocks=-(-self._max_model_len // inputs.kv_cache.block_size) + 1,
            decode_items=max(min(len(inputs.slots) * longest, PARTIALS_BYTES // item_bytes), longest),
        )

    def _partials(self, num_items: int) -> Tensor:
        config = self._config
        shape = (num_items, config.num_heads, config.head_dim + 2)
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work on the backend's own stream, without a record for gradients."""
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream, torch.no_grad():
            yield


def _sizes_compiled_apart(largest: int) -> list[int]:
    """Numbers of rows, ascending to ``largest``, among which are all kinds that kernels may be compiled apart
    for: one, some, multiples of sixteen, and tiles of any power of two."""
    sizes = [1, 2]
    while sizes[-1] < largest:
        sizes.append(max(2 * sizes[-1], 16))
    return [size for size in sizes if size < largest] + [largest]


def _table_changes(batch: ScheduledBatch) -> Iterator[TableChange]:
    """What a step says about block tables, in the order in which it holds."""
    for sequence in batch.new_sequences:
        for group, block_ids in enumerate(sequence.block_ids):
            yield group, sequence.slot, 0, block_ids
    for row in batch.rows:
        for group, first, block_ids in row.block_updates:
            yield group, row.slot, first, block_ids
