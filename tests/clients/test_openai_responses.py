"""The Responses API through the unchanged ``openai`` client."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import openai
import pydantic
import pytest
from asking import MODEL

ASK = {"model": MODEL, "input": "What is the weather in Paris?", "temperature": 0, "max_output_tokens": 60}
SEA = {"extra_body": {"structured_outputs": {"choice": ["It is wide, and blue, and deep."]}}}


class Boat(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    crew: int = pydantic.Field(ge=1, le=9)


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
FORCED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


def test_text_whole_and_streamed(client):
    whole = client.responses.create(**ASK, **SEA)
    assert (whole.status, whole.output_text) == ("completed", "It is wide, and blue, and deep.")
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**ASK, **SEA) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


async def test_asynchronously(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        texts = [
            event.delta
            async for event in await client.responses.create(**ASK, **SEA, stream=True)
            if event.type == "response.output_text.delta"
        ]
    assert "".join(texts) == "It is wide, and blue, and deep."


def test_an_answer_that_is_cut_off(client):
    answer = client.responses.create(**{**ASK, "max_output_tokens": 3})
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_parse_gives_the_users_own_type(client):
    boat = client.responses.parse(**ASK, text_format=Boat).output_parsed
    assert isinstance(boat, Boat) and 1 <= boat.crew <= 9
    with client.responses.stream(**ASK, text_format=Boat) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == boat


def test_turns_with_a_call(client):
    """Every turn only holds what is new; the server knows the rest."""
    first = client.responses.create(**ASK, **FORCED)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "Weather", "completed")
    Weather.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        **{**ASK, "input": [output]}, previous_response_id=first.id, tools=TOOLS, tool_choice="none", **SEA
    )
    assert second.output_text and second.usage.input_tokens > first.usage.input_tokens
    named = {"type": "function", "name": "Weather"}
    with client.responses.stream(
        **{**ASK, "input": "And in Oslo?"}, previous_response_id=second.id, tools=TOOLS, tool_choice=named
    ) as stream:
        events = list(stream)
        (again,) = stream.get_final_response().output
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == again.arguments and len(pieces) > 3
    Weather.model_validate(json.loads(again.arguments))
    # The same conversation, sent whole.
    items = [
        {"role": "user", "content": ASK["input"]},
        call.model_dump(exclude_none=True),
        output,
        second.output[0].model_dump(exclude_none=True),
        {"role": "user", "content": "And in Oslo?"},
    ]
    count = client.responses.input_tokens.count(model=MODEL, input=items, tools=TOOLS).input_tokens
    assert count == stream.get_final_response().usage.input_tokens


def test_what_is_kept(client):
    kept = client.responses.create(**ASK, **SEA, metadata={"run": "7"})
    assert client.responses.retrieve(kept.id).model_dump() == kept.model_dump()
    (item,) = client.responses.input_items.list(kept.id).data
    assert item.content[0].text == ASK["input"]
    passed = client.responses.create(**ASK, **SEA, store=False)
    client.responses.delete(kept.id)
    for response_id in (kept.id, passed.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(**ASK, previous_response_id=response_id)
        assert (error.value.param, error.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )


def test_in_the_background(client, server):
    made = client.responses.create(**ASK, **SEA, background=True)
    assert made.status == "queued"
    deadline = time.monotonic() + 30
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (found.status, found.output_text) == ("completed", "It is wide, and blue, and deep.")
    long = {**ASK, "max_output_tokens": 4000, "background": True, "extra_body": {"ignore_eos": True}}
    endless = client.responses.create(**long)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"
    server.wait_until_quiet()


def test_counting_tokens(client):
    counted = client.responses.input_tokens.count(model=MODEL, input=ASK["input"])
    assert counted.input_tokens == client.responses.create(**ASK, **SEA).usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": 5}]},
            "input[0].arguments",
        ),
    ],
)
def test_refusals_are_the_same_streamed_or_not(client, fields, param):
    bodies = []
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{**ASK, **fields}, stream=stream)
        assert error.value.param == param
        bodies.append(error.value.body)
    assert bodies[0] == bodies[1]
