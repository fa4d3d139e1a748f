"""``suffix``: the prompt as the model gets it, and what contradicts it."""

from __future__ import annotations

import pytest

from streamllm.text.fill_in_middle import MiddleMarks

MARKS = MiddleMarks(1, 2, 3)


@pytest.fixture
def with_marks(monkeypatch):
    monkeypatch.setattr("streamllm.server.suffix.middle_marks", lambda tokenizer: MARKS)


@pytest.mark.parametrize(
    ("prompt", "prefixes"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ("", [b""]),
        (["", "c"], [b"", b"c"]),
    ],
)
def test_the_middle_is_asked_for(server, with_marks, prompt, prefixes):
    body = {"prompt": prompt, "suffix": "yz", "max_tokens": 4, "return_token_ids": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    expected = [[1, *prefix, 2, *b"yz", 3] for prefix in prefixes]
    assert [choice["prompt_token_ids"] for choice in answer.json()["choices"]] == expected
    rendered = server.post("/v1/completions/render", body).json()["data"]
    assert [prompt["prompt_token_ids"] for prompt in rendered] == expected
    server.canary()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"suffix": "y" * 5000}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": [[97], [999]]}, "prompt[1]"),
        # Each fits, and together they do not.
        ({"prompt": "x" * 2050, "suffix": "y" * 2050}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_contradicts_it(server, with_marks, fields, param, stream):
    body = {"prompt": "ab", "suffix": "yz", "max_tokens": 4, "stream": stream} | fields
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    server.canary()


def test_a_model_without_the_tokens_says_so(server):
    answer = server.post("/v1/completions", {"prompt": "ab", "suffix": "yz"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "ab", "suffix": "", "max_tokens": 1}).status_code == 200
    server.canary()
