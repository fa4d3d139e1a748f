"""The engine: one task on the event loop that schedules, runs and delivers step after step.

While the forward of step *n + 1* runs in native threads, the loop delivers step *n*: detokenises, looks for
stop strings, feeds streams. A stop string found there costs at most one wasted token, which is dropped.
Scheduler, block pool and request state are touched on the loop's thread alone, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceType
from typing import TYPE_CHECKING, Any

from streamllm.config import EngineConfig
from streamllm.engine.admission import Admission
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import BlockTable
from streamllm.engine.output_processor import OutputProcessor, SequenceText
from streamllm.engine.request import Request, Sequence, SequenceUpdate
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.stats import EngineStats, RequestRecord
from streamllm.engine.stream import RequestStream
from streamllm.errors import EngineDeadError, InvalidRequestError
from streamllm.outputs import RequestMetrics, RequestOutput
from streamllm.sampling_params import SamplingParams
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.messages import check_template_kwargs, normalise_messages
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from streamllm.models.model_config import ModelConfig
    from streamllm.runner.executor import Executor

logger = logging.getLogger("streamllm.engine")

LONG_TEXT = 4_000
"""Characters from which tokenising and rendering leave the event loop (a few milliseconds of work)."""

MAX_FAILED_STEPS = 3
"""Steps that may raise one after the other before the engine gives up."""


class AsyncEngine:
    """Serves requests of one model.

    Made by :meth:`from_config`; :meth:`start` must be called on the event loop that will use it. Every
    method is called on that loop's thread.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_name: str,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        executor: Executor,
        num_blocks: int,
        max_model_len: int,
        default_sampling: dict[str, Any],
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.max_model_len = max_model_len
        self.default_sampling = default_sampling
        self.dead_error: str | None = None
        self._executor = executor
        self._admission = Admission(tokenizer, max_model_len)
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) | frozenset(model_config.eos_token_ids)
        self._pool = BlockPool(num_blocks, config.block_size)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._outputs = OutputProcessor(tokenizer, self._scheduler.finish, self._on_finished)
        self._requests: dict[str, Request] = {}
        self._observers: list[Callable[[RequestRecord], None]] = []
        self._sequence_ids = itertools.count()
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Fetch, check and load everything (blocking).

        Raises:
            ConfigError: a flag cannot be honoured with this model on this machine.
            ModelLoadError: the model cannot be found, read or run.
        """
        from streamllm.engine.loader import load_engine

        return load_engine(config)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start serving on the running loop. Harmless when started already."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamllm-engine")

    async def stop(self) -> None:
        """Stop serving: live requests fail with EngineDeadError; the executor is closed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.dead_error is None:
            self._die("the engine was stopped")
        self._executor.close()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is running and can serve."""
        return self.dead_error is None and self._task is not None and not self._task.done()

    # -- requests ------------------------------------------------------------------------------------------

    async def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """Queue a request and return its stream.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            request_id: unique among live requests; made up if left out.
            add_special_tokens: whether a text gets the tokenizer's BOS.
            arrival_time: ``time.monotonic()`` of the request's arrival, for its metrics.

        Raises:
            InvalidRequestError: it can never be served as written; nothing was queued.
            EngineDeadError: the engine has stopped.
        """
        streams = await self.add_requests(
            [prompt],
            [params],
            request_ids=[request_id] if request_id else None,
            add_special_tokens=add_special_tokens,
            arrival_time=arrival_time,
        )
        return streams[0]

    async def add_requests(
        self,
        prompts: SequenceType[str | list[int]],
        params: SequenceType[SamplingParams],
        *,
        request_ids: SequenceType[str] | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> list[RequestStream]:
        """Queue several requests, or none of them; see :meth:`add_request`.

        Raises:
            InvalidRequestError: one of them cannot be served; among several, ``param`` is ``prompt[index]``.
            EngineDeadError: the engine has stopped.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._check_alive()
        token_ids = []
        for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            try:
                self._admission.check_params(prompt_params)
                if isinstance(prompt, str):
                    prompt = await self._encode(prompt, add_special_tokens=add_special_tokens)
                token_ids.append(self._admission.check_token_ids(prompt))
            except InvalidRequestError as error:
                raise error if len(prompts) == 1 else error.at_index("prompt", index) from None
        self._check_alive()
        request_ids = request_ids or [uuid.uuid4().hex for _ in prompts]
        for request_id in request_ids:
            if request_id in self._requests:
                raise InvalidRequestError(
                    f"a request with the id {request_id!r} is running.", param="request_id"
                )
        streams = []
        for request_id, prompt, ids, prompt_params in zip(
            request_ids, prompts, token_ids, params, strict=True
        ):
            text = prompt if isinstance(prompt, str) else None
            request = self._make_request(request_id, text, ids, prompt_params, arrival_time)
            self._requests[request_id] = request
            for sequence in request.sequences:
                self._scheduler.add(sequence)
            streams.append(request.stream)
        self._work.set()
        return streams

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Queue a request and iterate over its outputs; leaving the iteration early aborts it."""
        stream = await self.add_request(prompt, params, request_id=request_id)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    def abort(self, request_id: str) -> None:
        """End a request now, queued or running; its blocks are free by the next step. Unknown ids are
        ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if not sequence.finished:
                self._scheduler.finish(sequence, "abort")
                self._outputs.abort(sequence)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template; exactly one BOS if it has one.

        Raises:
            InvalidRequestError: no template, a template's own refusal, malformed messages, or too long.
        """
        template = self.chat_template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )

        def render() -> list[int]:
            text = template.render(
                normalise_messages(messages, template),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **check_template_kwargs(chat_template_kwargs),
            )
            self._admission.check_text(text)
            return self.tokenizer.encode_chat(text)

        size = sum(len(str(message)) for message in messages)
        return render() if size < LONG_TEXT else await asyncio.to_thread(render)

    # -- numbers -------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        counters = self._outputs.counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_used_blocks=self._pool.num_used,
            num_blocks=self._pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            finished=dict(counters.finished),
            max_model_len=self.max_model_len,
            block_size=self._pool.block_size,
            num_steps=self._num_steps,
        )

    def on_request_finished(self, callback: Callable[[RequestRecord], None]) -> None:
        """Call ``callback`` with the record of every request that ends, however it ends."""
        self._observers.append(callback)

    # -- the step loop -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._serve()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("the engine cannot go on")
            self._die(f"the engine failed: {type(error).__name__}: {error}")

    async def _serve(self) -> None:
        undelivered: list[SequenceUpdate] = []
        failed_steps = 0
        while True:
            batch = self._scheduler.schedule()
            if batch is None:
                self._outputs.process(undelivered)
                undelivered = []
                if self._scheduler.has_work:
                    raise RuntimeError("the scheduler has work and schedules none of it")
                self._work.clear()
                await self._work.wait()
                continue
            try:
                self._executor.submit(batch)
                self._outputs.process(undelivered)
                undelivered = []
                await self._executor.forward_done()
                output = await self._executor.sample()
            except Exception as error:
                logger.exception("step %d failed", batch.step)
                failed_steps += 1
                undelivered = self._scheduler.fail_step(batch, f"the model failed: {error}")
                if failed_steps == MAX_FAILED_STEPS:
                    self._outputs.process(undelivered)
                    raise
                continue
            failed_steps = 0
            self._num_steps += 1
            undelivered = self._scheduler.update(batch, output)

    # -- inside --------------------------------------------------------------------------------------------

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._admission.check_text(text)
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _make_request(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> Request:
        metrics = RequestMetrics(arrival_time=arrival_time)
        stream = RequestStream(
            request_id,
            text,
            token_ids,
            num_choices=params.n,
            output_kind=params.output_kind,
            metrics=metrics,
            abort=lambda: self.abort(request_id),
        )
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            max_total_tokens=self.max_model_len,
            metrics=metrics,
            stream=stream,
        )
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & (2**64 - 1)
        request.sequences = [
            Sequence(
                sequence_id=next(self._sequence_ids),
                request=request,
                choice_index=choice,
                seed=seed,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                block_table=BlockTable(self._pool),
                text=SequenceText(self.tokenizer, params),
            )
            for choice in range(params.n)
        ]
        return request

    def _on_finished(self, record: RequestRecord) -> None:
        self._requests.pop(record.request_id, None)
        for callback in self._observers:
            callback(record)

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(self.dead_error)

    def _die(self, reason: str) -> None:
        self.dead_error = reason
        for request in list(self._requests.values()):
            request.stream.fail(EngineDeadError(reason))
        self._requests.clear()
