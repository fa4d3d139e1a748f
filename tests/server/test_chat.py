"""Chat completions as the openai client and raw HTTP see them."""

from __future__ import annotations

import asyncio

import openai
import pytest
from serving import MODEL, TEXT, events, run_server, text_script

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def streamed(server, **fields):
    body = {"messages": MESSAGES, "stream": True, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return events(response)


def joined(chunks, index=0):
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_whole_answer(client, server):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "The ď",
        "length",
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    prompt = "[user] hello\n"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == len(prompt) + 6
    server.canary()


def test_streamed_answer(client):
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=60, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == TEXT.encode()[:60].decode("utf-8", "replace")


async def test_async_client_with_concurrent_streams(server):
    async def one(client, length):
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=length, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        texts = await asyncio.gather(*(one(client, length) for length in range(30, 46)))
    for length, text in zip(range(30, 46), texts, strict=True):
        assert text == TEXT.encode()[:length].decode("utf-8", "replace")


def test_chunk_shape(server):
    chunks = streamed(server, max_tokens=24)
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == MODEL
        assert "usage" not in chunk
        (choice,) = chunk["choices"]
        assert choice["index"] == 0
        assert "finish_reason" in choice
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert all(choice["delta"]["content"] and choice["finish_reason"] is None for choice in middle)
    assert last["finish_reason"] == "length"


def test_no_delta_holds_half_a_character(server):
    chunks = streamed(server, max_tokens=len(TEXT.encode()))
    assert joined(chunks) == TEXT
    assert all("\ufffd" not in joined([chunk]) for chunk in chunks)


@pytest.mark.parametrize("n", [1, 4])
def test_usage_chunk(server, n):
    whole = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "n": n}).json()
    assert all("usage" not in chunk for chunk in streamed(server, max_tokens=8, n=n))
    *others, last = streamed(server, max_tokens=8, n=n, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 8 * n
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)


def test_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(server, max_tokens=8, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8


def test_choices_are_complete_and_apart(server):
    chunks = streamed(server, max_tokens=12, n=4)
    whole = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "n": 4}).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for index in range(4):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine].count("length") == 1
        assert mine[-1]["finish_reason"] == "length"
        assert joined(chunks, index) == whole["choices"][index]["message"]["content"]
        assert joined(chunks, index).rstrip("\ufffd") and TEXT[index:].startswith(
            joined(chunks, index).rstrip("\ufffd")
        )


def test_eos_and_stop_reasons():
    with run_server(script=text_script("ABCDEFGHIJ", ends=True)) as server:

        def finish(**fields):
            body = {"messages": MESSAGES, **fields}
            whole = server.post("/v1/chat/completions", body).json()["choices"][0]
            chunks = streamed(server, **fields)
            last = chunks[-1]["choices"][0]
            text = whole["message"]["content"]
            assert (joined(chunks), last["finish_reason"], last["stop_reason"]) == (
                text, whole["finish_reason"], whole["stop_reason"],
            )  # fmt: skip
            return text, whole["finish_reason"], whole["stop_reason"]

        assert finish() == ("ABCDEFGHIJ", "stop", None)
        assert finish(stop=["DEFG"]) == ("ABC", "stop", "DEFG")
        assert finish(stop=["DEFG"], include_stop_str_in_output=True) == ("ABCDEFG", "stop", "DEFG")
        assert finish(stop_token_ids=[ord("E")]) == ("ABCD", "stop", ord("E"))
        assert finish(stop=None) == finish(stop=[]) == ("ABCDEFGHIJ", "stop", None)
        assert finish(max_tokens=4, max_completion_tokens=2) == ("AB", "length", None)
        server.canary()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    length = len("The ďá 漢字 😀".encode())
    arguments = dict(model=MODEL, messages=MESSAGES, max_tokens=length, logprobs=True, top_logprobs=3)
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        content = [
            c for chunk in chunks if chunk.choices[0].logprobs for c in chunk.choices[0].logprobs.content
        ]
    else:
        content = client.chat.completions.create(**arguments).choices[0].logprobs.content
    assert len(content) == length
    assert b"".join(bytes(item.bytes) for item in content).decode() == "The ďá 漢字 😀"
    assert content[0].token == "T"
    assert content[4].token == "bytes:\\xc4"
    for item in content:
        assert item.logprob == -0.5
        assert [other.logprob for other in item.top_logprobs] == [-0.5, -9999.0, -9999.0]


