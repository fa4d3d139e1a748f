"""Arguments that models write otherwise than in JSON, turned into JSON text."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from streamllm.parsers.json_reader import dump_json

_JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_REFERENCES = 32
"""References followed one from another: a schema may go round in circles."""


def json_types(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema allows, ``integer`` counting as ``number``; none where it does not say.

    Args:
        schema: of one argument.
        root: what its references start from.
    """
    return frozenset("number" if kind == "integer" else kind for kind in _types(schema, root, 0))


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    if isinstance(schema.get("$ref"), str):
        return _types(resolve(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_types(option, root, depth + 1) for option in schema[key]]
            return set().union(*found) if all(found) else set()
    for part in schema.get("allOf") or ():
        if types := _types(part, root, depth + 1):
            return types
    return set()


def resolve(reference: str, root: Any) -> Any:
    """What a reference within a schema (``#/$defs/name``) points to; ``None`` if that is nothing."""
    place = root
    if not reference.startswith("#"):
        return None
    for step in filter(None, reference[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, dict) else None
    return place


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else "object"


def json_from_text(text: str, types: frozenset[str]) -> str:
    """JSON for a value written so that strings have no quotes: JSON or a Python literal of one of ``types``
    (any, if there are none), else the text as a string."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = python_value(stripped)
    if value is not UNREADABLE and not isinstance(value, str) and (not types or _type_of(value) in types):
        try:
            return dump_json(value)
        except (ValueError, TypeError, RecursionError):
            pass
    return dump_json(text)


def json_from_python(text: str) -> str:
    """JSON for a Python literal, or for the text as a string if it is none that JSON can hold."""
    value = python_value(text.strip())
    if value is not UNREADABLE:
        try:
            return dump_json(value)
        except (ValueError, TypeError, RecursionError):
            pass
    return dump_json(text.strip())


UNREADABLE = object()


def python_value(text: str) -> Any:
    """The value of a Python literal in which ``true``, ``false`` and ``null`` may stand too; ``UNREADABLE``
    if it is none."""
    try:
        tree = ast.parse(text, mode="eval")
        return ast.literal_eval(_JsonNames().visit(tree))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return UNREADABLE


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_ESCAPE = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<byte>[0-9a-fA-F]{2})|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})"
    r"|(?P<newline>\r?\n)|(?P<letter>[\\'\"abfnrtv]))"
)
_LETTERS = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))


def python_escape(text: str) -> tuple[int, str]:
    """Reads the escape with which a text begins in a Python string.

    Args:
        text: a backslash and at least what belongs to it.

    Returns:
        Its length, and what stands for it in a JSON string. Without a meaning the backslash is a character.
    """
    match = _ESCAPE.match(text)
    if match is None:
        return 1, "\\\\"
    if match["newline"]:
        return match.end(), ""
    if match["letter"]:
        character = _LETTERS[match["letter"]]
    elif match["octal"]:
        character = chr(int(match["octal"], 8))
    else:
        code = int(match["byte"] or match["short"] or match["long"], 16)
        character = chr(code) if code <= 0x10FFFF else "\ufffd"
    return match.end(), dump_json(character)[1:-1]
