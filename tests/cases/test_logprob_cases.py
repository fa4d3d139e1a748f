"""L: logprobs."""

from __future__ import annotations

import pytest
from case_server import CHAT, COMPLETIONS, forced, minimal


@pytest.mark.parametrize(
    "fields, top",
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": True, "top_logprobs": 21}, None),
        ({"logprobs": True, "top_logprobs": -1}, None),
        ({"logprobs": True, "top_logprobs": "5"}, None),
        ({"top_logprobs": 5}, None),
    ],
)
def test_l02_logprobs_of_a_chat(server, fields, top):
    body = minimal(CHAT, **fields)
    if top is None:
        assert server.refusal(CHAT, body)["param"] == "top_logprobs"
        return
    content = server.answer(CHAT, body)["choices"][0]["logprobs"]["content"]
    streamed = [e["choices"][0]["logprobs"] for e in server.events(CHAT, body)]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content
    for entry in content:
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == top
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}


def test_l02_no_logprobs(server):
    body = minimal(CHAT, logprobs=False, top_logprobs=0)
    assert server.answer(CHAT, body)["choices"][0]["logprobs"] is None


def test_l03_bytes_of_tokens(server):
    text = "é😀 漢👩‍👩‍👧 x"
    body = forced(text, CHAT, logprobs=True, top_logprobs=5)
    choice = server.answer(CHAT, body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == text
    assert b"".join(bytes(entry["bytes"]) for entry in content).startswith(text.encode())
    shown = [alternative for entry in content for alternative in (entry, *entry["top_logprobs"])]
    assert not any(mark in alternative["token"] for alternative in shown for mark in "Ġ▁\ufffd")
    # Bytes that are no text by themselves are written as OpenAI does: bytes:\xf0\x9f.
    assert any(alternative["token"].startswith("bytes:") for alternative in shown)
    for alternative in shown:
        if alternative["bytes"] and not alternative["token"].startswith("bytes:"):
            assert alternative["token"].encode() == bytes(alternative["bytes"])


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"allowed_token_ids": [500]},
        {"structured_outputs": {"choice": ["yes"]}},
        {"echo": True, "top_k": 1},
        {"logit_bias": {"500": -100}},
        {"temperature": 2, "top_p": 0.01},
    ],
)
def test_l05_impossible_alternatives_leave_valid_json(server, fields):
    body = minimal(COMPLETIONS, logprobs=5, **fields)
    assert server.answer(COMPLETIONS, body)["choices"][0]["logprobs"]["token_logprobs"]
    assert server.events(COMPLETIONS, body)


def test_l06_prompt_logprobs_are_those_of_a_cold_cache(server):
    text = "a sentence that is not short at all, " * 12
    body = minimal(COMPLETIONS, prompt=text, max_tokens=1, prompt_logprobs=1, cache_salt="cold")
    answer = server.answer(COMPLETIONS, body)
    cold = answer["choices"][0]["prompt_logprobs"]
    assert len(cold) == answer["usage"]["prompt_tokens"] > 80 and cold[0] is None
    plain = {name: value for name, value in body.items() if name not in ("prompt_logprobs", "cache_salt")}
    for _ in range(2):
        cached = server.answer(COMPLETIONS, plain)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 80
    warm = server.answer(COMPLETIONS, plain | {"prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]
    assert warm == cold
    echoed = server.answer(COMPLETIONS, plain | {"echo": True, "logprobs": 1})["choices"][0]["logprobs"]
    values = [next(iter(entry.values()))["logprob"] for entry in cold[1:]]
    assert echoed["token_logprobs"][1 : len(cold)] == pytest.approx(values, abs=1e-4)
    response = server.post(COMPLETIONS, body | {"stream": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"


def test_l08_a_prompt_is_scored_and_nothing_generated(server):
    body = {"prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.answer(COMPLETIONS, body)
    choice = answer["choices"][0]
    assert choice["text"] == "Your answer: Yes" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert server.refusal(COMPLETIONS, {"prompt": "a", "max_tokens": 0})["param"] == "max_tokens"
