"""The engine: takes requests in and answers for them, around one task that runs step after step
(:mod:`streamllm.engine.step_loop`).

Scheduler, block pool and request state are touched on the loop's thread alone, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as SequenceType
from itertools import islice
from typing import TYPE_CHECKING, Any

from streamllm.config import EngineConfig
from streamllm.engine.adapters import AdapterRegistry
from streamllm.engine.admission import Admission
from streamllm.engine.block_lives import BlockLives
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import most_blocks
from streamllm.engine.events import EventLog
from streamllm.engine.live_requests import LiveRequest, live_requests
from streamllm.engine.output_processor import OutputProcessor
from streamllm.engine.prompt_hash import PromptHasher
from streamllm.engine.queue_limits import check_queue
from streamllm.engine.request import Request
from streamllm.engine.request_history import RequestHistory
from streamllm.engine.request_maker import CheckedRequest, RequestMaker
from streamllm.engine.request_trace import RequestTrace, make_trace
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.sequence_maker import SequenceMaker
from streamllm.engine.stats import Counters, EngineStats, RequestRecord, take_stats
from streamllm.engine.step import Limits, PrefixCacheCounters
from streamllm.engine.step_history import StepHistory
from streamllm.engine.step_loop import StepLoop
from streamllm.engine.step_observer import StepObserver
from streamllm.engine.stream import RequestStream
from streamllm.engine.structured import GrammarCompiler, GrammarMasks, constrain
from streamllm.engine.token_rules import TokenRuleMaker
from streamllm.engine.watch import EngineWatch
from streamllm.errors import EngineDeadError, InvalidRequestError
from streamllm.lora.request import LoRARequest
from streamllm.models.rope import restart_length
from streamllm.ops.step_inputs import MAX_LOGPROBS
from streamllm.outputs import EmbeddingRequestOutput, RequestOutput
from streamllm.pooling_params import PoolingParams, RequestParams, resolved_pooling
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from streamllm.engine.grammar_compile import CompiledGrammar
    from streamllm.models.model_config import ModelConfig
    from streamllm.runner.executor import StepExecutor
    from streamllm.runner.token_rules import TokenRules

logger = logging.getLogger("streamllm.engine")

LONG_TEXT = 4_000
"""Characters from which tokenising leaves the event loop (a few milliseconds of work)."""

LONGEST_TURN = 0.005
"""Seconds after which the check of many prompts lets others have the event loop."""


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
        executor: StepExecutor,
        num_blocks: int,
        max_model_len: int,
        default_sampling: dict[str, Any],
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.default_sampling = default_sampling
        self.dead_error: str | None = None
        self._executor = executor
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) | frozenset(model_config.eos_token_ids)
        self.weight_bytes = 0
        self.history = RequestHistory()
        self.events = EventLog(history=self.history)
        self.steps = StepHistory()
        self._windows = model_config.kv_layout.windows
        self._pool = BlockPool(num_blocks, config.block_size, debug=config.debug_kv_blocks)
        self.block_lives = BlockLives(config.kv_cache_metrics_sample) if config.kv_cache_metrics else None
        self._pool.observer = self.block_lives
        self._scheduler = Scheduler(
            self._pool,
            Limits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_partial_prefills=config.max_num_partial_prefills,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                restart_length=restart_length(model_config.ropes),
                queue_depth=executor.queue_depth,
                max_loras=config.max_loras if config.enable_lora else 0,
            ),
            events=self.events,
            debug=config.debug_kv_blocks,
        )
        self._admission = Admission(
            tokenizer,
            max_model_len=max_model_len,
            hidden_size=model_config.hidden_size,
            max_beam_width=self._max_beam_width(),
            num_blocks=num_blocks,
            blocks_for=lambda n: most_blocks(
                n, config.block_size, self._windows, config.max_num_batched_tokens
            ),
        )
        self.adapters = AdapterRegistry(
            lambda name, path: executor.read_adapter(name, path),
            capacity=config.max_cpu_loras if config.enable_lora else 0,
            drop=self._scheduler.lora_slots.drop,
            reserved=[model_name],
        )
        self._hasher = PromptHasher(
            config.block_size, model_config.ropes, enabled=config.enable_prefix_caching
        )
        vocab_size = min(tokenizer.vocab_size, model_config.vocab_size)
        prepare = executor.prepare_processors
        self._rule_maker = TokenRuleMaker(tokenizer, vocab_size, self._eos_token_ids, prepare)
        self._grammars = GrammarCompiler(tokenizer, self._eos_token_ids, vocab_size)
        self.renderer = ChatRenderer(tokenizer, chat_template, self._admission.check_text)
        self._outputs = OutputProcessor(tokenizer, self._scheduler.finish, self._on_finished, self.events)
        masks = GrammarMasks(config.max_num_seqs, vocab_size, num_steps=executor.queue_depth)
        observer = StepObserver(self._scheduler, self.events, self.history.waits)
        self._steps = StepLoop(self._scheduler, executor, self._outputs, masks, observer, self.steps)
        self._maker = RequestMaker(config, tokenizer, self._eos_token_ids, max_model_len, self.abort)
        self._requests: dict[str, Request] = {}
        self._observers: list[Callable[[RequestRecord], None]] = [self.history.end]
        new_id = self._scheduler.new_sequence_id
        self._sequences = SequenceMaker(config, tokenizer, self._pool, self._windows, new_id)
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
            self._executor.start(self.fail)
            self._task = asyncio.create_task(self._run(), name="streamllm-engine")

    async def stop(self) -> None:
        """Stop serving: live requests fail with EngineDeadError; the executor is closed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.dead_error is None:
            self._die("the engine was stopped")
        self._grammars.close()
        self._executor.close()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is running and can serve."""
        return self.dead_error is None and self._task is not None and not self._task.done()

    @property
    def has_generated(self) -> bool:
        """Whether a token has been generated since the start."""
        return self._outputs.counters.generation_tokens > 0

    @property
    def step_seconds(self) -> float:
        """For how long the oldest step in flight has been running; 0 between steps."""
        return self._steps.step_seconds

    def fail(self, reason: str) -> None:
        """Declare the engine dead: its requests fail now, and it takes no more."""
        if self.dead_error is None:
            self._die(reason)
            if self._task is not None:
                self._task.cancel()

    # -- requests ------------------------------------------------------------------------------------------

    async def add_request(
        self, prompt: str | list[int], params: RequestParams, **options: Any
    ) -> RequestStream:
        """Queue a request and return its stream; see :meth:`add_requests`.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop, a beam search, or how to pool an embedding.
            options: as of :meth:`add_requests`; ``request_id`` instead of ``request_ids``.
        """
        request_id = options.pop("request_id", None)
        request_ids = None if request_id is None else [request_id]
        (stream,) = await self.add_requests([prompt], [params], request_ids=request_ids, **options)
        return stream

    async def add_requests(
        self,
        prompts: SequenceType[str | list[int]],
        params: SequenceType[RequestParams],
        *,
        request_ids: SequenceType[str] | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_only: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestStream]:
        """Queue several requests, or none of them, and return their streams.

        Args:
            request_ids: unique among live requests; made up if left out.
            add_special_tokens: whether a text gets the tokenizer's BOS.
            arrival_time: ``time.monotonic()`` of the requests' arrival, for their metrics.
            priority: lower is served first, under ``--scheduling-policy priority``.
            cache_salt: only requests with the same salt share cached blocks.
            prompt_only: generate nothing: every choice ends, with reason ``"length"``, when the prompt is
                computed (for its logprobs).
            lora_request: the adapter that answers them. Its files are read first, if they are not in memory.

        Raises:
            InvalidRequestError: one of them cannot be served as written; among several, ``param`` is
                ``prompt[index]``. 429: the queue is full.
            RequestFailedError: an adapter that was served cannot be read again.
            EngineDeadError: the engine has stopped.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._check_alive()
        self._admission.check_priority(priority)
        self._admission.check_cache_salt(cache_salt)
        async with self.adapters.use(lora_request) as adapter:
            content = None if adapter is None else adapter.content
            checked = await self._check_all(prompts, params, add_special_tokens, cache_salt, content)
            self._check_alive()
            check_queue(self.config, self._scheduler, [(each.token_ids, each.params) for each in checked])
            request_ids = request_ids or [uuid.uuid4().hex for _ in prompts]
            for request_id in request_ids:
                if request_id in self._requests:
                    raise InvalidRequestError(
                        f"a request with the id {request_id!r} is running.", param="request_id"
                    )
            streams = []
            for request_id, each in zip(request_ids, checked, strict=True):
                request = self._maker.make(
                    request_id, each.text, each.token_ids, each.params, arrival_time, lora_request
                )
                request.adapter = adapter
                request.hash_seed = each.hash_seed
                request.prompt_only = prompt_only or request.embedding is not None
                request.rules = each.rules
                request.sequences = self._sequences.make(request, each.params, each.hashes, priority)
                constrain(request, each.grammar)
                self._requests[request_id] = request
                if adapter is not None and lora_request is not None:
                    self.adapters.retain(lora_request.lora_name, adapter)
                self._scheduler.add(request)
                streams.append(request.stream)
        self._steps.wake()
        return streams

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and iterate over its outputs, which are as ``params.output_kind`` says.

        Closing the iterator (``contextlib.aclosing``) or cancelling its task aborts the request at once;
        after a bare ``break`` that happens when the iterator is collected.

        Raises:
            As :meth:`add_request`, whose arguments these are, and as :class:`RequestStream`.
        """
        stream = await self.add_request(prompt, params, request_id=request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def embed(
        self, prompt: str | list[int], params: PoolingParams | None = None, **options: Any
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt; cancelling the call aborts it.

        Args:
            params: how to pool, ``None`` for the defaults.
            options: as of :meth:`add_request`.

        Raises:
            InvalidRequestError: the prompt or the parameters are wrong.
            RequestFailedError: the request failed after admission, or was aborted.
            EngineDeadError: the engine has stopped.
        """
        stream = await self.add_request(prompt, params or PoolingParams(), **options)
        try:
            return EmbeddingRequestOutput.from_output(await anext(stream))
        finally:
            stream.abort()

    def abort(self, request_id: str) -> None:
        """End a request now, queued or running; its blocks are free by the next step. Unknown ids are
        ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            self._scheduler.finish(sequence, "abort")
        self._outputs.abort(request)

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; see :meth:`ChatRenderer.render`."""
        return (await self.renderer.render(messages, **options)).token_ids

    # -- numbers -------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        return take_stats(
            self._scheduler,
            self._outputs.counters,
            max_model_len=self.max_model_len,
            num_steps=self._steps.num_steps,
        )

    def restart_counters(self) -> None:
        """Count tokens, requests and blocks from zero."""
        self._outputs.counters = Counters()
        self._scheduler.prefix_cache = PrefixCacheCounters()
        self.history.forget_ended()
        if self.block_lives is not None:
            self.block_lives.reset()

    def reset_prefix_cache(self) -> None:
        """Forget the prefix cache; running requests go on."""
        self._pool.reset_cache()

    def on_request_finished(self, callback: Callable[[RequestRecord], None]) -> None:
        """Call ``callback`` with the record of every request that ends, however it ends."""
        self._observers.append(callback)

    def trace(self, request_id: str, *, with_steps: bool = True) -> RequestTrace | None:
        """What happened to a request that lives or has ended lately; ``None`` of one that is not known."""
        steps = self.steps if with_steps else None
        return make_trace(request_id, self._requests.get(request_id), self.history, steps)

    def live_requests(self, limit: int | None = None) -> list[LiveRequest]:
        """The requests that wait or run, the oldest first, at most ``limit`` of them."""
        return list(live_requests(islice(self._requests.values(), limit), time.monotonic()))

    def watch(self) -> EngineWatch:
        """A view of blocks, requests and figures to be looked at from time to time; drop it when done."""
        return EngineWatch(self._pool, self._requests.values, self.stats, self.events)

    # -- the step loop -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._steps.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("the engine cannot go on")
            self._die(f"the engine failed: {type(error).__name__}: {error}")

    # -- inside --------------------------------------------------------------------------------------------

    async def check_prompt(
        self, prompt: str | list[int], params: RequestParams, add_special_tokens: bool
    ) -> list[int]:
        """The token ids of a prompt as :meth:`add_requests` takes it; raises what that would raise."""
        num_kept, room = self._admission.num_kept_tokens(params), self._admission.output_room(params)
        if isinstance(prompt, str):
            self._admission.check_text(prompt, may_be_cut=num_kept is not None, output_room=room)
            encode = functools.partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
            short = len(prompt) < LONG_TEXT
            token_ids = encode(prompt) if short else await asyncio.to_thread(encode, prompt)
            if num_kept is not None:
                token_ids = token_ids[-num_kept:]
            self._admission.check_length(token_ids, room)
        else:
            token_ids = self._admission.check_token_ids(prompt, num_kept, room)
        self._admission.check_params(params, len(token_ids))
        return token_ids

    async def check_requests(
        self,
        prompts: SequenceType[str | list[int]],
        params: SequenceType[RequestParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[list[int]]:
        """The token ids of prompts as :meth:`add_requests` takes them, of which none is queued; raises what
        that would raise, but for a full queue."""
        self._check_alive()
        self._admission.check_priority(priority)
        self._admission.check_cache_salt(cache_salt)
        async with self.adapters.use(lora_request):
            checked = await self._check_all(prompts, params, True, cache_salt, None)
        return [each.token_ids for each in checked]

    async def _check_all(
        self,
        prompts: SequenceType[str | list[int]],
        params: SequenceType[RequestParams],
        add_special_tokens: bool,
        cache_salt: str | None,
        adapter: bytes | None,
    ) -> list[CheckedRequest]:
        """All that is known of requests before any of them is queued."""
        checked = []
        rules: dict[int, tuple[TokenRules | None, CompiledGrammar | None]] = {}
        pause_at = time.monotonic() + LONGEST_TURN
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                token_ids = await self.check_prompt(prompt, own, add_special_tokens)
                if id(own) not in rules:
                    rules[id(own)] = await self._make_rules(own)
                hash_seed, hashes = await self._hash(token_ids, own, cache_salt, adapter)
            except InvalidRequestError as error:
                raise error if len(prompts) == 1 else error.at_index("prompt", index) from None
            text = prompt if isinstance(prompt, str) else None
            checked.append(CheckedRequest(text, token_ids, own, hash_seed, hashes, *rules[id(own)]))
            if time.monotonic() > pause_at:
                await asyncio.sleep(0)
                pause_at = time.monotonic() + LONGEST_TURN
        return checked

    async def _make_rules(self, params: RequestParams) -> tuple[TokenRules | None, CompiledGrammar | None]:
        """What restricts the tokens that a request's rows draw."""
        if isinstance(params, PoolingParams):
            return None, None
        return await self._rule_maker.make(params), await self._grammars.compile(params)

    async def _hash(
        self, token_ids: list[int], params: RequestParams, cache_salt: str | None, adapter: bytes | None
    ) -> tuple[bytes | None, list[bytes]]:
        """As :meth:`PromptHasher.hash`; none for a mean: it takes every row of its prompt, computed anew."""
        if isinstance(params, PoolingParams) and resolved_pooling(params, self.config.pooling) == "mean":
            return None, []
        return await self._hasher.hash(token_ids, cache_salt, adapter)

    def _max_beam_width(self) -> int:
        """A beam reports as many candidates as there are beams, times one more than there are EOS tokens."""
        by_candidates = MAX_LOGPROBS // max(2, 1 + len(self._eos_token_ids))
        return max(min(by_candidates, self.config.max_num_seqs), 1)

    def _on_finished(self, record: RequestRecord) -> None:
        request = self._requests.pop(record.request_id, None)
        if request is not None and request.adapter is not None and request.stream.lora_request is not None:
            self.adapters.release(request.stream.lora_request.lora_name, request.adapter)
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
