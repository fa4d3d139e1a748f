"""``/v1/responses``: create, retrieve, cancel, delete, list the input, count tokens."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError, RequestFailedError
from streamllm.server.body import decoded, read_body
from streamllm.server.conversation import Conversation, plan_conversation
from streamllm.server.errors import body_of_failure
from streamllm.server.generation import ServerState, submit
from streamllm.server.json_response import json_response
from streamllm.server.logprobs import logprob_formatter
from streamllm.server.owners import owner_of
from streamllm.server.protocol import ChatRequest
from streamllm.server.query import Page, query_number
from streamllm.server.responses.background import BackgroundRun, BackgroundRuns
from streamllm.server.responses.output_items import StreamEvent
from streamllm.server.responses.protocol import InputTokensRequest, ResponsesRequest
from streamllm.server.responses.run import ResponseRun, new_response
from streamllm.server.responses.store import ResponseStore, StoredResponse
from streamllm.server.responses.translate import Item, chat_request, input_items
from streamllm.server.sse import EventStream, Write, named_frame

if TYPE_CHECKING:
    from streamllm.sampling_params import SamplingParams

_OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
MAX_LISTED = 100


class Responses:
    """What the routes share: ``app.state.responses``."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.background = BackgroundRuns()

    async def items_before(self, owner: str, body: InputTokensRequest) -> list[Item]:
        """The items of the turns before a request's own.

        Raises:
            InvalidRequestError: (404) there is no such response.
        """
        previous = body.previous_response_id
        if previous is None:
            return []
        items = await self.store.conversation(owner, previous)
        if items is None:
            raise _not_found(previous, "previous_response_id", code="previous_response_not_found")
        return items


async def create_response(request: Request) -> Response:
    """One response: whole, streamed as events, or going on in the background."""
    server: ServerState = request.app.state.server
    responses: Responses = request.app.state.responses
    body = await decoded(await read_body(request, server.config.max_body_bytes), ResponsesRequest)
    answer = _create(server, responses, owner_of(request), body)
    return await server.in_flight.run(request.receive, answer)


async def count_input_tokens(request: Request) -> Response:
    """The number of tokens that a response's prompt would have."""
    server: ServerState = request.app.state.server
    responses: Responses = request.app.state.responses
    body = await decoded(await read_body(request, server.config.max_body_bytes), InputTokensRequest)
    server.check_model(body.model)
    items = await responses.items_before(owner_of(request), body) + input_items(body)
    _, conversation = await _plan(server, body, items)
    count = len(conversation.prompt.token_ids)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def retrieve_response(request: Request) -> Response:
    """A response that is kept; ``?stream=true`` shows what one in the background does."""
    server: ServerState = request.app.state.server
    found = await _find(request)
    if request.query_params.get("stream", "false").lower() not in ("true", "1"):
        return json_response(found.run.response if isinstance(found, BackgroundRun) else found.response)
    if not isinstance(found, BackgroundRun):
        raise InvalidRequestError(
            "Only a response that runs in the background, or did so lately, can be streamed.",
            param="stream",
        )
    return _watching(server, found, query_number(request, "starting_after", -1, -1, 10**9))


async def cancel_response(request: Request) -> Response:
    """End a response that runs in the background."""
    found = await _find(request)
    if isinstance(found, BackgroundRun):
        await found.cancel()
        return json_response(found.run.response)
    if not found.response["background"]:
        raise InvalidRequestError("Only a response with background: true can be cancelled.", param="id")
    return json_response(found.response)


