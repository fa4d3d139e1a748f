"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.outputs import CompletionOutput
from streamllm.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from streamllm.server.body import decoded, read_body
from streamllm.server.chat_prompt import chat_prompt
from streamllm.server.chunks import ChunkWriter, FirstChunk
from streamllm.server.generation import (
    ResponseHead,
    ServerState,
    abort_all,
    check_stream_options,
    collect,
    generation_params,
    num_choices,
    submit,
)
from streamllm.server.logprobs import (
    LogprobFormatter,
    format_prompt,
    logprob_formatter,
    prompt_logprobs_field,
)
from streamllm.server.protocol import ChatRequest
from streamllm.server.sse import EventStream

ROLE_DELTA = FirstChunk(b'"delta":{"role":"assistant","content":""}')


async def chat_completions(request: Request) -> Response:
    """One conversation, ``n`` answers: whole, or streamed as chunks."""
    server: ServerState = request.app.state.server
    body = await read_body(request, server.config.max_body_bytes)
    return await server.in_flight.run(request.receive, _answer(server, await decoded(body, ChatRequest)))


async def _answer(server: ServerState, request: ChatRequest) -> Response:
    arrival_time = time.monotonic()
    engine = server.engine
    server.check_model(request.model)
    check_stream_options(request)
    params = read_params(server, request)
    prompt = (await chat_prompt(server, request, request.messages)).token_ids
    head = ResponseHead.make("chatcmpl", server.model_names[0])
    streams = await submit(
        engine,
        request,
        [prompt],
        params,
        response_id=head.id,
        field="messages",
        arrival_time=arrival_time,
    )
    formatter = logprob_formatter(engine.tokenizer, params, as_token_ids=request.return_tokens_as_token_ids)
    if request.stream:
        writer = ChunkWriter(
            head,
            object_name="chat.completion.chunk",
            text_field=(b'"delta":{"content":', b"}"),
            empty_text=b'"delta":{}',
            first_chunk=lambda index: ROLE_DELTA,
            format_logprobs=None if formatter is None else _chunk_logprobs(formatter),
            options=request.stream_options,
            extras=lambda: server.metrics_field(streams),
            token_ids="chunk" if request.return_token_ids else None,
        )
        return EventStream(
            lambda write: writer.frames(streams, num_choices(request), write),
            in_flight=server.in_flight,
            release=lambda: abort_all(streams),
        )
    (output,), usage = await collect(streams, num_choices(request))
    answer = head.body("chat.completion") | {
        "choices": [_choice(choice, formatter) for choice in output.outputs],
        "usage": usage,
        **server.metrics_field(streams),
    }
    entries, count = output.prompt_logprobs, request.prompt_logprobs
    if entries is not None and count is not None:
        formatted = await format_prompt(entries, lambda: prompt_logprobs_field(entries, count))
        answer["prompt_logprobs"] = formatted
    if request.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
        for choice, shown in zip(output.outputs, answer["choices"], strict=True):
            shown["token_ids"] = choice.token_ids
    return Response(orjson.dumps(answer), media_type="application/json")


def _chunk_logprobs(formatter: LogprobFormatter) -> Any:
    return lambda entries, output, progress: formatter.chat(entries, output)


def _choice(output: CompletionOutput, formatter: LogprobFormatter | None) -> dict[str, Any]:
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if formatter is None else formatter.chat(output.logprobs or [], output),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def read_params(server: ServerState, request: ChatRequest) -> SamplingParams | BeamSearchParams:
    renamed = {"logprobs": "top_logprobs"}
    max_tokens = request.max_tokens
    if request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    return generation_params(
        server.engine,
        request,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        renamed=renamed,
    )


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    top = request.top_logprobs
    if top and 0 < top <= MAX_LOGPROBS:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    # Zero asks for nothing; what is out of range is refused as such.
    return top or None
