"""What a request may say about tools."""

import pytest

from streamllm.errors import InvalidRequestError
from streamllm.server.protocol import ChatRequest
from streamllm.server.tools import read_tools


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def read(**fields):
    return read_tools(ChatRequest(messages=[], **fields))


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_can_be_called(tools, choice):
    assert not read(tools=tools, tool_choice=choice).may_call


def test_tools_may_be_called_unless_the_choice_says_otherwise():
    assert read(tools=[tool()]).mode == "auto" and read(tools=[tool()]).may_call
    assert not read(tools=[tool()], tool_choice="none").may_call
    required = read(tools=[tool("a"), tool("b")], tool_choice="required")
    assert required.must_call and required.is_enforced and len(required.functions) == 2


def test_a_named_function_is_the_only_one():
    use = read(tools=[tool("a"), tool("b")], tool_choice=named("b"))
    assert use.named and use.must_call and [function.name for function in use.functions] == ["b"]


def test_allowed_tools_are_some_of_them():
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named("b"), named("b")]},
    }
    use = read(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert use.must_call and not use.named and [function.name for function in use.functions] == ["b"]


def test_strict_functions_are_enforced_even_when_they_need_not_be_called():
    assert read(tools=[tool(strict=True)]).is_enforced
    assert not read(tools=[tool()]).is_enforced
    assert not read(tools=[tool(strict=True)], tool_choice="none").is_enforced


def test_a_function_without_parameters_takes_none():
    (function,) = read(tools=[tool()]).functions
    assert function.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("zz")}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": named("zz")}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "tools": [named("g")]}},
            "tool_choice.tools[0].function.name",
        ),
        ({"tools": [tool(), tool("g"), tool()]}, "tools[2].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
        ({"tools": [tool(description=7)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool(str(i)) for i in range(513)]}, "tools"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.param == param
