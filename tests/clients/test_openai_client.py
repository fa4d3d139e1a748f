"""The unchanged ``openai`` client: every way to call it, every route that it knows, every kind of failure."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pydantic
import pytest
from asking import MODEL

MESSAGES = [{"role": "user", "content": "Say something about the sea."}]
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
COMPLETION = {"model": MODEL, "prompt": "The sea is", "temperature": 0, "max_tokens": 12}


class Boat(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    colour: Literal["red", "blue"]
    crew: int = pydantic.Field(ge=1, le=9)


@pytest.fixture
async def async_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# -- calling -------------------------------------------------------------------------------------------------


async def test_sync_async_streamed_or_not_say_the_same(client, async_client):
    whole = client.chat.completions.create(**CHAT)
    text = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 12
    assert (await async_client.chat.completions.create(**CHAT)).choices[0].message.content == text
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    pieces = []
    async for chunk in await async_client.chat.completions.create(**CHAT, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == text


async def test_completions_too(client, async_client):
    text = client.completions.create(**COMPLETION).choices[0].text
    assert (await async_client.completions.create(**COMPLETION)).choices[0].text == text
    assert "".join(c.choices[0].text for c in client.completions.create(**COMPLETION, stream=True)) == text


async def test_concurrent_async_streams_are_apart(async_client):
    async def ask(number: int) -> str:
        stream = await async_client.completions.create(
            **{**COMPLETION, "prompt": f"{number} times"}, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    alone = [await ask(number) for number in range(6)]
    assert await asyncio.gather(*map(ask, range(6))) == alone


def test_raw_and_streaming_responses(client):
    raw = client.chat.completions.with_raw_response.create(
        **CHAT, extra_headers={"X-Request-Id": "my-request"}
    )
    assert raw.status_code == 200 and raw.headers["x-request-id"] == "my-request"
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"


def test_the_clients_own_stream_helper(client):
    forced = {"structured_outputs": {"choice": ["It is wide, and blue, and deep."]}}
    with client.chat.completions.stream(**{**CHAT, "max_tokens": 40}, extra_body=forced) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") > 3 and kinds[-1] == "content.done"
    assert final.choices[0].message.content == "It is wide, and blue, and deep."


def test_leaving_a_stream_frees_it(client, server):
    stream = client.chat.completions.create(
        **{**CHAT, "max_tokens": 4000}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_quiet()


# -- structured output ---------------------------------------------------------------------------------------


async def test_parse_gives_the_users_own_type(client, async_client):
    request = {**CHAT, "max_tokens": 100, "response_format": Boat}
    boat = client.chat.completions.parse(**request).choices[0].message.parsed
    assert isinstance(boat, Boat) and 1 <= boat.crew <= 9 and len(boat.name) <= 8
    assert client.beta.chat.completions.parse(**request).choices[0].message.parsed == boat
    parsed = await async_client.chat.completions.parse(**request)
    assert parsed.choices[0].message.parsed == boat
    with client.chat.completions.stream(**request) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == boat


def test_parse_tells_of_a_text_that_was_cut(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**CHAT, "max_tokens": 3, "response_format": Boat})


# -- routes --------------------------------------------------------------------------------------------------


async def test_models(client, async_client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    assert [model.id async for model in async_client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("nope")
    assert error.value.code == "model_not_found"


async def test_embeddings_are_the_same_in_base64_and_in_floats(client, async_client):
    texts = ["The sea is blue.", "漢字 😀"]
    # Left to itself the client asks for base64 and decodes it.
    decoded = client.embeddings.create(model=MODEL, input=texts)
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [one.embedding for one in decoded.data] == [one.embedding for one in floats.data]
    assert [one.index for one in decoded.data] == [0, 1] and len(decoded.data[0].embedding) == 576
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 2
    (short,) = (await async_client.embeddings.create(model=MODEL, input=texts[0], dimensions=8)).data
    assert len(short.embedding) == 8 and sum(value**2 for value in short.embedding) == pytest.approx(1)
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=MODEL, input=texts, dimensions=10_000)
    assert error.value.param == "dimensions"


def test_routes_besides_openais_through_its_client(client, server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as root:
        body = {"prompt": "The sea is"}
        tokens = root.post("/tokenize", body=body, cast_to=object)["tokens"]
        assert root.post("/detokenize", body={"tokens": tokens}, cast_to=object)["prompt"] == body["prompt"]
        for path in ("/health", "/ready", "/ping"):
            assert root.get(path, cast_to=str, options={"headers": {"accept": "*/*"}}) == ""
        assert set(root.get("/version", cast_to=object)) == {"version"}
        assert root.get("/load", cast_to=object)["num_running"] == 0
    rendered = client.post(
        "/chat/completions/render", body={"model": MODEL, "messages": MESSAGES}, cast_to=object
    )
    assert rendered["prompt_token_ids"] and "the sea" in rendered["prompt_text"]


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields, error_type, param, code",
    [
        ({"model": "nope"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", None),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"n": "two"}, openai.BadRequestError, "n", None),
        (
            {"messages": [{"role": "user", "content": "word " * 20_000}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
def test_the_clients_errors(client, stream, fields, error_type, param, code):
    with pytest.raises(error_type) as error:
        client.chat.completions.create(**{**CHAT, **fields}, stream=stream)
    assert (error.value.param, error.value.code) == (param, code)
    assert error.value.body["message"] in str(error.value) and error.value.request_id


def test_routes_that_are_not_there(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.images.generate(model=MODEL, prompt="a boat")
    assert "/v1/images/generations" in error.value.body["message"]
