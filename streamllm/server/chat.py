"""``POST /v1/chat/completions``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamllm.outputs import CompletionOutput
from streamllm.parsers.events import ParsedMessage
from streamllm.server.body import decoded, read_body
from streamllm.server.chunks import ChunkWriter, FirstChunk
from streamllm.server.conversation import Conversation, plan_conversation, read_answer
from streamllm.server.conversation_chunks import ConversationChunks
from streamllm.server.generation import (
    ResponseHead,
    ServerState,
    abort_all,
    check_stream_options,
    collect,
    num_choices,
    submit,
)
from streamllm.server.json_response import json_response
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
    lora_request = server.check_model(request.model)
    check_stream_options(request)
    conversation = await plan_conversation(server, request)
    params = conversation.params
    head = ResponseHead.make("chatcmpl", server.name_of(lora_request))
    streams = await submit(
        engine,
        request,
        [conversation.prompt.token_ids],
        params,
        response_id=head.id,
        field="messages",
        arrival_time=arrival_time,
        lora_request=lora_request,
    )
    formatter = logprob_formatter(engine.tokenizer, params, as_token_ids=request.return_tokens_as_token_ids)
    if request.stream:
        make_writer: Callable[..., ChunkWriter] = ChunkWriter
        if conversation.make_parser is not None:
            make_writer = functools.partial(ConversationChunks, make_reader=conversation.make_reader)
        writer = make_writer(
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
        "choices": [_choice(conversation, choice, formatter) for choice in output.outputs],
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
    return json_response(answer)


def _chunk_logprobs(formatter: LogprobFormatter) -> Any:
    return lambda entries, output, progress: formatter.chat(entries, output)


def _choice(
    conversation: Conversation, output: CompletionOutput, formatter: LogprobFormatter | None
) -> dict[str, Any]:
    message, finish_reason = read_answer(conversation, output)
    return {
        "index": output.index,
        "message": message_body(message),
        "logprobs": None if formatter is None else formatter.chat(output.logprobs or [], output),
        "finish_reason": finish_reason,
        "stop_reason": output.stop_reason,
    }


def message_body(message: ParsedMessage) -> dict[str, Any]:
    """The assistant's message in OpenAI's shape; reasoning under both names that clients read."""
    content = message.content
    if content is None and not message.tool_calls:
        content = ""
    body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning is not None:
        body["reasoning"] = body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body
