import pytest

from streamllm.errors import InvalidRequestError
from streamllm.structured_outputs import StructuredOutputsParams


def test_exactly_one_constraint_is_needed():
    StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequestError, match="got none"):
        StructuredOutputsParams()
    with pytest.raises(InvalidRequestError, match="got json and regex"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(InvalidRequestError, match="got none"):
        StructuredOutputsParams(json_object=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"json": 5}, "json must be a string or an object or a boolean, got 5"),
        ({"regex": ["a"]}, "regex must be a string"),
        ({"choice": "yes"}, "choice must be a list of strings"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, "must not hold an empty string"),
        ({"choice": ["a", 1]}, "must hold strings, got 1"),
        ({"choice": ["a"] * 10_001}, "10001 strings"),
        ({"json_object": "yes"}, "json_object must be a boolean"),
        ({"structural_tag": 1}, "structural_tag must be a string or an object"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        (
            {"json": {}, "disable_additional_properties": True},
            "disable_additional_properties is not supported",
        ),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
        ({"json": {}, "backtracking": True}, "backtracking is not known"),
    ],
)
def test_what_is_wrong_is_named(values, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        StructuredOutputsParams.from_mapping(values)
    assert caught.value.param == "structured_outputs"


def test_fields_that_are_null_are_left_out():
    params = StructuredOutputsParams.from_mapping({"regex": "a", "json": None, "_backend": None})
    assert params == StructuredOutputsParams(regex="a")
