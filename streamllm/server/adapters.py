"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's bodies and answers."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.server.body import decoded, read_body
from streamllm.server.generation import ServerState


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``: ``lora_path`` is a folder on the server. With ``load_inplace``
    an adapter of the same name is replaced."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``; ``lora_int_id`` is vLLM's, and without effect."""

    lora_name: str
    lora_int_id: int | None = None


async def load_lora_adapter(request: Request) -> Response:
    """Read a LoRA adapter and serve it under a name; with load_inplace in place of the one it has."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), LoadAdapterRequest)
    return await server.in_flight.run(request.receive, _load(server, body))


async def _load(server: ServerState, body: LoadAdapterRequest) -> Response:
    if not body.lora_path:
        raise InvalidRequestError("lora_path must name a folder.", param="lora_path")
    await server.engine.adapters.load(body.lora_name, body.lora_path, load_inplace=body.load_inplace is True)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


async def unload_lora_adapter(request: Request) -> Response:
    """Serve a LoRA adapter no more; refused while requests use it."""
    server: ServerState = request.app.state.server
    body = await decoded(await read_body(request, server.config.max_body_bytes), UnloadAdapterRequest)
    server.engine.adapters.unload(body.lora_name)
    return Response(
        f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain"
    )
