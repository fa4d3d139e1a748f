"""Prompts without generation: ``/tokenize``, ``/detokenize`` and the ``render`` routes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.server.body import decoded, read_body
from streamllm.server.chat_prompt import chat_prompt
from streamllm.server.completions import read_params as completion_params
from streamllm.server.completions import read_prompts
from streamllm.server.conversation import plan_conversation
from streamllm.server.generation import ServerState, in_field
from streamllm.server.json_response import json_response
from streamllm.server.protocol import ChatRequest, CompletionRequest
from streamllm.server.suffix import around_suffix
from streamllm.server.tools import read_functions

MAX_TEXT = 4_000_000
"""Characters of a text for ``/tokenize``, which need not fit the model's context: some seconds of work."""

LONG = 4_000
"""Characters or tokens from which the work leaves the event loop."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: either ``prompt``, or ``messages`` with what a chat request says about
    them.

    ``add_special_tokens`` is about ``prompt``; a conversation gets exactly one BOS whatever it says.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation as the model would read it."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), TokenizeRequest)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Either prompt or messages is required, and not both.", param="prompt")
    if body.messages is not None:
        read_functions(body.tools or [])
        token_ids = (await chat_prompt(server, body, body.messages)).token_ids
    else:
        token_ids = await _encode(server, body.prompt or "", body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": server.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [server.engine.tokenizer.token_text(token_id) for token_id in token_ids]
    return json_response(answer)


async def _encode(server: ServerState, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) > MAX_TEXT:
        raise InvalidRequestError(
            f"prompt has {len(text)} characters; at most {MAX_TEXT} are tokenised at once.", param="prompt"
        )

    def encode() -> list[int]:
        return server.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return encode() if len(text) < LONG else await asyncio.to_thread(encode)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), DetokenizeRequest)
    server.check_model(body.model)
    tokenizer = server.engine.tokenizer
    for index, token_id in enumerate(body.tokens):
        if not tokenizer.contains(token_id):
            raise InvalidRequestError(
                f"tokens[{index}] is {str(token_id)[:40]}, which is not in the vocabulary "
                f"(0 to {tokenizer.vocab_size - 1}).",
                param=f"tokens[{index}]",
            )

    def decode() -> str:
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return json_response({"prompt": decode() if len(body.tokens) < LONG else await asyncio.to_thread(decode)})


async def render_chat(request: Request) -> Response:
    """What ``/v1/chat/completions`` would give the model for the same body."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), ChatRequest)
    model_name = server.name_of(server.check_model(body.model))
    planned = await plan_conversation(server, body)
    rendered = planned.prompt
    try:
        token_ids = await server.engine.check_prompt(rendered.token_ids, planned.params, True)
    except InvalidRequestError as error:
        raise in_field(error, "messages") from None
    return json_response(_prompt(server, model_name, rendered.text, token_ids))


async def render_completion(request: Request) -> Response:
    """What ``/v1/completions`` would give the model for the same body, one entry a prompt."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), CompletionRequest)
    model_name = server.name_of(server.check_model(body.model))
    params = completion_params(server.engine, body)
    prompts = []
    for prompt in await around_suffix(server.engine, body, read_prompts(body.prompt), params):
        token_ids = await server.engine.check_prompt(prompt, params, body.add_special_tokens is not False)
        text = prompt if isinstance(prompt, str) else server.engine.tokenizer.decode(prompt)
        prompts.append(_prompt(server, model_name, text, token_ids))
    return json_response({"object": "list", "data": prompts})


def _prompt(server: ServerState, model_name: str, text: str, token_ids: list[int]) -> dict[str, Any]:
    return {
        "object": "prompt",
        "model": model_name,
        "prompt_text": text,
        "prompt_token_ids": token_ids,
        "count": len(token_ids),
        "max_model_len": server.engine.max_model_len,
    }
