"""One real program for each of the libraries that people put between themselves and a server.

They are the optional extra ``clients``; without a library its programs are skipped.
"""

from __future__ import annotations

from typing import Literal

import pydantic
import pytest
from asking import MODEL

QUESTION = "Say something about the sea."


class Boat(pydantic.BaseModel):
    """A boat, and nothing else."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    colour: Literal["red", "blue"]


@pytest.fixture(scope="module")
def url(server) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="module")
def answer(client) -> str:
    """What the model says, by OpenAI's own client."""
    messages = [{"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    return reply.choices[0].message.content


# -- litellm -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        # Else its import asks the network for a list of prices.
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        return pytest.importorskip("litellm")


@pytest.fixture(params=["openai", "hosted_vllm"])
def litellm_request(request, url):
    """One conversation, as for OpenAI's API and as for a vLLM server."""
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
    }


def test_litellm_chats(litellm, litellm_request, answer):
    whole = litellm.completion(**litellm_request)
    assert whole.choices[0].message.content == answer and whole.usage.completion_tokens == 12
    chunks = litellm.completion(**litellm_request, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer


async def test_litellm_chats_asynchronously(litellm, litellm_request, answer):
    stream = await litellm.acompletion(**litellm_request, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer


def test_litellm_drops_nothing_that_vllm_knows(litellm, litellm_request, answer):
    hot = {**litellm_request, "temperature": 2, "seed": 1}
    assert litellm.completion(**hot).choices[0].message.content != answer
    assert litellm.completion(**hot, extra_body={"top_k": 1}).choices[0].message.content == answer


def test_litellm_structured_output(litellm, litellm_request):
    reply = litellm.completion(**{**litellm_request, "max_tokens": 80}, response_format=Boat)
    assert Boat.model_validate_json(reply.choices[0].message.content).colour in ("red", "blue")


def test_litellm_tells_errors_apart(litellm, litellm_request):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**litellm_request, "temperature": 9})
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**litellm_request, "messages": long})


# -- langchain -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_openai(url):
    module = pytest.importorskip("langchain_openai")

    def make(max_tokens: int = 12):
        return module.ChatOpenAI(
            model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0
        )

    return make


async def test_langchain_chats(chat_openai, answer):
    chat = chat_openai()
    reply = chat.invoke(QUESTION)
    assert reply.content == answer and reply.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == answer
    assert [reply.content for reply in chat.batch([QUESTION] * 4)] == [answer] * 4


def test_langchain_chains_a_prompt_and_a_parser(chat_openai, answer):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate.from_messages([("user", "Say something about the {topic}.")])
    assert (prompt | chat_openai() | StrOutputParser()).invoke({"topic": "sea"}) == answer


def test_langchain_structured_output(chat_openai):
    boat = chat_openai(80).with_structured_output(Boat, method="json_schema").invoke("A boat.")
    assert isinstance(boat, Boat)


def test_langchain_completes(url, client):
    module = pytest.importorskip("langchain_openai")
    model = module.OpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=8)
    reply = client.completions.create(model=MODEL, prompt="The sea is", temperature=0, max_tokens=8)
    assert model.invoke("The sea is") == reply.choices[0].text
    assert "".join(model.stream("The sea is")) == reply.choices[0].text


# -- llama-index ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai_like(url):
    module = pytest.importorskip("llama_index.llms.openai_like")

    def make(**fields):
        fields = {"is_chat_model": True, "max_tokens": 12, "context_window": 8192, **fields}
        return module.OpenAILike(model=MODEL, api_base=url, api_key="none", temperature=0, **fields)

    return make


async def test_llama_index_chats(openai_like, answer):
    from llama_index.core.llms import ChatMessage

    model, messages = openai_like(), [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content == answer
    assert "".join(chunk.delta for chunk in model.stream_chat(messages)) == answer
    stream = await model.astream_chat(messages)
    assert "".join([chunk.delta async for chunk in stream]) == answer


def test_llama_index_completes(openai_like, client):
    model = openai_like(is_chat_model=False)
    reply = client.completions.create(model=MODEL, prompt="The sea is", temperature=0, max_tokens=12)
    assert model.complete("The sea is").text == reply.choices[0].text
    assert "".join(chunk.delta for chunk in model.stream_complete("The sea is")) == reply.choices[0].text


def test_llama_index_structured_output(openai_like):
    model = openai_like(max_tokens=80, should_use_structured_outputs=True)
    assert isinstance(model.as_structured_llm(Boat).complete("A boat.").raw, Boat)


# -- instructor ----------------------------------------------------------------------------------------------


def test_instructor_gives_the_users_own_type(client):
    instructor = pytest.importorskip("instructor")
    asker = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "A boat."}],
        "temperature": 0,
        "max_tokens": 80,
        "max_retries": 1,
    }
    boat = asker.create(response_model=Boat, **request)
    assert isinstance(boat, Boat)
    *_, last = asker.create_partial(response_model=Boat, **request)
    assert last.model_dump() == boat.model_dump()
