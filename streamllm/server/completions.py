"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.outputs import CompletionOutput, RequestOutput
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.server.body import decoded, read_body
from streamllm.server.chunks import ChoiceProgress, ChunkWriter
from streamllm.server.echo import Echo
from streamllm.server.generation import (
    Prompt,
    ResponseHead,
    ServerState,
    abort_all,
    check_stream_options,
    collect,
    generation_params,
    num_choices,
    submit,
)
from streamllm.server.json_response import json_response
from streamllm.server.logprobs import (
    Entries,
    LogprobFormatter,
    TextOffsets,
    format_prompt,
    logprob_formatter,
    prompt_logprobs_field,
)
from streamllm.server.protocol import MAX_PROMPTS, CompletionRequest, describe_kind
from streamllm.server.sse import EventStream
from streamllm.server.suffix import around_suffix

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """One prompt or several, ``n`` continuations each: whole, or streamed as chunks."""
    server: ServerState = request.app.state.server
    body = await read_body(request, server.config.max_body_bytes)
    return await server.in_flight.run(
        request.receive, _answer(server, await decoded(body, CompletionRequest))
    )


async def _answer(server: ServerState, request: CompletionRequest) -> Response:
    arrival_time = time.monotonic()
    engine = server.engine
    lora_request = server.check_model(request.model)
    check_stream_options(request)
    params = read_params(engine, request)
    prompts = await around_suffix(engine, request, read_prompts(request.prompt), params)
    n = num_choices(request)
    head = ResponseHead.make("cmpl", server.name_of(lora_request))
    streams = await submit(
        engine,
        request,
        prompts,
        params,
        response_id=head.id,
        field="prompt",
        arrival_time=arrival_time,
        lora_request=lora_request,
        add_special_tokens=request.add_special_tokens is not False,
        prompt_only=_only_scores(request),
    )
    formatter = logprob_formatter(engine.tokenizer, params, as_token_ids=request.return_tokens_as_token_ids)
    echo = None
    if request.echo:
        echo = Echo(
            engine.tokenizer,
            prompts,
            streams,
            n,
            formatter,
            truncated=getattr(params, "truncate_prompt_tokens", None) is not None,
            skip_special_tokens=request.skip_special_tokens is not False,
        )
    if request.stream:
        writer = ChunkWriter(
            head,
            object_name="text_completion",
            text_field=(b'"text":', b""),
            empty_text=b'"text":""',
            first_chunk=None if echo is None else echo.first_chunk,
            format_logprobs=None if formatter is None else _chunk_logprobs(formatter),
            options=request.stream_options,
            extras=lambda: server.metrics_field(streams),
            token_ids="choice" if request.return_token_ids else None,
            take_prompt=None if echo is None else echo.take,
        )
        return EventStream(
            lambda write: writer.frames(streams, n, write),
            in_flight=server.in_flight,
            release=lambda: abort_all(streams),
        )
    outputs, usage = await collect(streams, n)
    choices = []
    for index, output in enumerate(outputs):
        if echo is not None and output.prompt_logprobs is not None:
            await echo.take(index, output.prompt_logprobs)
        extras = await _extras(request, output)
        for choice in output.outputs:
            own = {"token_ids": choice.token_ids} if request.return_token_ids else {}
            choices.append(_choice(choice, echo, formatter) | own | extras)
    fields = {"choices": choices, "usage": usage, **server.metrics_field(streams)}
    answer = head.body("text_completion") | fields
    return json_response(answer)


def _chunk_logprobs(formatter: LogprobFormatter) -> Any:
    def formatted(entries: Entries, output: CompletionOutput, progress: ChoiceProgress) -> dict[str, Any]:
        return formatter.completions(entries, output, progress.offsets)

    return formatted


async def _extras(request: CompletionRequest, output: RequestOutput) -> dict[str, Any]:
    """vLLM's fields about the prompt, which each of its choices shows."""
    extras: dict[str, Any] = {}
    if request.return_token_ids:
        extras["prompt_token_ids"] = output.prompt_token_ids
    entries, count = output.prompt_logprobs, request.prompt_logprobs
    if count is not None and entries is not None:
        formatted = await format_prompt(entries, lambda: prompt_logprobs_field(entries, count))
        extras["prompt_logprobs"] = formatted
    return extras


def _only_scores(request: CompletionRequest) -> bool:
    """``max_tokens: 0`` with ``echo``: the prompt comes back with its logprobs, and nothing is generated."""
    return request.max_tokens == 0 and bool(request.echo) and not request.use_beam_search


def read_params(engine: AsyncEngine, request: CompletionRequest) -> SamplingParams | BeamSearchParams:
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if _only_scores(request):
        if request.min_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens (0), got {request.min_tokens}.", param="min_tokens"
            )
        max_tokens = 1  # never drawn
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        # As many as either field shows.
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return generation_params(
        engine,
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        best_of=request.best_of,
        renamed={},
    )


def _choice(
    output: CompletionOutput, echo: Echo | None, formatter: LogprobFormatter | None
) -> dict[str, Any]:
    text, logprobs = output.text, None
    if echo is not None:
        text, logprobs = echo.complete(output)
    elif formatter is not None:
        logprobs = formatter.completions(output.logprobs or [], output, TextOffsets())
    return {
        "index": output.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def read_prompts(prompt: str | list[Any], field: str = "prompt") -> list[Prompt]:
    """The prompts in a field: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError(f"{field} is empty.", param=field)
    if isinstance(prompt[0], str):
        return _batch(prompt, field)
    if isinstance(prompt[0], list):
        return [_token_ids(f"{field}[{index}]", ids) for index, ids in enumerate(_batch(prompt, field))]
    return [_token_ids(field, prompt)]


def _batch(prompts: list[Any], field: str) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"{field} holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", param=field
        )
    kind = type(prompts[0])
    for index, item in enumerate(prompts):
        if type(item) is not kind:
            raise InvalidRequestError(
                f"{field} must hold prompts of one kind: {field}[{index}] is {describe_kind(item)}, "
                f"{field}[0] {describe_kind(prompts[0])}.",
                param=f"{field}[{index}]",
            )
    return prompts


def _token_ids(place: str, ids: list[Any]) -> list[int]:
    # bool is a subclass of int; the exact type also is the fast test.
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequestError(
                f"{place} must be a string or token ids: {place}[{position}] is {describe_kind(token_id)}.",
                param=f"{place}[{position}]",
            )
    return ids
