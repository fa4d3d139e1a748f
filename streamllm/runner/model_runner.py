"""The model runner: a scheduled batch in, token ids out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from streamllm.errors import ConfigError, InvalidRequestError, ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.kv_layout import kv_layout
from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import family_of
from streamllm.models.rope import RopeTable
from streamllm.models.weights import WeightMode, weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import KVCache, kv_bytes_per_block
from streamllm.ops.step_inputs import TOKEN_NOTHING_ALLOWED, SamplingBuffers, StepInputs
from streamllm.runner.backends import Backend, PlanBackend, TorchBackend, load_model
from streamllm.runner.batch_state import BatchState
from streamllm.runner.messages import PromptLogprobChunk, ScheduledBatch, StepOutput, TokenLogprobs
from streamllm.runner.pooler import MANY_VALUES, Pooler
from streamllm.runner.processor_pass import ProcessorPass
from streamllm.runner.prompt_rows import SLICE_ROWS, PromptRowsPass

PythonPhase = Callable[[], None]
"""A phase that is computed in Python, on a thread of its own."""

MAX_HEAD_DIM = 256
NOT_FINITE = "the model produced logits that are not finite"


class ModelRunner:
    """Runs one model's steps, one at a time.

    A step is a sequence of phases: :meth:`start` submits the forward, :meth:`sample` gives the others one by
    one, and each must be done (:meth:`wait`) before the next begins; then :meth:`result`. :meth:`step` does
    it all.

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

    Attributes:
        num_blocks: blocks of the KV cache.
        num_groups: KV groups, each with a block table a sequence.
        weight_bytes: memory that the weights take.
        vocab_size: logits a row.
        event_fd: becomes readable when the submitted phase is done; ``None``: phases run as they are called.
        in_flight: a phase has been submitted and not been waited for.

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
    ):
        family = family_of(model_config.architecture)
        layout = kv_layout(model_config.layer_windows)
        _check_supported(model_config)
        self.num_blocks = num_blocks
        self.num_groups = layout.num_groups
        self.vocab_size = model_config.vocab_size
        self.in_flight = False
        self._prompt_logprobs: list[PromptLogprobChunk | str] = []
        self._pooler = Pooler()
        self._pooled: list[np.ndarray | str | None] = []
        self._errors: dict[int, str] = {}
        self._max_num_batched_tokens = max_num_batched_tokens
        max_outputs = max(max_num_seqs, SLICE_ROWS)
        self._rope = RopeTable(
            model_config.rope, max_model_len, max_dynamic_rows=max(2 * max_num_batched_tokens, 4096)
        )
        self._cache = KVCache(
            layers_per_block=layout.layers_per_block,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            kv_cache_dtype=kv_cache_dtype,
        )
        self._inputs = StepInputs.allocate(
            max_num_batched_tokens,
            max_num_seqs,
            self._rope.cos,
            self._rope.sin,
            self._cache,
            num_groups=layout.num_groups,
            max_outputs=max_outputs,
        )
        self._sampling = SamplingBuffers.allocate(max_outputs)
        self._state = BatchState(max_num_seqs, layout.num_groups)
        self._backend = _make_backend(backend, threads, max_num_batched_tokens, max_outputs)
        try:
            model = load_model(family, self._backend, checkpoint, model_config, progress, weight_mode)
        except MemoryError as error:
            raise ModelLoadError("Not enough memory for the model's weights; use a smaller model.") from error
        self.weight_bytes: int = self._backend.ops.weight_bytes
        self._sampled_vocab_size = sampled_vocab_size or model_config.vocab_size
        self._backend.prepare(family, model, self._inputs, self._sampling, self._sampled_vocab_size)

    @staticmethod
    def kv_bytes_per_block(model_config: ModelConfig, block_size: int, kv_cache_dtype: str) -> int:
        """Bytes that a block takes over all the layers that share it."""
        return kv_bytes_per_block(
            kv_layout(model_config.layer_windows).layers_per_block,
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

    def start(self, batch: ScheduledBatch) -> None:
        """Takes the batch's news into the state and submits the forward.

        Raises:
            RuntimeError: the phase before has not been waited for.
            ValueError: the batch contradicts the state or exceeds the limits; nothing was submitted.
        """
        if self.in_flight:
            raise RuntimeError("a phase is still running; wait for it first")
        self._batch = batch
        self._state.update(batch)
        self._pooler.forget(batch.finished_slots)
        if batch.num_tokens > self._max_num_batched_tokens:
            raise ValueError(
                f"the batch has {batch.num_tokens} tokens, more than {self._max_num_batched_tokens}"
            )
        self._cache.copy_blocks(batch.block_copies)
        self._state.fill(batch, self._inputs)
        if self._rope.is_dynamic:
            self._fill_dynamic_rope(batch)
        if batch.rows:
            self._backend.submit_forward()
            self.in_flight = True

    def sample(self, masks: Mapping[int, np.ndarray] | None = None) -> Iterator[PythonPhase | None]:
        """The phases after the forward: pooling, a slice of prompt rows each, then the output rows.

        Args:
            masks: output row -> what its grammar allows, uint32 ``[ceil(vocab_size / 32)]``, bit ``id % 32``
                of word ``id // 32``; they must stay as they are until the last phase is done.

        Yields:
            ``None`` when a native phase has been submitted, which must be waited for; or Python work to call,
            off the event loop. Then ask for the next phase.
        """
        if self.in_flight:
            raise RuntimeError("a phase is still running; wait for it first")
        return self._phases(self._batch, masks or {})

    def _phases(self, batch: ScheduledBatch, masks: Mapping[int, np.ndarray]) -> Iterator[PythonPhase | None]:
        inputs, sampling = self._inputs, self._sampling
        self._prompt_logprobs, self._pooled = [], []
        if batch.pool_rows:
            hidden = self._backend.hidden()
            if hidden.size < MANY_VALUES:
                self._pool(batch, hidden)
            else:
                yield functools.partial(self._pool, batch, hidden)
        if batch.prompt_rows:
            prompt_rows = PromptRowsPass(batch, inputs)
            for part in prompt_rows.slices():
                prompt_rows.fill(part, inputs, sampling)
                self._submit_sample()
                yield None
                prompt_rows.gather(part, sampling)
            self._prompt_logprobs = prompt_rows.chunks(self._sampled_vocab_size, NOT_FINITE)
        self._state.fill_outputs(batch, inputs, sampling)
        for row, mask in masks.items():
            sampling.grammar_mask[row] = mask.ctypes.data
        self._errors = {}
        if calls := self._state.processor_calls(batch):
            yield from self._process_logits(ProcessorPass(calls))
        elif inputs.num_outputs:
            self._submit_sample()
            yield None

    def _pool(self, batch: ScheduledBatch, hidden: np.ndarray) -> None:
        self._pooled = self._pooler.pool(batch, self._inputs.query_start, hidden)

    def _process_logits(self, processing: ProcessorPass) -> Iterator[PythonPhase | None]:
        """Logits, the processors of those rows that have any, then the draw of all rows."""
        self._backend.submit_logits()
        self.in_flight = True
        yield None
        logits = self._backend.logits()[:, : self._sampled_vocab_size]
        yield functools.partial(processing.run, logits, self._sampling)
        self._errors = processing.errors
        self._backend.submit_draw()
        self.in_flight = True
        yield None

    def _submit_sample(self) -> None:
        self._backend.submit_sample()
        self.in_flight = True

    def wait(self) -> None:
        """Blocks until the submitted phase is done."""
        if self.in_flight:
            self.in_flight = False
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

    def result(self) -> StepOutput:
        """The step's tokens, after its last phase."""
        count, sampling = self._inputs.num_outputs, self._sampling
        tokens = sampling.token[:count].tolist()
        errors: list[str | InvalidRequestError | None] = [None] * count
        for row, token in enumerate(tokens):
            if token < 0 or row in self._errors:
                errors[row] = self._errors.get(row) or self._error(row, token)
        wanted = sampling.num_logprobs[:count].tolist()
        return StepOutput(
            token_ids=[[token] if error is None else [] for token, error in zip(tokens, errors, strict=True)],
            logprobs=[
                [self._logprobs(row, wanted[row])] if wanted[row] >= 0 and error is None else None
                for row, error in enumerate(errors)
            ],
            errors=errors,
            prompt_logprobs=self._prompt_logprobs,
            pooled=self._pooled,
        )

    def _error(self, row: int, token: int) -> str | InvalidRequestError:
        """Why a row has no token."""
        if token != TOKEN_NOTHING_ALLOWED:
            return NOT_FINITE
        rules = self._state.rules(self._batch.output_rows[row].sequence_id)
        bans = [] if rules is None else rules.describe_bans()
        if self._sampling.grammar_mask[row]:
            bans.append("structured_outputs")
        return InvalidRequestError(
            f"no token is allowed: {', '.join(bans)} forbid all of them.", param=bans[0]
        )

    def logits(self) -> np.ndarray:
        """Logits of the step's output rows, float32 ``[outputs, vocab_size]``, after sampling is done."""
        return self._backend.logits().copy()

    def close(self) -> None:
        """Waits for what runs and gives the event fd back. The runner is not used after."""
        self.wait()
        self._backend.close()

    def _fill_dynamic_rope(self, batch: ScheduledBatch) -> None:
        """Turns positions into rows of angles that depend on the sequence's length too."""
        positions = self._inputs.rope_rows[: self._inputs.num_tokens]
        lengths = np.maximum(self._state.prompt_lengths(batch), positions + 1)
        positions[:] = self._rope.rows(positions, lengths)

    def _logprobs(self, row: int, count: int) -> TokenLogprobs:
        sampling, count = self._sampling, min(count, self._sampled_vocab_size)
        return TokenLogprobs(
            logprob=float(sampling.logprob[row]),
            rank=int(sampling.rank[row]),
            top_ids=sampling.top_ids[row, :count].tolist(),
            top_logprobs=sampling.top_logprobs[row, :count].tolist(),
        )


def _make_backend(name: str, threads: int, max_tokens: int, max_outputs: int) -> Backend:
    if name == "cpu":
        return PlanBackend(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
    if name == "torch":
        return TorchBackend()
    raise ConfigError(f"backend must be cpu or torch, got {name!r}.")


def _check_supported(config: ModelConfig) -> None:
    if config.head_dim % 8 or not 0 < config.head_dim <= MAX_HEAD_DIM:
        raise ModelLoadError(
            f"head_dim {config.head_dim} is not supported; it must be a multiple of 8 up to {MAX_HEAD_DIM}."
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}."
        )
    if config.rope.rotary_dim % 2 or not 0 < config.rope.rotary_dim <= config.head_dim:
        raise ModelLoadError(
            f"rotary_dim {config.rope.rotary_dim} is not supported; it must be even and at most head_dim "
            f"{config.head_dim}."
        )
