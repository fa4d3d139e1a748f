"""Text completions: prompts in every form, choices in order, logprobs in the older format."""

from __future__ import annotations

import re

import openai
import pytest
from serving import MODEL, TEXT, events


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_sixteen_tokens_by_default(client, server):
    answer = client.completions.create(model=MODEL, prompt="hi")
    assert answer.choices[0].text == TEXT.encode()[:16].decode("utf-8", "replace")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)
    server.canary()


@pytest.mark.parametrize(
    "prompt, prompt_tokens",
    [("hello", 5), (["hello"], 5), ([104, 105], 2), ([[104, 105]], 2), (["a", "bcd"], 4), ([[1], [2, 3]], 3)],
)
def test_prompt_forms(server, prompt, prompt_tokens):
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "n": 2}).json()
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    count = 2 * (len(prompt) if is_batch else 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    # The script starts one character later for each choice of a prompt.
    assert [choice["text"] for choice in answer["choices"]] == ["Th", "he"] * (count // 2)
    assert answer["usage"]["completion_tokens"] == 2 * count


def test_streamed_batch_equals_the_whole(server):
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 40, "stream_options": {"include_usage": True}}
    chunks = events(server.post("/v1/completions", {**body, "stream": True}))
    body.pop("stream_options")
    whole = server.post("/v1/completions", body).json()
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in mine[:-1])
        assert all(part["text"] for part in mine[:-1])


@pytest.mark.parametrize("prompt", ["say: ", list(b"say: ")])
def test_echo(server, prompt):
    body = {"prompt": prompt, "echo": True, "max_tokens": 3}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "say: The"
    chunks = events(server.post("/v1/completions", {**body, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "say: The"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, stream):
    body = {"prompt": "x", "max_tokens": 14, "logprobs": 2}
    if stream:
        parts = [
            c["choices"][0]["logprobs"]
            for c in events(server.post("/v1/completions", {**body, "stream": True}))
        ]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:5] == ["T", "h", "e", " ", "bytes:\\xc4"]
    assert logprobs["token_logprobs"] == [-0.5] * 14
    assert logprobs["top_logprobs"][0] == {"T": -0.5, "U": -9999.0}
    # "The ďá 漢": offsets count characters.
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 7, 7, 8, 8]


def test_no_logprobs_unless_asked_for(client):
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].logprobs is None
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=1, logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs == [{"T": -0.5}]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["", "a"]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": [[1], [True]]}, "prompt[1][0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 4097}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 10**6}, "n"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": [None]}, "stop[0]"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_refusals_name_the_field(server, fields, param):
    whole = server.post("/v1/completions", {"prompt": "x", **fields})
    streamed = server.post("/v1/completions", {"prompt": "x", "stream": True, **fields})
    assert whole.status_code == 400, whole.text
    assert whole.content == streamed.content
    error = whole.json()["error"]
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert not re.search("<class|None|True|False", error["message"])
    server.canary()


def test_best_of_equal_to_n_is_accepted(server):
    assert server.post("/v1/completions", {"prompt": "x", "n": 2, "best_of": 2}).status_code == 200
