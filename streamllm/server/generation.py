"""From a request's fields to running requests, and from their streams to one: what both routes share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamllm.errors import InvalidRequestError, RequestFailedError
from streamllm.lora.request import LoRARequest
from streamllm.outputs import RequestOutput
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from streamllm.server.beams import beam_search_params, check_beam_fields, width_field
from streamllm.server.in_flight import InFlight
from streamllm.server.pace import Pace
from streamllm.server.protocol import GenerationRequest
from streamllm.server.request_context import current_request
from streamllm.server.structured_fields import structured_field, structured_outputs
from streamllm.server.timings import timings

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stream import RequestStream
    from streamllm.server.output_format import OutputFormat
    from streamllm.text.chat_renderer import ChatRenderer

Prompt = str | list[int]

SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "logits_processors",
)
"""Request fields that are sampling parameters under the same name."""

MODEL_DEFAULTS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
"""Fields whose default the model's generation config may set."""


MAX_NAMES_SHOWN = 20
"""Models that are listed for a client that names another."""


@dataclass(frozen=True)
class ServerState:
    """What the routes share: ``app.state.server``.

    Attributes:
        model_names: names that requests may use; the first is shown in answers.
        renderer: conversations to prompts.
        output_format: how the model writes reasoning and tool calls.
        pace: how fast requests end.
        created: start of the server, Unix time.
    """

    engine: AsyncEngine
    config: ServerConfig
    model_names: tuple[str, ...]
    renderer: ChatRenderer
    output_format: OutputFormat
    in_flight: InFlight
    pace: Pace
    created: int

    def check_model(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request's ``model`` names; ``None`` if it names the model itself.

        Raises:
            InvalidRequestError: (404) the name is not one of ours. Leaving it out is allowed, as in vLLM.
        """
        adapters = self.engine.adapters
        if (adapter := adapters.get(name)) is not None:
            return adapter.request
        if name is not None and name not in self.model_names:
            known_names = [*self.model_names, *(each.name for each in adapters.served())]
            names = ", ".join(f'"{known}"' for known in known_names[:MAX_NAMES_SHOWN])
            raise InvalidRequestError(
                f'The model "{name[:200]}" does not exist; served here: {names}.',
                param="model",
                code="model_not_found",
                status=404,
            )
        return None

    def name_of(self, lora_request: LoRARequest | None) -> str:
        """What answers call the model, or the adapter, that gave them."""
        return self.model_names[0] if lora_request is None else lora_request.lora_name

    def retry_after(self) -> int:
        """Seconds after which a client that found the queue full should come again."""
        return self.pace.retry_after(self.engine.stats().num_waiting)

    def metrics_field(self, streams: Sequence[RequestStream]) -> dict[str, Any]:
        """vLLM's field ``metrics`` of an answer; nothing unless it was asked for."""
        return {"metrics": timings(streams)} if self.config.enable_per_request_metrics else {}


def check_stream_options(request: GenerationRequest) -> None:
    """
    Raises:
        InvalidRequestError: ``stream_options`` without ``stream``.
    """
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true.", param="stream_options"
        )


def generation_params(
    engine: AsyncEngine,
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    best_of: int | None = None,
    renamed: dict[str, str],
) -> SamplingParams | BeamSearchParams:
    """How a request wants its tokens: a beam search, or sampling.

    Args:
        max_tokens: the limit, ``None`` for what the context leaves.
        logprobs: alternatives per token, ``None`` for no logprobs.
        prompt_logprobs: the same for the prompt's tokens.
        best_of: choices, or beams, of which ``n`` are returned.
        renamed: parameter -> the field that the client wrote instead.

    Raises:
        InvalidRequestError: a value out of its range, or a contradiction; ``param`` is the client's field.
    """
    check_beam_fields(request)
    try:
        if request.use_beam_search:
            return beam_search_params(request, max_tokens=max_tokens, best_of=best_of)
        params = _sampling_params(
            engine,
            request,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            best_of=best_of,
        )
    except InvalidRequestError as error:
        raise _renamed(error, renamed | _own_names(request)) from None
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; leave it out or send stream false.", param="prompt_logprobs"
        )
    return params


def _sampling_params(engine: AsyncEngine, request: GenerationRequest, **values_given: Any) -> SamplingParams:
    """The request's own values, then the model's, then OpenAI's defaults."""
    values = {
        name: engine.default_sampling[name] for name in MODEL_DEFAULTS if name in engine.default_sampling
    }
    for name in SAMPLING_FIELDS:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if request.vllm_xargs is not None:
        values["extra_args"] = request.vllm_xargs
    values["structured_outputs"] = structured_outputs(request)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, **values_given, output_kind=kind)


