"""``/openapi.json``, made from the routes and the structs of their bodies, and ``/docs`` for people."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import streamllm
from streamllm.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from streamllm.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from streamllm.server.batches.protocol import UPLOAD_SCHEMA, BatchRequest
from streamllm.server.errors import ANTHROPIC_PATHS
from streamllm.server.json_response import json_response
from streamllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    field_support,
    leave_out,
    refused_fields,
)
from streamllm.server.render import DetokenizeRequest, TokenizeRequest
from streamllm.server.responses.protocol import InputTokensRequest, ResponsesRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/batches": BatchRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
"""What each route with a body decodes."""

FORMS = {"/v1/files": UPLOAD_SCHEMA}
"""What each route reads as a form, as a JSON schema."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


async def openapi(request: Request) -> Response:
    """This API as an OpenAPI document."""
    document = make_document(request.app.routes)
    return json_response(document)


async def docs(request: Request) -> Response:
    """This API as a page."""
    page = make_page(make_document(request.app.routes))
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Response(page, media_type="text/html", headers=headers)


def make_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document. Each field of a body says in ``x-support`` whether it is ``"honoured"``,
    ``"not supported yet"`` (refused unless it has the value that changes nothing) or ``"ignored"``."""
    types = list(dict.fromkeys(BODIES.values()))
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for body_type in types:
        _add_support(schemas[body_type.__name__], body_type)
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamllm", "version": streamllm.__version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").partition("\n\n")[0]
    error = "AnthropicError" if route.path.startswith(ANTHROPIC_PATHS) else "Error"
    operation: dict[str, Any] = {
        "summary": " ".join(summary.split()),
        "responses": {
            "200": {"description": "Done."},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
            },
        },
    }
    for name in re.findall(r"{(\w+)", route.path):
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation.setdefault("parameters", []).append(parameter)
    if "POST" not in (route.methods or ()):
        return operation
    if route.path in FORMS:
        content = {"multipart/form-data": {"schema": FORMS[route.path]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.path in BODIES:
        reference = {"$ref": f"#/components/schemas/{BODIES[route.path].__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return operation


def _add_support(schema: dict[str, Any], body_type: type[msgspec.Struct]) -> None:
    properties = schema["properties"]
    for name, status in sorted(field_support(body_type).items()):
        field = properties.setdefault(name, {})
        field["x-support"] = status
        if status == "ignored":
            field["description"] = "Accepted; changes nothing."
        elif status == "not supported yet":
            neutral = refused_fields(body_type)[name]
            field["description"] = f"Refused; {leave_out(neutral)}."
            field["enum"] = [None, *neutral]


# -- the page ----------------------------------------------------------------------------------------------

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;"
    "padding:.2em .8em .2em 0;border-bottom:1px solid #ddd}code{font-size:.95em}"
)


def make_page(document: dict[str, Any]) -> str:
    """An OpenAPI document of :func:`make_document` as HTML that needs nothing from elsewhere."""
    routes, bodies = [], {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = ""
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                reference = content["application/json"]["schema"]["$ref"]
                name = reference.rpartition("/")[2]
                bodies[name] = document["components"]["schemas"][name]
            link = f'<a href="#{name}">{name}</a>' if name else ""
            routes.append(
                [
                    f"<code>{method.upper()} {html.escape(path)}</code>",
                    html.escape(operation["summary"]),
                    link,
                ]
            )
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>streamllm</title><style>{_STYLE}</style>",
        f"<h1>streamllm {html.escape(document['info']['version'])}</h1>",
        '<p>OpenAI-compatible API; the same as <a href="openapi.json">OpenAPI document</a>.</p>',
        _table(["route", "", "body"], routes),
    ]
    for name, schema in sorted(bodies.items()):
        required = schema.get("required", [])
        rows = [
            [
                f"<code>{html.escape(field)}</code>" + (" (required)" if field in required else ""),
                html.escape(_type_of(properties)),
                html.escape(properties.get("description", properties["x-support"])),
            ]
            for field, properties in schema["properties"].items()
        ]
        description = html.escape(schema.get("description", ""))
        parts += [
            f"<h2 id={name}>{name}</h2><p>{description}</p>",
            _table(["field", "type", "support"], rows),
        ]
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{cell}" for cell in head)]
    lines += ["<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def _type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_type_of, schema["anyOf"])))
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_type_of(schema.get('items', {})) or 'anything'}"
    return kind if isinstance(kind, str) and kind != "null" else ""
