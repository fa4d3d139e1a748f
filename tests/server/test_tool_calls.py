"""Tool calls and reasoning over HTTP, of a model that writes what a script says."""

from __future__ import annotations

import json

import openai
import pytest
from serving import MODEL, events, run_server, text_script

MESSAGES = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 3}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
BROKEN = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "objekt"}}}},
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ko"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def calling():
    """A model whose every answer is :data:`CALLS`."""
    with run_server(script=text_script(CALLS, ends=True)) as server:
        yield server


def ask(server, *, stream, **fields):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        values = {"model": MODEL, "messages": MESSAGES, "max_tokens": 400, "tools": [WEATHER, TIME], **fields}
        if not stream:
            return client.chat.completions.create(**values).choices[0]
        with client.chat.completions.stream(**values) as chunks:
            for _ in chunks:
                pass
            return chunks.get_final_completion().choices[0]


def shown(choice):
    calls = choice.message.tool_calls or []
    return (
        choice.finish_reason,
        choice.message.content,
        [(call.function.name, json.loads(call.function.arguments)) for call in calls],
    )


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_split_from_the_text(calling, stream):
    expected = [("weather", {"city": "Ko"}), ("time", {})]
    assert shown(ask(calling, stream=stream)) == ("tool_calls", "Let me see.", expected)


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_there_is_one(calling, stream):
    choice = ask(calling, stream=stream, parallel_tool_calls=False)
    assert shown(choice) == ("tool_calls", "Let me see.", [("weather", {"city": "Ko"})])


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_to_call_the_text_stays_as_it_is(calling, fields, stream):
    assert shown(ask(calling, stream=stream, **fields)) == ("stop", CALLS, [])


def test_deltas_of_parallel_calls(calling):
    body = {"messages": MESSAGES, "max_tokens": 400, "tools": [WEATHER, TIME], "stream": True}
    chunks = events(calling.post("/v1/chat/completions", body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in starts] == [
        (0, "function", "weather"),
        (1, "function", "time"),
    ]
    assert len({call["id"] for call in starts}) == 2
    assert all(set(call) == {"index", "function"} for call in calls if "id" not in call)
    assert calls.index(starts[1]) > max(i for i, call in enumerate(calls) if call["index"] == 0)
    assert len([call for call in calls if call["index"] == 0]) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_keeps_its_arguments_and_says_so(calling, stream):
    length = CALLS.index('Ko"') + 2
    body = {"messages": MESSAGES, "max_tokens": length, "tools": [WEATHER, TIME], "stream": stream}
    response = calling.post("/v1/chat/completions", body)
    if not stream:
        (choice,) = response.json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "Ko', "length")
        return
    chunks = events(response)
    pieces = [
        call["function"]["arguments"]
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert "".join(pieces) == '{"city": "Ko'
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_each_choice_is_read_by_itself(calling):
    """The second choice begins one character later."""
    body = {"messages": MESSAGES, "max_tokens": 400, "tools": [WEATHER, TIME], "n": 2}
    first, second = calling.post("/v1/chat/completions", body).json()["choices"]
    assert first["message"]["content"] == "Let me see." and second["message"]["content"] == "et me see."
    assert len(first["message"]["tool_calls"]) == len(second["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_call_are_those_of_its_tokens(calling, stream):
    body = {"messages": MESSAGES, "max_tokens": 400, "tools": [WEATHER, TIME], "logprobs": True}
    response = calling.post("/v1/chat/completions", body | {"stream": stream})
    choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
    entries = [entry for c in choices for entry in (c["logprobs"] or {"content": []})["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == CALLS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "zz"}}}, "tool_choice.function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tool_choice": "required", "tools": [BROKEN]}, "tools"),
        ({"use_beam_search": True, "n": 2}, "tools"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)
def test_refusals(calling, fields, param, stream):
    if stream and "use_beam_search" in fields:
        pytest.skip("beams cannot be streamed anyway")
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME], "stream": stream, **fields}
    response = calling.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    calling.canary()


def test_a_template_whose_notation_is_not_known_refuses_tools():
    with run_server(chat_template="{{ tools }}{{ messages[0].content }}") as server:
        body = {"messages": MESSAGES, "tools": [TIME]}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        assert "--tool-call-parser" in response.json()["error"]["message"]
        assert server.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200
