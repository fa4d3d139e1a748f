"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.outputs import CompletionOutput, RequestOutput
from streamllm.server.anthropic.blocks import BlockWriter
from streamllm.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from streamllm.server.anthropic.translate import chat_request
from streamllm.server.body import decoded, read_body
from streamllm.server.conversation import Conversation, plan_conversation
from streamllm.server.errors import body_of_failure
from streamllm.server.generation import ServerState, abort_all, collect, merged, submit
from streamllm.server.json_response import json_response
from streamllm.server.protocol import ChatRequest
from streamllm.server.sse import EventStream, Write, named_frame

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_OWN_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}


async def messages(request: Request) -> Response:
    """One message of the assistant's in Anthropic's form: whole, or streamed as events."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), MessagesRequest)
    return await server.in_flight.run(request.receive, _answer(server, body))


async def count_tokens(request: Request) -> Response:
    """The number of tokens that a conversation would have."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), CountTokensRequest)
    server.check_model(body.model)
    try:
        conversation = await plan_conversation(server, _chat(server, body))
    except InvalidRequestError as error:
        raise _in_own_words(error) from None
    return json_response({"input_tokens": len(conversation.prompt.token_ids)})


def _chat(server: ServerState, body: CountTokensRequest) -> ChatRequest:
    """The chat that a body asks for. A budget for thinking is a target in this API: a model whose thinking
    cannot be ended goes without."""
    chat = chat_request(body)
    if not server.output_format.can_end_thinking:
        chat.thinking_token_budget = None
    return chat


async def _answer(server: ServerState, body: MessagesRequest) -> Response:
    arrival_time = time.monotonic()
    lora_request = server.check_model(body.model)
    message_id = f"msg_{uuid.uuid4().hex}"
    try:
        chat = _chat(server, body)
        conversation = await plan_conversation(server, chat)
        streams = await submit(
            server.engine,
            chat,
            [conversation.prompt.token_ids],
            conversation.params,
            response_id=message_id,
            field="messages",
            arrival_time=arrival_time,
            lora_request=lora_request,
        )
    except InvalidRequestError as error:
        raise _in_own_words(error) from None
    head = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": server.name_of(lora_request),
    }
    if body.stream:
        return EventStream(
            lambda write: _events(head, conversation, streams, write),
            in_flight=server.in_flight,
            release=lambda: abort_all(streams),
            farewell=_farewell,
        )
    (output,), _ = await collect(streams, 1)
    return json_response(_message(head, conversation, output))


def _message(head: dict[str, Any], conversation: Conversation, output: RequestOutput) -> dict[str, Any]:
    (choice,) = output.outputs
    reader, writer = conversation.make_reader(), BlockWriter()
    for _ in (*writer.write(reader.read(choice)), *writer.close()):
        pass
    reason = _stop_reason(conversation, reader.finish_reason(choice), choice)
    return {**head, "content": writer.blocks, **reason, "usage": _usage(output, len(choice.token_ids))}


async def _events(
    head: dict[str, Any], conversation: Conversation, streams: Any, write: Write
) -> AsyncGenerator[bytes, None]:
    reader, writer = conversation.make_reader(), BlockWriter()
    num_tokens, begun = 0, False
    async with aclosing(merged(streams)) as outputs:
        async for _, output in outputs:
            (choice,) = output.outputs
            num_tokens += len(choice.token_ids)
            events = list(writer.write(reader.read(choice)))
            if not begun:
                begun = True
                empty: dict[str, Any] = {
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": _usage(output, 0),
                }
                events[:0] = [{"type": "message_start", "message": {**head, **empty}}, {"type": "ping"}]
            if choice.finish_reason is not None:
                reason = _stop_reason(conversation, reader.finish_reason(choice), choice)
                usage = _usage(output, num_tokens)
                events += [
                    *writer.close(),
                    {"type": "message_delta", "delta": reason, "usage": usage},
                    {"type": "message_stop"},
                ]
            if events:
                yield b"".join(named_frame(event["type"], event) for event in events)


def _stop_reason(conversation: Conversation, reason: str, choice: CompletionOutput) -> dict[str, Any]:
    if reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    if reason == "stop" and conversation.tools.named:
        reason = "tool_calls"
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(output: RequestOutput, num_tokens: int) -> dict[str, int]:
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_tokens,
    }


def _farewell(error: Exception | None) -> bytes:
    return b"" if error is None else named_frame("error", body_of_failure(error)[1])


def _in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """A chat's error in the words of this API's fields."""
    param = error.param or ""
    own = _OWN_NAMES.get(param) or re.sub(r"^tools\[(\d+)\]\.function", r"tools[\1]", param)
    own = own.replace(".parameters", ".input_schema") if own.startswith("tools[") else own
    return error if own == param else error.renamed(own)
