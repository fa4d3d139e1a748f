from __future__ import annotations

import copy
from typing import Any

import pytest
from sample_templates import CHATML, PARTS, PARTS_TEMPLATES, STRING_TEMPLATES

from streamllm.errors import InvalidRequestError
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.messages import check_template_kwargs, normalise_messages

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
STRING = ChatTemplate(CHATML, SPECIAL)
ONLY_PARTS = ChatTemplate(PARTS, SPECIAL)
EITHER = ChatTemplate(PARTS_TEMPLATES["parts_or_string"], SPECIAL)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def content_seen_by(template: ChatTemplate, content: Any) -> Any:
    return normalise_messages([{"role": "user", "content": content}], template)[0]["content"]


def test_parts_for_a_template_of_strings() -> None:
    assert content_seen_by(STRING, [text_part("a"), text_part("b")]) == "a\nb"
    assert content_seen_by(STRING, [text_part("a")]) == content_seen_by(STRING, "a") == "a"
    assert content_seen_by(STRING, ["a", {"type": "refusal", "refusal": "no"}]) == "a\nno"
    assert content_seen_by(STRING, []) == ""


def test_parts_for_a_template_of_parts() -> None:
    parts = [text_part("a"), {**text_part("b"), "cache_control": {"type": "ephemeral"}}]
    for template in (ONLY_PARTS, EITHER):
        assert content_seen_by(template, parts) == parts
    assert content_seen_by(ONLY_PARTS, "a") == [text_part("a")]
    assert content_seen_by(EITHER, "a") == "a"
    messages = [{"role": "user", "content": "hello"}]
    assert ONLY_PARTS.render(normalise_messages(messages, ONLY_PARTS)) == "<|user|>hello<|end|><|assistant|>"


@pytest.mark.parametrize("name", STRING_TEMPLATES)
def test_null_empty_and_absent_are_the_same(name: str) -> None:
    template = ChatTemplate(STRING_TEMPLATES[name], SPECIAL)
    question = {"role": "user", "content": "a"}
    answers = [
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b", "tool_calls": []},
        {"role": "assistant", "content": "b", "tool_calls": None, "name": None, "refusal": None},
    ]
    assert len({template.render(normalise_messages([question, answer], template)) for answer in answers}) == 1
    without = [{"role": "assistant", **content} for content in ({}, {"content": None}, {"content": []})]
    assert len({template.render(normalise_messages([question, answer], template)) for answer in without}) == 1


def test_tool_calls_of_a_message_without_content() -> None:
    template = ChatTemplate(STRING_TEMPLATES["qwen25"], SPECIAL)
    function = {"name": "f", "arguments": '{"city": "Brno", "days": [1, 2]}'}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
    ]
    before = copy.deepcopy(messages)
    text = template.render(normalise_messages(messages, template))
    assert '{"name": "f", "arguments": {"city": "Brno", "days": [1, 2]}}' in text
    assert messages == before


@pytest.mark.parametrize("arguments", ['{"city": "Br', "[" * 100_000, "not json"])
def test_arguments_that_were_cut_off_stay_text(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [call]}], STRING)
    assert message["tool_calls"] == [call]


def test_empty_arguments_are_an_empty_object() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": ""}}
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [call]}], STRING)
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_reasoning_has_the_name_that_templates_read() -> None:
    [message] = normalise_messages([{"role": "assistant", "content": "a", "reasoning": "r"}], STRING)
    assert message["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1].role"),
        ([{"role": "", "content": "b"}], "messages[0].role"),
        ([{"role": 7, "content": "b"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "assistant", "content": "a", "tool_calls": {"function": {}}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "a", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
@pytest.mark.parametrize("template", [STRING, ONLY_PARTS], ids=["string", "parts"])
def test_wrong_shapes_are_named(template: ChatTemplate, messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages(messages, template)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_template_kwargs() -> None:
    assert check_template_kwargs(None) == {}
    assert check_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    for name in ("messages", "add_generation_prompt", "tokenize", "tools", "chat_template"):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            check_template_kwargs({name: 1})
        assert caught.value.param == f"chat_template_kwargs.{name}"
