"""The model runner: a scheduled batch in, token ids out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from streamllm.errors import ConfigError, InvalidRequestError, ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.lora_adapter import read_adapter
from streamllm.models.model_config import ModelConfig
from streamllm.models.parallel_family import Parallel
from streamllm.models.rope import RopeTable
from streamllm.models.weights import WeightMode, weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import kv_bytes_per_block
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.step_inputs import TOKEN_NOTHING_ALLOWED, SamplingBuffers, StepInputs
from streamllm.runner.backends import Backend, LoadedModel, PlanBackend, TorchBackend, load_model
from streamllm.runner.batch_state import BatchState
from streamllm.runner.messages import PromptLogprobChunk, ScheduledBatch, StepOutput, TokenLogprobs
from streamllm.runner.pooler import MANY_VALUES, Pooler
from streamllm.runner.processor_pass import ProcessorPass
from streamllm.runner.prompt_rows import SLICE_ROWS, PromptRowsPass

PythonPhase = Callable[[], None]
"""A phase that is computed in Python, on a thread of its own."""

MAX_HEAD_DIM = 256
NOT_FINITE = "the model produced logits that are not finite"


@dataclass(slots=True, eq=False)
class StartedStep:
    """A step whose forward has been submitted.

    Attributes:
        exclusive: nothing may be submitted behind it until it has returned: the host has work between its
            phases, or there is no queue.
        num_logprobs: per output row the likeliest tokens to report, -1 for no logprobs.
        masked_rows: output rows with a grammar's mask.
        errors: output row -> why its logits processors failed.
        prompt_logprobs, pooled: as in :class:`~streamllm.runner.messages.StepOutput`.
    """

    batch: ScheduledBatch
    exclusive: bool
    num_logprobs: list[int] = field(default_factory=list)
    masked_rows: Collection[int] = ()
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobChunk | str] = field(default_factory=list)
    pooled: list[np.ndarray | str | None] = field(default_factory=list)


class ModelRunner:
    """Runs one model's steps.

    A step is a sequence of phases: :meth:`start` submits the forward, :meth:`sample` gives the others one by
    one, and each must be done (:meth:`wait`) before the next begins; then :meth:`result`. :meth:`step` does
    it all.

    With a queue (``queue_depth`` above 1) a step that is not ``exclusive`` has a single phase, forward and
    draw in one: :meth:`start` and the first of :meth:`sample` follow one another at once, and so may another
    step, before they are waited for. :meth:`wait` and :meth:`result` take steps in order.

    Args:
        block_size: positions a block, a multiple of 16.
        num_blocks: blocks of the KV cache.
        max_num_batched_tokens: tokens a step at most.
        max_num_seqs: sequences in the batch at most; slots are ``0..max_num_seqs - 1``.
        kv_cache_dtype: ``"float32"`` or ``"float16"``.
        max_model_len: positions at most; sizes the rotary table.
        threads: native workers.
        backend: ``"cpu"`` (native plans) or ``"torch"`` (eager reference).
        progress: show a bar on a terminal while weights load.
        sampled_vocab_size: sample ids below this only (a padded vocabulary has more logits than tokens).
        weight_mode: ``"packed"`` keeps matrices as the file holds them where there are kernels for it;
            ``"float32"`` dequantises them.
        lora: room for adapters.
        loaded: a backend that has the weights already; then ``threads``, ``backend``, ``weight_mode`` and
            ``lora`` mean nothing.
        whole_config: of the whole model, where ``model_config`` is of this rank's part; ``None``: the same.
        parallel: the rank whose part of the weights is loaded; ``None``: all of them.

    Attributes:
        num_blocks: blocks of the KV cache.
        max_model_len: positions at most.
        num_groups: KV groups, each with a block table a sequence.
        weight_bytes, kv_cache_bytes: memory that the weights and the KV cache take.
        vocab_size: logits a row.
        queue_depth: steps that may be in flight at once.
        event_fd: becomes readable when a submitted phase is done; ``None``: phases run as they are called.
        in_flight: phases that have been submitted and not been waited for.

    Raises:
        ConfigError: a size or dtype that cannot be honoured.
        ModelLoadError: the model is not supported, its files are broken, or memory is too small.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        kv_cache_dtype: str,
        max_model_len: int,
        threads: int,
        backend: str = "cpu",
        progress: bool = True,
        sampled_vocab_size: int | None = None,
        weight_mode: WeightMode = "float32",
        lora: LoraLimits | None = None,
        loaded: LoadedModel | None = None,
        whole_config: ModelConfig | None = None,
        parallel: Parallel | None = None,
    ):
        layout = model_config.kv_layout
        check_supported(model_config)
        self._model_config = model_config
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.num_groups = layout.num_groups
        self.vocab_size = model_config.vocab_size
        self.in_flight = 0
        self._newest: StartedStep
        self._pooler = Pooler()
        self._max_num_batched_tokens = max_num_batched_tokens
        max_outputs = max(max_num_seqs, SLICE_ROWS)
        self._rope = RopeTable(
            model_config.ropes, max_model_len, max_dynamic_rows=max(2 * max_num_batched_tokens, 4096)
        )
        if loaded is None:
            made = _make_backend(backend, model_config, threads, max_num_batched_tokens, max_outputs, lora)
            whole_config = whole_config or model_config
            loaded = load_model(whole_config, made, checkpoint, progress, weight_mode, parallel)
        self._backend = loaded.backend
        kv_cache = self._backend.make_cache(
            model_config,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
        )
        self.kv_cache_bytes: int = kv_cache.num_bytes
        self._inputs = StepInputs.allocate(
            max_num_batched_tokens,
            max_num_seqs,
            self._rope.cos,
            self._rope.sin,
            kv_cache,
            num_groups=layout.num_groups,
            max_outputs=max_outputs,
        )
        self._sampling = SamplingBuffers.allocate(max_outputs)
        self.queue_depth = self._backend.queue_depth
        self._state = BatchState(max_num_seqs, layout.num_groups, queued=self.queue_depth > 1)
        self.weight_bytes: int = self._backend.ops.weight_bytes
        self._sampled_vocab_size = sampled_vocab_size or model_config.vocab_size
        self._backend.prepare(
            loaded.family, loaded.model, self._inputs, self._sampling, self._sampled_vocab_size
        )

    @staticmethod
    def kv_bytes_per_block(model_config: ModelConfig, block_size: int, kv_cache_dtype: str) -> int:
        """Bytes that a block takes over all the layers that share it."""
        return kv_bytes_per_block(
            model_config.kv_layout.layers_per_block,
            model_config.num_kv_heads,
            model_config.head_dim,
            block_size,
            kv_cache_dtype,
        )

    @staticmethod
    def expected_weight_bytes(checkpoint: Checkpoint, weight_mode: WeightMode) -> int:
        """Memory that the weights will take."""
        return weight_bytes(checkpoint, CpuOps.packed_formats, weight_mode)

    @property
    def event_fd(self) -> int | None:
        return self._backend.event_fd

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        """Reads the adapter in a folder, checks it against the model, and makes it ready for a slot; on any
        thread, while steps run too.

        Raises:
            ModelLoadError: as :func:`streamllm.models.lora_adapter.read_adapter` says.
        """
        lora = self._backend.ops.lora
        if lora is None:
            raise ConfigError("adapters need --enable-lora.")
        adapter = read_adapter(name, Path(path), self._model_config, max_rank=lora.max_rank)
        self.prepare_adapter(adapter)
        return adapter

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """Makes an adapter that was read elsewhere ready for a slot; on any thread, while steps run too."""
        self._backend.ops.prepare_adapter(adapter)

    def start(self, batch: ScheduledBatch) -> StartedStep:
        """Takes the batch's news into the state and submits the forward.

        Raises:
            RuntimeError: so many phases have not been waited for that there is no place in the queue.
            ValueError: the batch contradicts the state or exceeds the limits; nothing was submitted.
        """
        if self.in_flight >= self.queue_depth:
            raise RuntimeError("a phase is still running; wait for it first")
        self._state.update(batch)
        self._pooler.forget(batch.finished_slots)
        # Last: should one fail, the state has heard of who came and went all the same.
        for load in batch.lora_loads:
            self._backend.ops.load_adapter(load.slot, load.adapter)
        if batch.num_tokens > self._max_num_batched_tokens:
            raise ValueError(
                f"the batch has {batch.num_tokens} tokens, more than {self._max_num_batched_tokens}"
            )
        self._state.fill(batch, self._inputs)
        if self._rope.is_dynamic:
            self._fill_dynamic_rope(batch)
        step = StartedStep(batch, exclusive=self.queue_depth == 1 or self._needs_host(batch))
        if batch.rows:
            self._backend.submit_forward(batch)
            if step.exclusive:
                self._mark()
        self._newest = step
        return step

    def _needs_host(self, batch: ScheduledBatch) -> bool:
        """Whether Python has work between a step's phases."""
        return bool(batch.prompt_rows or batch.pool_rows or self._state.processor_calls(batch))

    def sample(
        self, masks: Mapping[int, np.ndarray] | None = None, step: StartedStep | None = None
    ) -> Iterator[PythonPhase | None]:
        """The phases after the forward: pooling, a slice of prompt rows each, then the output rows.

        Args:
            masks: output row -> what its grammar allows, uint32 ``[ceil(vocab_size / 32)]``, bit ``id % 32``
                of word ``id // 32``; they must stay as they are until the last phase is done.
            step: the one that was started last, which also is the default.

        Yields:
            ``None`` when a native phase has been submitted, which must be waited for; or Python work to call,
            off the event loop. Then ask for the next phase.
        """
        step = step or self._newest
        if self.in_flight and step.exclusive:
            raise RuntimeError("a phase is still running; wait for it first")
        return self._phases(step, masks or {})

    def _phases(self, step: StartedStep, masks: Mapping[int, np.ndarray]) -> Iterator[PythonPhase | None]:
        batch, inputs, sampling = step.batch, self._inputs, self._sampling
        if batch.pool_rows:
            hidden = self._backend.hidden()
            if hidden.size < MANY_VALUES:
                self._pool(step, hidden)
            else:
                yield functools.partial(self._pool, step, hidden)
        if batch.prompt_rows:
            prompt_rows = PromptRowsPass(batch, inputs)
            for part in prompt_rows.slices():
                prompt_rows.fill(part, inputs, sampling)
                self._submit_sample()
                yield None
                prompt_rows.gather(part, sampling)
            step.prompt_logprobs = prompt_rows.chunks(self._sampled_vocab_size, NOT_FINITE)
        self._state.fill_outputs(batch, inputs, sampling)
        step.num_logprobs = sampling.num_logprobs[: inputs.num_outputs].tolist()
        for row, mask in masks.items():
            sampling.grammar_mask[row] = mask.ctypes.data
        step.masked_rows = masks.keys()
        if calls := self._state.processor_calls(batch):
            yield from self._process_logits(step, ProcessorPass(calls))
        elif inputs.num_outputs:
            self._submit_sample()
            yield None
        elif not step.exclusive:
            self._mark()
            yield None

    def _pool(self, step: StartedStep, hidden: np.ndarray) -> None:
        step.pooled = self._pooler.pool(step.batch, self._inputs.query_start, hidden)

    def _process_logits(self, step: StartedStep, processing: ProcessorPass) -> Iterator[PythonPhase | None]:
        """Logits, the processors of those rows that have any, then the draw of all rows."""
        self._backend.submit_logits()
        self._mark()
        yield None
        logits = self._backend.logits()[:, : self._sampled_vocab_size]
        yield functools.partial(processing.run, logits, self._sampling)
        step.errors = processing.errors
        self._backend.submit_draw()
        self._mark()
        yield None

    def _submit_sample(self) -> None:
        self._backend.submit_sample()
        self._mark()

    def _mark(self) -> None:
        self._backend.mark()
        self.in_flight += 1

    def wait(self) -> None:
        """Blocks until the submitted phase, of several the oldest, is done."""
        if self.in_flight:
            self.in_flight -= 1
            self._backend.wait()

    def finish(self, masks: Mapping[int, np.ndarray] | None = None) -> StepOutput:
        """All phases after the forward, blocking; ``masks`` as in :meth:`sample`."""
        for work in self.sample(masks):
            if work is None:
                self.wait()
            else:
                work()
        return self.result()

    def step(self, batch: ScheduledBatch) -> StepOutput:
        """A whole step, blocking."""
        self.start(batch)
        self.wait()
        return self.finish()

    def result(self, step: StartedStep | None = None) -> StepOutput:
        """The tokens of a step, by default the one started last, whose last phase was waited for last."""
        step = step or self._newest
        wanted = step.num_logprobs
        count = len(wanted)
        tokens = self._sampling.token[:count].tolist()
        errors: list[str | InvalidRequestError | None] = [None] * count
        for row, token in enumerate(tokens):
            if token < 0 or row in step.errors:
                errors[row] = step.errors.get(row) or self._error(step, row, token)
        return StepOutput(
            token_ids=[[token] if error is None else [] for token, error in zip(tokens, errors, strict=True)],
            logprobs=[
                [self._logprobs(row, wanted[row])] if wanted[row] >= 0 and error is None else None
                for row, error in enumerate(errors)
            ],
            errors=errors,
            prompt_logprobs=step.prompt_logprobs,
            pooled=step.pooled,
        )

    def _error(self, step: StartedStep, row: int, token: int) -> str | InvalidRequestError:
        """Why a row has no token."""
        if token != TOKEN_NOTHING_ALLOWED:
            return NOT_FINITE
        rules = self._state.rules(step.batch.output_rows[row].sequence_id)
        bans = [] if rules is None else rules.describe_bans()
        if row in step.masked_rows:
            bans.append("structured_outputs")
        return InvalidRequestError(
            f"no token is allowed: {', '.join(bans)} forbid all of them.", param=bans[0]
        )

    def logits(self) -> np.ndarray:
        """Logits of the step's output rows, float32 ``[outputs, vocab_size]``, after sampling is done."""
        return self._backend.logits().copy()

    def close(self) -> None:
        """Waits for what runs and gives the event fd back. The runner is not used after."""
        while self.in_flight:
            with contextlib.suppress(Exception):  # of steps whose output nobody wants
                self.wait()
        self._backend.close()

    def _fill_dynamic_rope(self, batch: ScheduledBatch) -> None:
        """Turns positions into rows of angles that depend on the sequence's length too."""
        positions = self._inputs.rope_rows[: self._inputs.num_tokens]
        lengths = np.maximum(self._state.angle_lengths(batch), positions + 1)
        positions[:] = self._rope.rows(positions, lengths)
        self._inputs.rope_version = self._rope.version

    def _logprobs(self, row: int, count: int) -> TokenLogprobs:
        sampling, count = self._sampling, min(count, self._sampled_vocab_size)
        return TokenLogprobs(
            logprob=float(sampling.logprob[row]),
            rank=int(sampling.rank[row]),
            top_ids=sampling.top_ids[row, :count].tolist(),
            top_logprobs=sampling.top_logprobs[row, :count].tolist(),
        )


def _make_backend(
    name: str,
    config: ModelConfig,
    threads: int,
    max_tokens: int,
    max_outputs: int,
    lora: LoraLimits | None,
) -> Backend:
    if name == "cpu" and config.through_transformers:
        from streamllm.runner.transformers_backend import TransformersBackend

        return TransformersBackend(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
    if name == "cpu":
        return PlanBackend(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs, lora=lora)
    if name == "torch":
        return TorchBackend(lora)
    raise ConfigError(f"backend must be cpu or torch, got {name!r}.")


def check_supported(config: ModelConfig) -> None:
    """
    Raises:
        ModelLoadError: no backend has operations for such a model.
    """
    if config.head_dim % 8 or not 0 < config.head_dim <= MAX_HEAD_DIM:
        raise ModelLoadError(
            f"head_dim {config.head_dim} is not supported; it must be a multiple of 8 up to {MAX_HEAD_DIM}."
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}."
        )
    for rope in config.ropes:
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= config.head_dim:
            raise ModelLoadError(
                f"rotary_dim {rope.rotary_dim} is not supported; it must be even and at most head_dim "
                f"{config.head_dim}."
            )
