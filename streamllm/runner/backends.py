"""How a step's two phases run: as recorded native plans, or eagerly on torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from streamllm.errors import ModelLoadError
from streamllm.models.loading_progress import LoadingProgress
from streamllm.models.model_config import ModelConfig
from streamllm.models.parallel_family import Parallel, ParallelFamily
from streamllm.models.pipeline import StageCheckpoint, StageFamily, make_stage_plan
from streamllm.models.registry import Family, family_of
from streamllm.models.sharded_checkpoint import ShardedCheckpoint
from streamllm.models.sharding_plan import make_sharding_plan
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.models.transformers_config import TransformersConfig
from streamllm.models.weights import CheckpointLoader, WeightMode
from streamllm.ops import Ops
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.lora import LoraLimits
from streamllm.ops.plan_recorder import CompiledPlan, PlanBuffer
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.runner import sampler
from streamllm.runner.messages import ScheduledBatch


class Backend(Protocol):
    """Runs the forward, then logits and sampling, over buffers that were given once.

    Logits and sampling are one phase, or two where something must see the logits in between.

    With a ``queue_depth`` of 1 each phase is waited for before the next is submitted. A deeper queue takes
    the phases of several steps, computes them in order, and gives results at its marks: what a phase reads
    of the buffers, and of memory that they hold the address of, has been taken when its submission returns,
    and their results are written in :meth:`wait` alone. Where ``inputs.token_ids`` holds
    :data:`~streamllm.ops.step_inputs.UNKNOWN_TOKEN` it puts the token drawn last for the row's slot.

    Attributes:
        queue_depth: steps that may be submitted before the first of them has been waited for.
        event_fd: becomes readable when a submitted phase is done (of a queue: when a mark is reached, an
            eventfd with ``EFD_SEMAPHORE``); ``None`` if phases block until then.
    """

    queue_depth: int
    event_fd: int | None

    @property
    def ops(self) -> Ops:
        """What makes the weights."""

    def make_cache(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str,
        max_model_len: int,
    ) -> Any:
        """The KV pool, before :meth:`prepare`.

        Args:
            max_model_len: tokens of the longest sequence.

        Raises:
            ConfigError: a size or dtype that cannot be honoured.
            ModelLoadError: memory is too small.
        """

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        """Binds model and buffers, before the first step."""

    def submit_forward(self, batch: ScheduledBatch) -> None:
        """The batch's block copies, then its forward."""

    def hidden(self) -> np.ndarray:
        """Hidden states of the last forward, float32 ``[tokens, hidden_size]``; a view that the next one
        changes."""

    def submit_sample(self) -> None:
        """Logits of the output rows, and a token drawn from each."""

    def submit_logits(self) -> None:
        """Logits of the output rows alone; :meth:`logits` shows them when they are there."""

    def submit_draw(self) -> None:
        """A token drawn from each row of the logits that :meth:`submit_logits` computed."""

    def mark(self) -> None:
        """Ends what one :meth:`wait` waits for. Nothing to do without a queue: every phase is marked."""

    def wait(self) -> None:
        """Blocks until the submitted phase is done, or the oldest mark reached that has not been waited for;
        takes its signal from ``event_fd``."""

    def logits(self) -> np.ndarray:
        """The last step's logits, float32 ``[outputs, vocab_size]``; a view that the next step changes."""

    def close(self) -> None: ...


def _host_cache(
    config: ModelConfig, *, num_blocks: int, block_size: int, kv_cache_dtype: str, max_model_len: int
) -> KVCache:
    """As :meth:`Backend.make_cache`, in the host's memory."""
    return KVCache(
        layers_per_block=config.kv_layout.layers_per_block,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_cache_dtype=kv_cache_dtype,
    )


class PlanBackend:
    """Native plans: one for the forward, one for logits and sampling; two more, recorded when they are first
    needed, for logits alone and for sampling alone."""

    queue_depth = 1

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int, lora: LoraLimits | None = None):
        self._ops = CpuOps(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs, lora=lora)
        self.event_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._submitted: CompiledPlan | None = None
        self._logits_plan: CompiledPlan | None = None

    @property
    def ops(self) -> Ops:
        return self._ops

    make_cache = staticmethod(_host_cache)

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        self._inputs = inputs
        ops = self._ops
        hidden = family.forward(model, ops, inputs)
        self._forward, self._hidden = ops.compile(keep=[hidden]), hidden

        def record_logits() -> PlanBuffer:
            return family.logits(model, ops, ops.select_rows(hidden, inputs))

        def record_draw(logits: PlanBuffer) -> None:
            ops.sample(logits, sampled_vocab_size, sampling)

        self._record_logits, self._record_draw = record_logits, record_draw
        self._logits = record_logits()
        if self._logits is None:
            return  # another process has them, and draws
        record_draw(self._logits)
        self._head = ops.compile(keep=[self._logits])
        self._logits_of = (self._head, self._logits)

    def submit_forward(self, batch: ScheduledBatch) -> None:
        self._inputs.kv_cache.copy_blocks(batch.block_copies)
        self._ops.assign_adapters(self._inputs)
        self._submit(self._forward)

    def hidden(self) -> np.ndarray:
        return self._forward.read(self._hidden, self._inputs.num_tokens)

    def submit_sample(self) -> None:
        self._logits_of = (self._head, self._logits)
        self._submit(self._head)

    def submit_logits(self) -> None:
        if self._logits_plan is None:
            self._lone_logits = self._record_logits()
            self._logits_plan = self._ops.compile(keep=[self._lone_logits])
            self._record_draw(self._lone_logits)
            self._draw_plan = self._ops.compile()
        self._logits_of = (self._logits_plan, self._lone_logits)
        self._submit(self._logits_plan)

    def submit_draw(self) -> None:
        self._submit(self._draw_plan)

    def mark(self) -> None:
        pass

    def wait(self) -> None:
        if self._submitted is not None and self.event_fd is not None:
            os.eventfd_read(self.event_fd)
            submitted, self._submitted = self._submitted, None
            submitted.native.wait()

    def logits(self) -> np.ndarray:
        plan, buffer = self._logits_of
        return plan.read(buffer, self._inputs.num_outputs)

    def close(self) -> None:
        self.wait()
        if self.event_fd is not None:
            os.close(self.event_fd)
            self.event_fd = None

    def _submit(self, plan: CompiledPlan) -> None:
        inputs = self._inputs
        plan.native.submit(inputs.num_tokens, inputs.num_sequences, inputs.num_outputs, self.event_fd)
        self._submitted = plan


