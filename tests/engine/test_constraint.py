import json

import pytest

from streamllm.engine.constraint import MAX_SOURCE_LENGTH, constraint_source
from streamllm.errors import InvalidRequestError
from streamllm.structured_outputs import StructuredOutputsParams


def source(**constraint):
    return constraint_source(StructuredOutputsParams(**constraint))


def test_a_schema_means_the_same_as_object_and_as_text_in_either_escaping():
    schema = {"enum": ["在线", "😀"]}
    texts = [json.dumps(schema), json.dumps(schema, ensure_ascii=False)]
    assert {source(json=schema), *(source(json=text) for text in texts)} == {source(json=schema)}
    assert source(json=True) == source(json={})


def test_the_order_of_properties_is_part_of_a_schema():
    assert source(json={"a": 1, "b": 2}) != source(json={"b": 2, "a": 1})


@pytest.mark.parametrize(
    "dialect",
    ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", None],
)
def test_the_usual_dialects_are_known(dialect):
    assert source(json={"$schema": dialect}).kind == "json"


def test_whitespace_is_bounded_chosen_or_none():
    def options(**more):
        return json.loads(source(json={}, **more).text)["x-guidance"]

    assert options()["whitespace_pattern"] == r"[ \t\n\r]{1,20}"
    assert options(whitespace_pattern=" ?")["whitespace_pattern"] == " ?"
    none = options(disable_any_whitespace=True)
    assert none["whitespace_pattern"] is None and not none["whitespace_flexible"]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[]"}, "must be an object or true"),
        ({"json": '{"const": NaN}'}, "not valid JSON"),
        ({"json": {"const": float("nan")}}, "schema"),
        ({"json": {"const": object()}}, "not JSON"),
        ({"json": {"const": "\ud800"}}, "not JSON"),
        ({"json": '{"const": "\ud800"}'}, "not valid JSON"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"json": {"maximum": 2**53 + 1}}, r"beyond 2\*\*53"),
        ({"json": {"$schema": "http://json-schema.org/draft-03/schema#"}}, r"\$schema"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": {"description": "x" * MAX_SOURCE_LENGTH}}, f"at most {MAX_SOURCE_LENGTH}"),
        ({"json": "x" * 2 * MAX_SOURCE_LENGTH}, f"at most {MAX_SOURCE_LENGTH}"),
        ({"choice": ["x" * 16_384] * 10_000}, "163840000 characters"),
        ({"structural_tag": {"triggers": ["x" * MAX_SOURCE_LENGTH]}}, f"at most {MAX_SOURCE_LENGTH}"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a\\"}, "backslash"),
        ({"regex": "a" * (MAX_SOURCE_LENGTH + 1)}, f"at most {MAX_SOURCE_LENGTH}"),
        ({"structural_tag": "5"}, "must be an object"),
        ({"structural_tag": {"format": {}}}, "format is not supported"),
        ({"structural_tag": {"triggers": [], "structures": []}}, "needs triggers"),
        ({"structural_tag": {"triggers": ["<a"], "structures": [{"begin": "<b"}]}}, "none of the triggers"),
        ({"structural_tag": {"triggers": ["<a"], "structures": [5]}}, r"structures\[0\] must be an object"),
        ({"structural_tag": {"triggers": ["<a"], "structures": [{"begin": 5}]}}, "strings as begin"),
    ],
)
def test_what_can_be_seen_without_compiling_is_refused(constraint, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        source(**constraint)
    assert caught.value.param == "structured_outputs"


def test_a_schema_as_nested_as_python_allows_is_refused_in_words():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        source(json=schema)
    while schema:  # so that freeing it does not recurse either
        schema = schema.pop("items")
