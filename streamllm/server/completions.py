"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.outputs import CompletionOutput
from streamllm.server.body import read_body
from streamllm.server.chunks import ChoiceProgress, ChunkWriter
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
from streamllm.server.logprobs import Entries, LogprobFormatter, logprob_formatter
from streamllm.server.protocol import MAX_PROMPTS, CompletionRequest, decode_body, describe_kind
from streamllm.server.sse import EventStream

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """One prompt or several, ``n`` continuations each: whole, or streamed as chunks."""
    server: ServerState = request.app.state.server
    body = await read_body(request, server.config.max_body_bytes)
    return await server.in_flight.run(request.receive, _answer(server, decode_body(body, CompletionRequest)))


async def _answer(server: ServerState, request: CompletionRequest) -> Response:
    arrival_time = time.monotonic()
    engine = server.engine
    server.check_model(request.model)
    check_stream_options(request)
    prompts = _prompts(request.prompt)
    params = generation_params(
        engine,
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        best_of=request.best_of,
        renamed={},
    )
    n = num_choices(request)
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError("echo together with logprobs is not supported yet.", param="echo")
    head = ResponseHead.make("cmpl", server.model_names[0])
    streams = await submit(
        engine,
        request,
        prompts,
        params,
        response_id=head.id,
        field="prompt",
        arrival_time=arrival_time,
        add_special_tokens=request.add_special_tokens is not False,
    )

    def echoed(index: int) -> str:
        """What the choice's text begins with."""
        prompt = prompts[index // n]
        if not request.echo:
            return ""
        return prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)

    def first_text(index: int) -> bytes | None:
        text = echoed(index)
        return b'"text":' + orjson.dumps(text) if text else None

    formatter = logprob_formatter(engine.tokenizer, params)
    if request.stream:
        writer = ChunkWriter(
            head,
            object_name="text_completion",
            text_field=(b'"text":', b""),
            empty_text=b'"text":""',
            first_text=first_text,
            format_logprobs=None if formatter is None else _chunk_logprobs(formatter),
            options=request.stream_options,
        )
        return EventStream(
            writer.frames(streams, n),
            in_flight=server.in_flight,
            release=lambda: abort_all(streams),
        )
    choices, usage = await collect(streams, n)
    answer = head.body("text_completion") | {
        "choices": [_choice(choice, echoed(choice.index), formatter) for choice in choices],
        "usage": usage,
    }
    return Response(orjson.dumps(answer), media_type="application/json")


def _chunk_logprobs(formatter: LogprobFormatter) -> Any:
    def formatted(entries: Entries, output: CompletionOutput, progress: ChoiceProgress) -> dict[str, Any]:
        logprobs, progress.text_offset = formatter.completions(entries, output, progress.text_offset)
        return logprobs

    return formatted


def _choice(output: CompletionOutput, echoed: str, formatter: LogprobFormatter | None) -> dict[str, Any]:
    logprobs = None if formatter is None else formatter.completions(output.logprobs or [], output, 0)[0]
    return {
        "index": output.index,
        "text": echoed + output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts in a ``prompt`` field: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty.", param="prompt")
    if isinstance(prompt[0], str):
        return _batch(prompt)
    if isinstance(prompt[0], list):
        return [_token_ids(f"prompt[{index}]", ids) for index, ids in enumerate(_batch(prompt))]
    return [_token_ids("prompt", prompt)]


def _batch(prompts: list[Any]) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt"
        )
    kind = type(prompts[0])
    for index, item in enumerate(prompts):
        if type(item) is not kind:
            raise InvalidRequestError(
                f"prompt must hold prompts of one kind: prompt[{index}] is {describe_kind(item)}, "
                f"prompt[0] {describe_kind(prompts[0])}.",
                param=f"prompt[{index}]",
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
