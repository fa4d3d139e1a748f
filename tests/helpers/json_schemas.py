"""JSON schemas of the kinds that clients send."""

from __future__ import annotations

from typing import Any

SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def record(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with just these properties, all of them."""
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, **more}


ENFORCED: dict[str, Any] = {
    "enum": {"enum": ["red", "green", "blue"]},
    "enum, not ASCII": {"enum": ["在线", "Sjöfart", "😀", "กำ"]},
    "enum with quotes": {"enum": ['a"b', "c\\d", "e\nf", "g/h", "\t"]},
    "enum of all types": {"enum": [None, True, 1.5, -3, "x", [1, 2], {"k": [None]}]},
    "const object": {"const": {"a": [1, {"b": "ü"}], "c": None}},
    "keys, not ASCII": record({'на"звание': {"const": 1}, "名前": {"enum": ["山", "川"]}}),
    "integer bounds": {"type": "integer", "minimum": -17, "maximum": 1234},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number bounds": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3.25, "multipleOf": 0.125},
    "float bounds of an integer": {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 1000},
    "multipleOf 0.25": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "pattern without anchors": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 6},
    "pattern and maxLength": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    "pattern and minLength": {"type": "string", "pattern": "^[ab]{0,9}$", "minLength": 4},
    "date": record({"day": {"type": "string", "format": "date"}}),
    "uuid": {"type": "string", "format": "uuid"},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3},
        "minItems": 1,
        "maxItems": 3,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, SHORT],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 4,
    },
    "optional fields": {
        "type": "object",
        "properties": {"a": DIGIT, "b": SHORT, "c": {"type": "boolean"}, "d": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additionalProperties of a type": {
        "type": "object",
        "properties": {"id": DIGIT},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": DIGIT},
        "additionalProperties": False,
    },
    "$ref": {
        **record({"home": {"$ref": "#/$defs/place"}, "work": {"$ref": "#/$defs/place"}}),
        "$defs": {"place": record({"city": {"enum": ["Köln", "Łódź"]}, "number": DIGIT})},
    },
    "recursive $ref": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": DIGIT, "next": {"$ref": "#/$defs/tree"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "anyOf": {"anyOf": [record({"a": DIGIT}), record({"b": SHORT}), {"type": "null"}]},
    "oneOf of disjoint objects": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "radius": DIGIT}),
            record({"kind": {"const": "square"}, "side": DIGIT}),
        ]
    },
    "allOf": {"allOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 40}]},
    "a list of records": record(
        {
            "people": {
                "type": "array",
                "items": record(
                    {
                        "name": {"type": "string", "minLength": 1, "maxLength": 10},
                        "age": {"type": "integer", "minimum": 0, "maximum": 120},
                        "email": {"type": ["string", "null"], "maxLength": 10},
                    }
                ),
                "minItems": 1,
                "maxItems": 2,
            }
        }
    ),
}
"""Schemas that are enforced; every text has an end in sight."""

REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "minContains": ({"type": "array", "minContains": 2}, "minContains"),
    "not": ({"not": {"type": "integer"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
    "else": ({"if": {"type": "string"}, "else": {"type": "integer"}}, "else"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, r"\$dynamicRef"),
    "unknown format": ({"type": "string", "format": "postcode"}, "postcode"),
    "minProperties": (
        {"type": "object", "properties": {"a": DIGIT}, "minProperties": 1},
        "min/maxProperties",
    ),
    "minProperties of unlisted keys": ({"type": "object", "minProperties": 2}, "minProperties"),
    "an uncommon keyword, nested": (record({"a": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
    "x-guidance": ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
    "inexact integer": ({"const": 12345678901234567890}, r"2\*\*53"),
}
"""Schemas whose keyword is not enforced, and what the refusal must name."""
