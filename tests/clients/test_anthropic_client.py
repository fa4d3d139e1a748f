"""The Messages API through the unchanged ``anthropic`` client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from asking import MODEL
from helpers.live_server import LiveServer

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 60,
    # Newer clients know the field no more; the API still takes it.
    "extra_body": {"temperature": 0},
}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
DIE = {
    "name": "throw_die",
    "input_schema": {
        "type": "object",
        "properties": {"sides": {"enum": [6, 20]}},
        "required": ["sides"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def without_ids(blocks: list[Any]) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id"}) for block in blocks]


def streamed(claude: Any, **fields: Any) -> tuple[list[str], Any]:
    """The kinds of the client's events, and the message that it has accumulated."""
    with claude.messages.stream(**{**ASK, **fields}) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def test_text_whole_and_streamed(claude):
    short = {**ASK, "max_tokens": 12, "system": "Be brief."}
    whole = claude.messages.create(**short)
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 12)
    assert whole._request_id
    with claude.messages.stream(**short) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


async def test_asynchronously(claude, server):
    whole = claude.messages.create(**{**ASK, "max_tokens": 12})
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**{**ASK, "max_tokens": 12}) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == whole.content[0].text


def test_stop_sequences(claude):
    text = claude.messages.create(**{**ASK, "max_tokens": 12}).content[0].text
    word = text.split()[2]
    message = claude.messages.create(**ASK, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "throw_die"}]
)
def test_a_tool_must_be_used(claude, choice):
    fields = {"tools": [WEATHER, DIE], "tool_choice": choice}
    whole = claude.messages.create(**ASK, **fields)
    (use,) = whole.content
    assert (whole.stop_reason, use.type) == ("tool_use", "tool_use")
    if choice["type"] == "tool":
        assert use.name == "throw_die"
    assert use.input in ([{"city": "Paris"}, {"city": "Oslo"}, {"sides": 6}, {"sides": 20}])
    kinds, final = streamed(claude, **fields)
    assert without_ids(final.content) == without_ids(whole.content) and final.stop_reason == "tool_use"
    assert kinds.count("input_json") > 3 and kinds[0] == "message_start" and kinds[-1] == "message_stop"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(
        **{**ASK, "messages": turns, "max_tokens": 4}, tools=[WEATHER, DIE], tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text"
    assert answer.usage.cache_read_input_tokens > 0


def test_counting_tokens(claude):
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    usage = claude.messages.create(**{**ASK, "max_tokens": 1}).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error_type", "place"),
    [
        ({"model": "nope"}, "NotFoundError", "nope"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"extra_body": {"temperature": 9}}, "BadRequestError", "temperature"),
        ({"tools": [WEATHER, WEATHER]}, "BadRequestError", "tools[1].name"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "BadRequestError", "messages"),
    ],
)
def test_errors(claude, stream, fields, error_type, place):
    with pytest.raises(getattr(anthropic, error_type)) as error:
        claude.messages.create(**{**ASK, **fields}, stream=stream)
    assert place in error.value.body["error"]["message"]
    assert error.value.request_id == error.value.body["request_id"]


@pytest.mark.slow
def test_keys():
    """A server of its own: a key is asked for as Anthropic's clients send it."""
    with LiveServer("--api-key", "secret") as guarded:
        with (
            anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as error,
        ):
            client.messages.create(**ASK)
        assert error.value.body["error"]["type"] == "authentication_error"
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=guarded.url, max_retries=0, **given) as client:
                assert client.messages.create(**{**ASK, "max_tokens": 1}).content
