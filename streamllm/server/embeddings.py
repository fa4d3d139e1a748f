"""``POST /v1/embeddings``: from the running model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from streamllm.checks import show_value
from streamllm.errors import InvalidRequestError, RequestFailedError
from streamllm.outputs import RequestOutput
from streamllm.pooling_params import PoolingParams
from streamllm.server.body import decoded, read_body
from streamllm.server.completions import read_prompts
from streamllm.server.generation import ResponseHead, ServerState, collect, in_field
from streamllm.server.protocol import EmbeddingRequest
from streamllm.server.request_context import current_request

VALUES_A_TURN = 20_000
"""Numbers that are written before others have the event loop: a few milliseconds of work."""


async def embeddings(request: Request) -> Response:
    """The embedding of one input or several."""
    server: ServerState = request.app.state.server
    body = await read_body(request, server.config.max_body_bytes)
    return await server.in_flight.run(request.receive, _answer(server, await decoded(body, EmbeddingRequest)))


async def _answer(server: ServerState, request: EmbeddingRequest) -> Response:
    arrival_time = time.monotonic()
    lora_request = server.check_model(request.model)
    as_base64 = _is_base64(request.encoding_format)
    params = read_params(request)
    prompts = read_prompts(request.input, "input")
    head = ResponseHead.make("embd", server.name_of(lora_request))
    try:
        streams = await server.engine.add_requests(
            prompts,
            [params] * len(prompts),
            request_ids=[f"{head.id}-{index}" for index in range(len(prompts))],
            add_special_tokens=request.add_special_tokens is not False,
            arrival_time=arrival_time,
            priority=current_request().priority_of(request.priority),
            cache_salt=request.cache_salt,
            lora_request=lora_request,
        )
    except InvalidRequestError as error:
        raise in_field(error, "input") from None
    current_request().answered_by(streams)
    outputs, usage = await collect(streams, 1)
    fields = {
        "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        **server.metrics_field(streams),
    }
    body = orjson.dumps(head.body("list") | fields)
    data = await _data(outputs, as_base64=as_base64)
    return Response(body[:-1] + b',"data":[' + data + b"]}", media_type="application/json")


def read_params(request: EmbeddingRequest) -> PoolingParams:
    """How a request wants its embeddings.

    Raises:
        InvalidRequestError: a value out of its range, or two names of one field that contradict each other.
    """
    normalize = request.use_activation if request.normalize is None else request.normalize
    if request.use_activation not in (None, normalize):
        raise InvalidRequestError(
            "use_activation and normalize are two names of one field; leave one out.", param="use_activation"
        )
    return PoolingParams(
        pooling=request.pooling,  # type: ignore[arg-type]
        normalize=normalize is not False,
        dimensions=request.dimensions,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )


def _is_base64(encoding_format: str | None) -> bool:
    if encoding_format not in (None, "float", "base64"):
        raise InvalidRequestError(
            f'encoding_format must be "float" or "base64", got {show_value(encoding_format)}.',
            param="encoding_format",
        )
    return encoding_format == "base64"


async def _data(outputs: Sequence[RequestOutput], *, as_base64: bool) -> bytes:
    """The entries of ``data``, as JSON. Thousands of embeddings are tens of megabytes."""
    entries = []
    written = 0
    for index, output in enumerate(outputs):
        if output.embedding is None:
            raise RequestFailedError("The request was aborted by the server.")
        entries.append(_entry(index, output.embedding, as_base64))
        written += len(output.embedding)
        if written >= VALUES_A_TURN:
            written = 0
            await asyncio.sleep(0)
    return b",".join(entries)


def _entry(index: int, values: np.ndarray, as_base64: bool) -> bytes:
    # Every float32 is written out so that it is read back as the same number, as from base64.
    embedding: Any = (
        base64.b64encode(values.astype("<f4").tobytes()).decode() if as_base64 else values.tolist()
    )
    return orjson.dumps({"object": "embedding", "index": index, "embedding": embedding})
