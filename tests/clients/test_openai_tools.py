"""Tools through the unchanged ``openai`` client; calls are forced by grammar, so any model makes them."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from asking import MODEL

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


class ThrowDie(pydantic.BaseModel):
    """Throw a die."""

    sides: Literal[6, 20]


KINDS = {"Weather": Weather, "throw-die": ThrowDie}
TOOLS = [openai.pydantic_function_tool(kind, name=name) for name, kind in KINDS.items()]
NAMED = {"type": "function", "function": {"name": "throw-die"}}
ONE = {"tools": TOOLS, "parallel_tool_calls": False}

Call = tuple[str, dict[str, Any]]
Seen = tuple[str, str | None, list[Call]]
"""Finish reason, content, and calls with their arguments read."""


def seen(choice: Any) -> Seen:
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) and all(call.type == "function" for call in calls)
    read = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return choice.finish_reason, choice.message.content, read


def whole_and_streamed(client: openai.OpenAI, **fields: Any) -> Seen:
    """What a request is answered, which the client's own accumulator must make of its stream too."""
    whole = seen(client.chat.completions.create(**CHAT, **fields).choices[0])
    with client.chat.completions.stream(**CHAT, **fields) as stream:
        for _ in stream:
            pass
        assert seen(stream.get_final_completion().choices[0]) == whole
    return whole


def check(calls: list[Call]) -> None:
    """Arguments are what the tool's schema says."""
    for name, arguments in calls:
        KINDS[name].model_validate(arguments)


def test_a_call_may_be_made(client):
    reason, content, calls = whole_and_streamed(client, **ONE)
    check(calls)
    assert reason == ("tool_calls" if calls else "stop") and (calls or content)


def test_a_call_must_be_made(client):
    reason, content, calls = whole_and_streamed(client, **ONE, tool_choice="required")
    assert (reason, content, len(calls)) == ("tool_calls", None, 1)
    check(calls)


def test_the_named_call_must_be_made(client):
    reason, content, calls = whole_and_streamed(client, tools=TOOLS, tool_choice=NAMED)
    assert (reason, content, [name for name, _ in calls]) == ("stop", None, ["throw-die"])
    check(calls)


@pytest.mark.parametrize("tools", [TOOLS, [], openai.omit])
def test_no_call_is_made_of_a_text_that_looks_like_one(client, tools):
    text = '<tool_call>\n{"name": "Weather", "arguments": {}}\n</tool_call>'
    forced = {"structured_outputs": {"choice": [text]}}
    given = {"tools": tools, "tool_choice": "none"} if tools is not openai.omit else {"tool_choice": "none"}
    assert whole_and_streamed(client, **given, extra_body=forced) == ("stop", text, [])


@pytest.mark.slow
def test_parallel_calls(client):
    """Of six answers that are drawn hot, some make several calls; each is in its own choice, in order."""
    request = {**CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 1.3, "seed": 3, "n": 6}
    whole = client.chat.completions.create(**request).choices
    streamed: list[list[dict[str, str]]] = [[] for _ in whole]
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                calls = streamed[choice.index]
                if call.index == len(calls):
                    assert call.id and call.type == "function" and call.function.name
                    calls.append({"name": call.function.name, "arguments": ""})
                else:
                    assert (call.index, call.id, call.function.name) == (len(calls) - 1, None, None)
                calls[call.index]["arguments"] += call.function.arguments
    for choice, calls in zip(whole, streamed, strict=True):
        functions = [call.function for call in choice.message.tool_calls]
        assert calls == [{"name": each.name, "arguments": each.arguments} for each in functions]
        if choice.finish_reason == "tool_calls":
            check(seen(choice)[2])
    assert max(map(len, streamed)) > 1


def test_parse_gives_the_users_own_types(client):
    request = {**CHAT, **ONE, "tool_choice": "required"}
    (call,) = client.chat.completions.parse(**request).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, KINDS[call.function.name])
    with client.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        (again,) = stream.get_final_completion().choices[0].message.tool_calls
    assert again.function.parsed_arguments == call.function.parsed_arguments
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@pytest.mark.parametrize("length", [5, 22])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_says_so(client, length, stream):
    request = {**CHAT, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": length}
    if not stream:
        (choice,) = client.chat.completions.create(**request).choices
        assert choice.finish_reason == "length"
        pieces = [call.function.arguments for call in choice.message.tool_calls or []]
    else:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        pieces = [call.function.arguments for call in calls]
    assert '{"sides": 20}'.startswith("".join(pieces)[:8])


def test_results_are_read(client):
    """A second turn: the model reads what the tools gave, whatever way the first one's message is written."""
    call = client.chat.completions.create(**CHAT, **ONE, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"}
    plain = {"role": "assistant", "tool_calls": [each.model_dump() for each in call.tool_calls]}
    counts = set()
    for message in (call, plain, {**plain, "content": None}, {**plain, "content": ""}):
        answer = client.chat.completions.create(
            **{**CHAT, "messages": [*MESSAGES, message, result], "max_tokens": 4},
            tools=TOOLS,
            tool_choice="none",
        )
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
        counts.add(answer.usage.prompt_tokens)
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "zz"}}}, "tool_choice.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_refusals_are_the_same_streamed_or_not(client, fields, param):
    bodies = []
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**CHAT, **fields, stream=stream)
        assert error.value.param == param
        bodies.append(error.value.body)
    assert bodies[0] == bodies[1]
