"""The fields that say what the text must look like: OpenAI's ``response_format``, vLLM's
``structured_outputs``, and its older ``guided_*``."""

from __future__ import annotations

from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.server.protocol import GenerationRequest, describe_kind
from streamllm.structured_outputs import StructuredOutputsParams

OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's fields before ``structured_outputs`` -> their names in it."""

JSON_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def structured_field(request: GenerationRequest) -> str:
    """The field in which the client wrote its constraint; ``tools`` where it comes from them."""
    given = _given(request)
    if given:
        return given[0]
    return "tools" if getattr(request, "tools", None) else "structured_outputs"


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """What a request's text must look like; ``None`` for any text.

    Raises:
        InvalidRequestError: a field is malformed, or two of them are given; ``param`` is the field, or
            ``structured_outputs`` where the constraint itself is wrong.
    """
    given = _given(request)
    if not given:
        if request.guided_whitespace_pattern is not None:
            raise InvalidRequestError(
                "guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern"
            )
        return None
    if len(given) > 1:
        raise InvalidRequestError(f"{given[1]} and {given[0]} exclude each other.", param=given[1])
    if request.structured_outputs is not None:
        return StructuredOutputsParams.from_mapping(request.structured_outputs)
    if given[0] in OLDER_NAMES:
        value = getattr(request, given[0])
        return StructuredOutputsParams(
            **{OLDER_NAMES[given[0]]: value}, whitespace_pattern=request.guided_whitespace_pattern
        )
    return _from_response_format(request.response_format or {})


def _given(request: GenerationRequest) -> list[str]:
    """The fields with a constraint."""
    given = []
    if request.response_format is not None and request.response_format != {"type": "text"}:
        given.append("response_format")
    given.extend(name for name in ("structured_outputs", *OLDER_NAMES) if getattr(request, name) is not None)
    return given


def _from_response_format(response_format: dict[str, Any]) -> StructuredOutputsParams:
    kind = response_format.get("type")
    if kind == "json_schema":
        _check_fields(response_format, {"type", "json_schema"})
        return StructuredOutputsParams(json=_schema(response_format.get("json_schema")))
    if kind == "json_object":
        _check_fields(response_format, {"type"})
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=response_format)
    if kind == "text":
        raise _malformed('the type "text" has no other fields')
    shown = f'"{kind[:40]}"' if isinstance(kind, str) else describe_kind(kind)
    raise _malformed(
        f'response_format.type must be "text", "json_object", "json_schema" or "structural_tag", got {shown}'
    )


def _schema(json_schema: Any) -> dict[str, Any]:
    """The schema in ``response_format.json_schema``; it is enforced whether ``strict`` or not."""
    place = "response_format.json_schema"
    if not isinstance(json_schema, dict):
        raise _malformed(f"{place} must be an object, got {describe_kind(json_schema)}")
    _check_fields(json_schema, JSON_SCHEMA_FIELDS)
    for name, kind, words in (("name", str, "a string"), ("strict", bool, "true or false")):
        value = json_schema.get(name)
        if value is not None and not isinstance(value, kind):
            raise _malformed(f"{place}.{name} must be {words}, got {describe_kind(value)}")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict):
        raise _malformed(f"{place}.schema must be an object, got {describe_kind(schema)}")
    return schema


def _check_fields(values: dict[str, Any], known: set[str] | frozenset[str]) -> None:
    """What is not understood could be a constraint, so it is refused."""
    unknown = sorted(set(values) - known)
    if unknown:
        raise _malformed(
            f"its field {unknown[0][:100]} is not supported; there are {', '.join(sorted(known))}"
        )


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format is malformed: {reason}.", param="response_format")