def _own_names(request: GenerationRequest) -> dict[str, str]:
    """Parameter -> the field in which the client wrote it."""
    return {
        "beam_width": width_field(request),
        "extra_args": "vllm_xargs",
        "structured_outputs": structured_field(request),
    }


def _renamed(error: InvalidRequestError, renamed: dict[str, str]) -> InvalidRequestError:
    """The error in the client's words."""
    field = renamed.get(error.param or "")
    return error if field is None else error.renamed(field)


def num_choices(request: GenerationRequest) -> int:
    """Choices to return for each prompt."""
    return 1 if request.n is None else request.n


async def submit(
    engine: AsyncEngine,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams | BeamSearchParams,
    *,
    response_id: str,
    field: str,
    arrival_time: float,
    lora_request: LoRARequest | None,
    add_special_tokens: bool = True,
    prompt_only: bool = False,
) -> list[RequestStream]:
    """Queue every prompt, or none.

    Args:
        field: the request's field that holds the prompts, for errors.
        arrival_time: ``time.monotonic()`` when the request was read.
        lora_request: the adapter that its ``model`` names.
        prompt_only: nothing is generated.

    Raises:
        InvalidRequestError: a prompt cannot be served; nothing stays queued.
        QueueFullError: (429) too much is queued already.
        EngineDeadError: the engine has stopped.
    """
    try:
        streams = await engine.add_requests(
            prompts,
            [params] * len(prompts),
            request_ids=[f"{response_id}-{index}" for index in range(len(prompts))],
            add_special_tokens=add_special_tokens,
            arrival_time=arrival_time,
            priority=current_request().priority_of(request.priority),
            cache_salt=request.cache_salt,
            prompt_only=prompt_only,
            lora_request=lora_request,
        )
    except InvalidRequestError as error:
        raise _renamed(in_field(error, field), _own_names(request)) from None
    current_request().answered_by(streams)
    return streams


def in_field(error: InvalidRequestError, field: str) -> InvalidRequestError:
    """The engine's error about a prompt, in the field where the client wrote it."""
    if error.param is None or not error.param.startswith("prompt"):
        return error
    param = field + error.param.removeprefix("prompt")
    return InvalidRequestError(error.message, param=param, code=error.code, status=error.status)


def abort_all(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt's index, output) of all streams as they come.

    Raises:
        RequestFailedError, EngineDeadError: the first failure of any of them, or an abort that came from
            the server.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, unaborted(output)
        return
    # One output may wait: while the reader is slow the streams behind coalesce.
    outputs: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await outputs.put((index, output))
            await outputs.put((index, None))
        except Exception as error:
            await outputs.put((index, error))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            index, news = await outputs.get()
            if news is None:
                running -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield index, unaborted(news)
    finally:
        for task in pumps:
            task.cancel()


def unaborted(output: RequestOutput) -> RequestOutput:
    """The output, unless the server has ended one of its choices: then RequestFailedError."""
    for choice in output.outputs:
        if choice.finish_reason in ("abort", "error"):
            raise RequestFailedError("The request was aborted by the server.")
    return output


async def collect(streams: Sequence[RequestStream], n: int) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Each prompt's output with its first ``n`` choices, numbered over the prompts in order, and the usage.
    On any failure every request ends."""
    usage = Usage(streams)
    finished: dict[int, RequestOutput] = {}
    try:
        async with aclosing(merged(streams)) as outputs:
            async for index, output in outputs:
                finished[index] = output
                usage.add(output)
    finally:
        abort_all(streams)
    usage.add_unreturned()
    results = [finished[index] for index in range(len(streams))]
    for index, output in enumerate(results):
        output.outputs = output.outputs[:n]
        for number, choice in enumerate(output.outputs, start=index * n):
            choice.index = number
    return results, usage.body()


class Usage:
    """Counts tokens of the requests behind one response; a prompt counts once whatever its choices."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self._prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}

    def add(self, output: RequestOutput) -> None:
        self._completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._cached_tokens[output.request_id] = output.num_cached_tokens

    def add_tokens(self, count: int) -> None:
        """Count tokens of a request that :meth:`add` knows."""
        self._completion_tokens += count

    def add_unreturned(self) -> None:
        """At the end: count everything generated, the choices that ``best_of`` and beams drop too, as OpenAI
        does."""
        self._completion_tokens = sum(stream.num_pushed_tokens for stream in self._streams)

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }


@dataclass(frozen=True)
class ResponseHead:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def make(cls, prefix: str, model: str) -> ResponseHead:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def body(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}