async def delete_response(request: Request) -> Response:
    """Forget a response; one that runs is ended."""
    responses: Responses = request.app.state.responses
    found = await _find(request)
    response_id = request.path_params["id"]
    if isinstance(found, BackgroundRun):
        await found.cancel()
        responses.background.forget(response_id)
    await responses.store.delete(owner_of(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """The items of a response's own request, the last one first unless ``order`` is ``asc``."""
    responses: Responses = request.app.state.responses
    response_id = request.path_params["id"]
    stored = await responses.store.get(owner_of(request), response_id)
    if stored is None:
        raise _not_found(response_id, "id")
    items = [{"id": f"item_{index}_{response_id}", **item} for index, item in enumerate(stored.input)]
    page = Page.of_request(request, default=20, most=MAX_LISTED)
    if not page.ascending:
        items.reverse()
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise InvalidRequestError(f"after is none of the items: {page.after[:100]}.", param="after")
        items = items[ids.index(page.after) + 1 :]
    shown = items[: page.limit]
    ends = (
        {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
    )
    return json_response({"object": "list", "data": shown, "has_more": len(items) > page.limit, **ends})


# -- creating ----------------------------------------------------------------------------------------------


async def _create(server: ServerState, responses: Responses, owner: str, body: ResponsesRequest) -> Response:
    arrival_time = time.monotonic()
    lora_request = server.check_model(body.model)
    own_items = input_items(body)
    items = await responses.items_before(owner, body) + own_items
    chat, conversation = await _plan(server, body, items)
    response = new_response(body, conversation, server.name_of(lora_request))
    _check_it_can_be_kept(response, own_items)
    try:
        streams = await submit(
            server.engine,
            chat,
            [conversation.prompt.token_ids],
            conversation.params,
            response_id=response["id"],
            field="input",
            arrival_time=arrival_time,
            lora_request=lora_request,
        )
    except InvalidRequestError as error:
        raise _in_own_words(error) from None
    params: SamplingParams = conversation.params  # type: ignore[assignment]
    formatter = logprob_formatter(server.engine.tokenizer, params, as_token_ids=None)
    run = ResponseRun(response, conversation, streams, formatter)

    async def save(finished: dict[str, Any]) -> None:
        if finished["store"]:
            await responses.store.put(owner, finished, own_items)

    if body.background:
        try:
            await save(response)
            started = responses.background.start(owner, run, save, server.in_flight)
        except BaseException:
            run.abort()
            raise
        return _watching(server, started) if body.stream else json_response({**response, "output": []})
    if body.stream:
        return EventStream(
            lambda write: _frames(run, save, write),
            in_flight=server.in_flight,
            release=run.abort,
            farewell=functools.partial(_farewell, run),
        )
    async with aclosing(run.events()) as events:
        async for _ in events:
            pass
    if run.response["status"] == "failed":
        raise RequestFailedError(run.response["error"]["message"])
    await save(run.response)
    return json_response(run.response)


async def _plan(
    server: ServerState, body: InputTokensRequest, items: list[Item]
) -> tuple[ChatRequest, Conversation]:
    try:
        chat = chat_request(body, items)
        if not chat.messages:
            raise InvalidRequestError("input must hold at least one item.", param="input")
        return chat, await plan_conversation(server, chat)
    except InvalidRequestError as error:
        raise _in_own_words(error) from None


def _check_it_can_be_kept(response: dict[str, Any], items: list[Item]) -> None:
    """
    Raises:
        InvalidRequestError: what the request brings and the response repeats, under the same name, is JSON
            that cannot be written again.
    """
    for name, value in {**response, "input": items}.items():
        try:
            orjson.dumps(value)
        except TypeError as error:
            reason = {"Recursion limit reached": "it is nested too deeply"}.get(str(error), str(error))
            raise InvalidRequestError(f"{name} cannot be kept: {reason}.", param=name) from None


async def _frames(run: ResponseRun, save: Any, write: Write) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events()) as events:
        async for news in events:
            if run.response["status"] not in ("queued", "in_progress", "failed"):
                # Whoever sees the last event may ask for the response, or go on from it, at once.
                await save(run.response)
            yield _written(news)


def _watching(server: ServerState, run: BackgroundRun, starting_after: int = -1) -> EventStream:
    async def frames(write: Write) -> AsyncGenerator[bytes, None]:
        async with aclosing(run.events(starting_after)) as events:
            async for news in events:
                yield _written(news)

    farewell = functools.partial(_farewell, run.run)
    return EventStream(frames, in_flight=server.in_flight, release=lambda: None, farewell=farewell)


def _written(events: list[StreamEvent]) -> bytes:
    return b"".join(named_frame(event["type"], event) for event in events)


def _farewell(run: ResponseRun, error: Exception | None) -> bytes:
    """What goes wrong in the response itself is one of its events; this is the server's end."""
    if error is None:
        return b""
    message = body_of_failure(error)[1]["error"]["message"]
    event = {"type": "error", "code": "server_error", "message": message, "param": None}
    return named_frame("error", {**event, "sequence_number": run.num_events})


# -- finding -----------------------------------------------------------------------------------------------


async def _find(request: Request) -> BackgroundRun | StoredResponse:
    responses: Responses = request.app.state.responses
    owner, response_id = owner_of(request), request.path_params["id"]
    running = responses.background.get(owner, response_id)
    found = running or await responses.store.get(owner, response_id)
    if found is None:
        raise _not_found(response_id, "id")
    return found


def _not_found(response_id: str, param: str, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(
        f"There is no response {response_id[:100]} (any more).", param=param, code=code, status=404
    )


def _in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """A chat's error in the words of this API's fields."""
    param = error.param or ""
    own = _OWN_NAMES.get(param, param)
    own = re.sub(r"^tools\[(\d+)\]\.function\b", r"tools[\1]", own)
    own = re.sub(r"^messages\b.*", "input", own)
    own = own.replace("tool_choice.function.name", "tool_choice.name")
    return error if own == param else error.renamed(own)