class TorchBackend:
    """The reference: every operation computed when it is called."""

    queue_depth = 1
    event_fd: int | None = None

    def __init__(self, lora: LoraLimits | None = None) -> None:
        from streamllm.ops.torch_ops import TorchOps

        self._ops = TorchOps(lora)

    @property
    def ops(self) -> Ops:
        return self._ops

    make_cache = staticmethod(_host_cache)

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        self._family, self._model = family, model
        self._inputs, self._sampling = inputs, sampling
        self._sampled_vocab_size = sampled_vocab_size

    def submit_forward(self, batch: ScheduledBatch) -> None:
        self._inputs.kv_cache.copy_blocks(batch.block_copies)
        self._ops.assign_adapters(self._inputs)
        self._hidden = self._family.forward(self._model, self.ops, self._inputs)

    def hidden(self) -> np.ndarray:
        return self._hidden.numpy()

    def submit_sample(self) -> None:
        self.submit_logits()
        self.submit_draw()

    def submit_logits(self) -> None:
        selected = self.ops.select_rows(self._hidden, self._inputs)
        self._logits = self._family.logits(self._model, self.ops, selected).numpy()

    def submit_draw(self) -> None:
        sampler.sample(self._logits[:, : self._sampled_vocab_size], self._sampling)

    def mark(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def logits(self) -> np.ndarray:
        return self._logits

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class LoadedModel:
    """A backend, and a model's weights as it holds them."""

    family: Family
    backend: Backend
    model: Any


def load_model(
    config: ModelConfig,
    backend: Backend,
    checkpoint: Any,
    progress: bool,
    weight_mode: WeightMode,
    parallel: Parallel | None = None,
) -> LoadedModel:
    """Reads the weights into the backend's format.

    Args:
        config, checkpoint: of the whole model.
        parallel: the rank whose part of the weights is read; ``None``: there is one rank.

    Raises:
        ConfigError: the model cannot be divided among so many ranks.
        ModelLoadError: the model is not supported, its files are broken, or memory is too small.
    """
    if isinstance(config, TransformersConfig):
        from streamllm.models import transformers_model

        num_bytes = sum(map(checkpoint.num_bytes, checkpoint.names()))
        model = transformers_model.load_model(
            config, cast(Any, backend.ops), num_bytes=num_bytes, progress=progress
        )
        return LoadedModel(cast(Family, transformers_model), backend, model)
    family = family_of(config.architecture)
    if parallel is not None and parallel.neighbours is not None:
        stage = make_stage_plan(
            config, checkpoint.num_bytes, stage=parallel.stage, num_stages=parallel.num_stages
        )
        config, checkpoint = stage.local_config(config), StageCheckpoint(checkpoint, stage)
        family = cast(Family, StageFamily(family, stage, parallel.neighbours))
    if parallel is not None and parallel.collectives is not None:
        plan = make_sharding_plan(config, checkpoint.format, rank=parallel.rank, size=parallel.size)
        checkpoint = ShardedCheckpoint(checkpoint, plan)
        if weight_mode == "packed" and parallel.rank == 0:
            checkpoint.warn_of_dequantised(backend.ops.packed_formats)
        family = cast(Family, ParallelFamily(family, plan, parallel.collectives))
    total_bytes = sum(map(checkpoint.num_bytes, expected_shapes(config).keys() & checkpoint.names()))
    loading = LoadingProgress(total_bytes, show=progress)
    loader = CheckpointLoader(checkpoint, backend.ops, progress=loading, weight_mode=weight_mode)
    try:
        model = family.load_weights(loader, config)
    except MemoryError as error:
        raise ModelLoadError("Not enough memory for the model's weights; use a smaller model.") from error
    finally:
        loading.close()
    loading.finish()
    return LoadedModel(family, backend, model)
