"""Reasoning split from the answer, alone and in front of a tool parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import TOOLS, WEATHER, hermes

from streamllm.errors import ConfigError
from streamllm.parsers.events import Content, Reasoning, collect, merged
from streamllm.parsers.registry import output_parser, reasoning_format, tool_parser

TEXTS = [
    # format, opened by the prompt, text, reasoning, content
    ("qwen3", False, "<think>\nHm.\n\nSo.\n</think>\n\nYes. ", "Hm.\n\nSo.", "Yes. "),
    ("qwen3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", False, "<think>\n\n</think>\n\nYes.", None, "Yes."),
    ("qwen3", False, " \nYes. <think>no</think>", None, " \nYes. <think>no</think>"),
    ("qwen3", False, "<thin air", None, "<thin air"),
    (
        "qwen3",
        False,
        "<think>a < b </thin </think >\n</think>c</think>",
        "a < b </thin </think >",
        "c</think>",
    ),
    ("qwen3", True, "never ends </thin", "never ends </thin", None),
    ("deepseek_r1", None, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("smollm3", False, "<think>a</think>b", "a", "b"),
    ("mistral", False, "[THINK]x[/THI][/THINK]y", "x[/THI]", "y"),
    ("granite", False, "Here is my thought process: a\nHere is my response:\nb", "a", "b"),
    ("granite", False, "Here's my thought process: a Here's my response: b", "a", "b"),
    ("granite", False, "Here is my answer.", None, "Here is my answer."),
    ("<r>, </r>", False, "<r>a</r>b", "a", "b"),
    ("qwen3", False, "", None, None),
    ("qwen3", True, "", None, None),
]


def parse(name, opened, pieces):
    parser = reasoning_format(name).parser(opened=opened)
    return list(merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish(False)))


@pytest.mark.parametrize(("name", "opened", "text", "reasoning", "content"), TEXTS)
def test_reasoning_and_content_wherever_the_text_is_cut(name, opened, text, reasoning, content):
    whole = parse(name, opened, [text])
    message = collect(whole)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert parse(name, opened, list(text)) == whole
    for cut in range(1, len(text)):
        assert parse(name, opened, [text[:cut], text[cut:]]) == whole


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "a", "\n "])), st.booleans())
def test_no_text_is_lost_but_tags_and_whitespace(parts, opened):
    text = "".join(parts)
    message = collect(parse("qwen3", opened, parts))
    assert parse("qwen3", opened, [text]) == parse("qwen3", opened, list(text))
    kept = "".join(((message.reasoning or "") + (message.content or "")).split())
    bare = "".join(text.split())
    for tag in ("<think>", "</think>"):
        bare, kept = bare.replace(tag, ""), kept.replace(tag, "")
    assert kept == bare


def test_reasoning_streams_while_it_arrives():
    parser = reasoning_format("qwen3").parser()
    assert parser.feed("<think>\nab c ") == [Reasoning("ab c")]
    assert parser.feed("d</th") == [Reasoning(" d")]
    assert parser.feed("ink>\n") == []
    assert parser.feed("e ") == [Content("e ")]


def test_a_prompt_that_opens_the_tag():
    tags = reasoning_format("deepseek_r1")
    assert tags.is_opened_by("...<|Assistant|><think>\n")
    assert not tags.is_opened_by("...<think>\n\n</think>\n\n")
    assert not tags.is_opened_by("What does <think> do?<|Assistant|>")


TEXT = "<think>Call <tool_call>{} maybe.</think>\n\nOne moment.\n" + hermes(WEATHER)


def test_calls_are_looked_for_behind_reasoning_only():
    for pieces in ([TEXT], list(TEXT)):
        parser = output_parser(tool_parser("hermes"), reasoning_format("qwen3"), TOOLS, prompt="<|im_start|>")
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(False)
        message = collect(events)
        assert message.reasoning == "Call <tool_call>{} maybe."
        assert message.content == "One moment."
        assert [(call.name, call.arguments) for call in message.tool_calls] == [WEATHER]


def test_without_tools_calls_stay_in_the_content():
    parser = output_parser(tool_parser("hermes"), reasoning_format("qwen3"), [])
    message = collect(parser.feed(TEXT) + parser.finish(False))
    assert message.content == "One moment.\n" + hermes(WEATHER) and message.tool_calls == []
    plain = output_parser(None, None, TOOLS)
    assert plain.feed(TEXT) + plain.feed("") + plain.finish(False) == [Content(TEXT)]


def test_harmony_reads_reasoning_without_tools():
    parser = output_parser(tool_parser("openai"), reasoning_format("openai_gptoss"), [])
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    message = collect(parser.feed(text) + parser.finish(False))
    assert (message.reasoning, message.content) == ("a", "b")


@pytest.mark.parametrize("name", ["zz", ",", "<a>,", ""])
def test_unknown_names_are_answered_with_those_that_there_are(name):
    with pytest.raises(ConfigError, match=r"deepseek_r1.*openai_gptoss.*smollm3"):
        reasoning_format(name)
