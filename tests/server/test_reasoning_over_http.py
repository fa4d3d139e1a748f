"""Reasoning over HTTP, of a model that writes what a script says."""

from __future__ import annotations

import openai
import pytest
from serving import MODEL, events, run_server, text_script

from streamllm.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "<think>\nThey greet <me>.\n</think>\n\nHello!"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPENING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
EFFORT = "[{{ reasoning_effort }}{{ enable_thinking }}]"


@pytest.fixture(scope="module")
def thinking():
    """A model that thinks and then answers."""
    with run_server(
        script=text_script(TEXT, ends=True), chat_template=TEMPLATE, reasoning_parser="qwen3"
    ) as server:
        yield server


def message(server, **fields):
    body = {"messages": MESSAGES, "max_tokens": 200, **fields}
    if not fields.get("stream"):
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        return choice["message"].get("reasoning"), choice["message"]["content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server.post("/v1/chat/completions", body))]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    texts = [[d[name] for d in deltas if d.get(name)] for name in ("reasoning", "content")]
    return "".join(texts[0]) or None, "".join(texts[1])


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_split_from_the_answer(thinking, stream):
    assert message(thinking, stream=stream) == ("They greet <me>.", "Hello!")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(thinking, stream):
    assert message(thinking, stream=stream, include_reasoning=False) == (None, "Hello!")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_while_thinking_has_no_content(thinking, stream):
    assert message(thinking, stream=stream, max_tokens=12) == ("They", "")


def test_the_client_sees_it(thinking):
    with openai.OpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=200)
    assert answer.choices[0].message.reasoning_content == "They greet <me>."


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_may_begin_the_reasoning(stream):
    script = text_script("Hm.</think>Hi", ends=True)
    with run_server(script=script, chat_template=OPENING, reasoning_parser="deepseek_r1") as server:
        assert message(server, stream=stream) == ("Hm.", "Hi")
        off = message(server, stream=stream, chat_template_kwargs={"enable_thinking": False})
        assert off == (None, "Hm.</think>Hi")
        assert message(server, stream=stream, reasoning_effort="none") == off


def test_the_notation_is_found_in_the_template():
    with run_server(script=text_script(TEXT, ends=True), chat_template=OPENING) as server:
        assert message(server) == ("They greet <me>.", "Hello!")
    with run_server(
        script=text_script(TEXT, ends=True), chat_template=OPENING, reasoning_parser="none"
    ) as server:
        assert message(server) == (None, TEXT)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"reasoning_effort": "low"}, "[lowTrue]"),
        ({"reasoning_effort": "none"}, "[noneFalse]"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "[noneTrue]"),
        ({}, "[]"),
    ],
)
def test_effort_is_told_to_the_template(fields, prompt):
    with run_server(chat_template=EFFORT) as server:
        answer = server.post("/v1/chat/completions/render", {"messages": MESSAGES, **fields})
        assert answer.json()["prompt_text"] == prompt


@pytest.mark.parametrize("settings", [{"reasoning_parser": "zz"}, {"tool_call_parser": "zz"}])
def test_a_parser_that_does_not_exist_is_refused_at_start(settings):
    with pytest.raises(ConfigError, match="zz is not known"), run_server(**settings):
        pass
