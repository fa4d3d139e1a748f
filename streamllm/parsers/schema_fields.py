"""A tool's parameters one by one, for formats that write each argument by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamllm.parsers.call_grammar import object_schema, unenforceable
from streamllm.parsers.tools import Tool

_DEFINITIONS = ("$defs", "definitions")
_WITHOUT_EFFECT = {"$schema", "$id", "$comment", "title", "description", "default", "examples"}
_KNOWN = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS, *_WITHOUT_EFFECT}


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter: its name, the schema of its value as a document of its own, and whether it must be
    given."""

    name: str
    schema: dict[str, Any]
    required: bool


def schema_fields(tool: Tool) -> list[Field] | None:
    """A tool's parameters in the schema's order; ``None``: it takes any.

    Parameters that the schema does not list are left out: the arguments follow it all the same.

    Raises:
        InvalidRequestError: the schema says more about the arguments as a whole than which there are.
    """
    schema = object_schema(tool)
    unknown = sorted(key for key in schema if key not in _KNOWN)
    if unknown:
        raise unenforceable(tool, f"{unknown[0][:100]} beside properties is not supported")
    properties, required = schema.get("properties"), schema.get("required") or []
    if properties is None and not required:
        return None
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise unenforceable(tool, "properties must be an object and required a list")
    for name in required:
        if name not in properties:
            raise unenforceable(tool, f"required names {str(name)[:100]!r}, which properties does not have")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return [
        Field(name, _document(value, definitions, tool), name in required)
        for name, value in properties.items()
    ]


def _document(schema: Any, definitions: dict[str, Any], tool: Tool) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise unenforceable(tool, "a property's schema must be an object or true")
    references = list(_references(schema))
    if not references:
        return schema
    if not all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        raise unenforceable(tool, "a $ref in a property must point into $defs or definitions")
    return {**schema, **definitions}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def separated(fields: Sequence[Field], separator: str, prefix: str) -> tuple[str, list[str]]:
    """Lark for the rules ``{prefix}_0``, ``{prefix}_1`` ... of the fields, in order, optional ones left out
    or not, with a separator between those that are there.

    Returns:
        The expression (nothing for no fields), and the rules that it uses.
    """
    rules = []
    rest = [f"{prefix}_rest_{index}" for index in range(len(fields))]
    for index, field in enumerate(fields):
        follows = rest[index + 1] if index + 1 < len(fields) else ""
        maybe = "" if field.required else "?"
        rules.append(f"{rest[index]}: ({separator} {prefix}_{index}){maybe} {follows}")
    firsts = []
    for index, field in enumerate(fields):
        firsts.append(f"{prefix}_{index} {rest[index + 1] if index + 1 < len(fields) else ''}")
        if field.required:
            break
    if not firsts:
        return "", []
    may_be_empty = "" if any(field.required for field in fields) else "?"
    return f"({' | '.join(firsts)}){may_be_empty}", rules[1:]