def test_logprobs_without_alternatives(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert [item.top_logprobs for item in answer.choices[0].logprobs.content] == [[], []]
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert answer.choices[0].logprobs is None


def test_eos_has_no_bytes():
    with run_server(script=text_script("hey", ends=True)) as server:
        body = {"messages": MESSAGES, "logprobs": True}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert [bytes(item["bytes"]) for item in content] == [b"h", b"e", b"y", b""]
        assert content[-1]["token"] == "<eos>"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_objekt"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
    ],
)
def test_refusals_name_the_field_streamed_or_not(server, fields, param):
    body = {"messages": MESSAGES, **fields}
    bodies = [server.post("/v1/chat/completions", {**body}), None]
    if "stream_options" not in fields:
        bodies[1] = server.post("/v1/chat/completions", {**body, "stream": True})
        assert bodies[0].content == bodies[1].content
    response = bodies[0]
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param.split(".")[-1].split("[")[0] in error["message"] or "prompt" in error["message"]
    assert error["type"] == "invalid_request_error"
    server.canary()


def test_neutral_values_are_accepted(server):
    neutral = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "use_beam_search": False,
        "bad_words": [], "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "stop": None, "seed": None, "logprobs": False, "top_logprobs": 0,
        "stream_options": None, "priority": 0, "length_penalty": 1.0, "an_unknown_field": {"x": 1},
    }  # fmt: skip
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **neutral})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "fields",
    [{"echo": True}, {"documents": [{}]}, {"stream_interval": True}],
)
def test_what_is_not_supported_yet_is_refused_by_name(server, fields):
    error = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}).json()["error"]
    assert error["message"].startswith(f"{next(iter(fields))} is not supported yet")


def test_history_with_empty_tool_calls_and_absent_content(server):
    def prompt_tokens(message):
        body = {"messages": [*MESSAGES, message], "max_tokens": 1}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"]

    plain = prompt_tokens({"role": "assistant", "content": "hi"})
    assert prompt_tokens({"role": "assistant", "content": "hi", "tool_calls": []}) == plain
    assert prompt_tokens({"role": "assistant", "content": [{"type": "text", "text": "hi"}]}) == plain
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    as_text = '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": "}\n</tool_call>'
    with_call = prompt_tokens({"role": "assistant", "content": None, "tool_calls": [call]})
    assert with_call == plain - 2 + len(as_text)
    assert prompt_tokens({"role": "assistant"}) == plain - 2


def test_model_without_template():
    with run_server(chat_template=False) as server:
        response = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
        server.canary()


def test_context_length_exceeded(client):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 4200}])
    assert refusal.value.code == "context_length_exceeded"
    assert "4096" in str(refusal.value)


def test_sampling_defaults_of_the_model():
    from streamllm.server import generation
    from streamllm.server.protocol import ChatRequest

    class Engine:
        default_sampling = {"temperature": 0.2, "top_k": 7, "repetition_penalty": 1.1}

    def params(**fields):
        request = ChatRequest(messages=MESSAGES, **fields)
        return generation.generation_params(Engine(), request, max_tokens=None, logprobs=None, renamed={})

    assert (params().temperature, params().top_k, params().top_p) == (0.2, 7, 1.0)
    assert (params(temperature=0.9, top_k=-1).temperature, params(top_k=-1).top_k) == (0.9, 0)
