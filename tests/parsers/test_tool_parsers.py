"""Every format's parser, on whole texts and on texts cut everywhere."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import HARD, JSON_FORMATS, NOW, RECORDED, SEPARATOR, TOOLS, WEATHER, hermes

from streamllm.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
    merged,
)
from streamllm.parsers.registry import tool_parser
from streamllm.parsers.tools import Tool

BY_ID = {recorded.id: recorded for recorded in RECORDED}


def parse(parser: str, pieces: list[str], *, truncated: bool = False, **options) -> list[Event]:
    """The events of a text in pieces, merged, without the calls' ids."""
    made = tool_parser(parser)(TOOLS, **options)
    events = [event for piece in pieces for event in made.feed(piece)]
    events += made.finish(truncated)
    return normalised(events)


def normalised(events: list[Event]) -> list[Event]:
    return [replace(e, id="") if isinstance(e, ToolCallStart) else e for e in merged(events)]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.id)
class TestRecorded:
    def test_a_whole_text_gives_its_message(self, recorded):
        events = parse(recorded.parser, [recorded.text])
        message = collect(events)
        assert [(call.name, call.arguments) for call in message.tool_calls] == recorded.calls
        assert (message.content, message.reasoning) == (recorded.content, recorded.reasoning)
        assert [e.index for e in events if isinstance(e, ToolCallStart)] == list(range(len(recorded.calls)))

    def test_a_text_cut_anywhere_gives_the_same_events(self, recorded):
        text = recorded.text
        whole = parse(recorded.parser, [text])
        assert parse(recorded.parser, list(text)) == whole
        for cut in range(1, len(text)):
            assert parse(recorded.parser, [text[:cut], text[cut:]]) == whole, cut

    def test_nothing_is_taken_back_and_calls_are_whole(self, recorded):
        """What is emitted before the end is what the whole text gives, and a call's events are in order."""
        made = tool_parser(recorded.parser)(TOOLS)
        whole = parse(recorded.parser, [recorded.text])
        seen: list[Event] = []
        for character in recorded.text:
            seen += made.feed(character)
            got = normalised(seen)
            assert not got or got[:-1] == whole[: len(got) - 1]
            if got and not isinstance(got[-1], (ToolCallStart, ToolCallEnd)):
                assert whole[len(got) - 1].text.startswith(got[-1].text)
        check_order(normalised(seen + made.finish(False)))

    def test_a_text_truncated_anywhere_keeps_what_it_has(self, recorded):
        whole = collect(parse(recorded.parser, [recorded.text]))
        for cut in range(len(recorded.text)):
            text = recorded.text[:cut]
            events = parse(recorded.parser, [text], truncated=True)
            if cut % 8 == 0:
                assert parse(recorded.parser, list(text), truncated=True) == events
            check_order(events)
            calls = collect(events).tool_calls
            for got, expected in zip(calls, whole.tool_calls, strict=False):
                assert got.name == expected.name
            for got, expected in zip(calls[:-1], whole.tool_calls, strict=False):
                assert got.arguments == expected.arguments


def check_order(events: list[Event]) -> None:
    """Each call's start, arguments and end follow each other, without anything between them."""
    open_call = None
    for event in events:
        if isinstance(event, ToolCallStart):
            assert open_call is None
            open_call = event.index
        elif isinstance(event, (ToolCallArguments, ToolCallEnd)):
            assert event.index == open_call
            open_call = None if isinstance(event, ToolCallEnd) else open_call
        else:
            assert isinstance(event, (Content, Reasoning)) and event.text and open_call is None
    assert open_call is None


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_same_events(data):
    recorded = data.draw(st.sampled_from(RECORDED))
    other = data.draw(st.sampled_from([r for r in RECORDED if r.parser == recorded.parser]))
    text = recorded.text + data.draw(st.sampled_from(["", "\n", " x "])) + other.text
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    truncated = data.draw(st.booleans())
    assert parse(recorded.parser, pieces, truncated=truncated) == parse(
        recorded.parser, [text], truncated=truncated
    )


MARKS = sorted({mark for r in RECORDED for mark in tool_parser(r.parser).marks} | {
    "</tool_call>", '{"name": "now", "arguments": {', "}", "[", "]", "(", ")", "now(", ",", "=", ":", "\\",
    "<function=now>", "<parameter=a>", "</parameter>", "</function>", "<|message|>", "<|channel|>", "<|end|>",
    "<|start|>", "commentary to=functions.now", '"', "'", "a", "\n", "1", "[ARGS]", "```json", SEPARATOR,
})  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    parser=st.sampled_from(sorted({r.parser for r in RECORDED})),
    parts=st.lists(st.sampled_from(MARKS), max_size=20),
    truncated=st.booleans(),
)
def test_no_text_at_all_breaks_a_parser(parser, parts, truncated):
    text = "".join(parts)
    events = parse(parser, [text], truncated=truncated)
    assert parse(parser, list(text), truncated=truncated) == events
    check_order(events)
    if not any(isinstance(event, ToolCallStart) for event in events) and parser != "openai":
        assert (collect(events).content or "") == text


@pytest.mark.parametrize("parser", JSON_FORMATS)
@pytest.mark.parametrize("name", ["one", "escapes"])
def test_truncated_arguments_are_the_beginning_of_the_whole_ones(parser, name):
    (call,) = HARD[name]
    text = JSON_FORMATS[parser](call)
    begin = text.index(call[1])
    for cut in range(begin + 1, begin + len(call[1])):
        (got,) = collect(parse(parser, [text[:cut]], truncated=True)).tool_calls
        assert call[1].startswith(got.arguments) and len(got.arguments) >= cut - begin - 1
    assert collect(parse(parser, [text[:begin]], truncated=True)).tool_calls[0].arguments == ""
    for cut in range(begin, len(text)):
        assert collect(parse(parser, [text[:cut]], truncated=True)).content is None


def test_arguments_stream_while_they_arrive():
    made = tool_parser("hermes")(TOOLS)
    text = hermes(("get_weather", '{"city": "Paris"}'))
    for character in text[: text.index("Par") + 3]:
        events = made.feed(character)
    assert events == [ToolCallArguments(0, "r")]


@pytest.mark.parametrize(("parser", "text"), [
    ("pythonic", "[get_weather(city='Par"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"),
])  # fmt: skip
def test_strings_stream_in_formats_that_are_no_json(parser, text):
    made = tool_parser(parser)(TOOLS)
    events = [event for character in text for event in made.feed(character)]
    assert "".join(e.text for e in events if isinstance(e, ToolCallArguments)) == '{"city": "Par'
    assert events[-1] == ToolCallArguments(0, "r")


def test_a_value_cut_off_before_its_conversion_stays_as_text():
    (call,) = collect(parse("pythonic", ["[save(pinned=True, tags=['a', 'b"], truncated=True)).tool_calls
    assert call.arguments == """{"pinned": true, "tags": ['a', 'b"""
    text = "<tool_call>\n<function=save>\n<parameter=tags>\n['a', "
    (call,) = collect(parse("qwen3_coder", [text], truncated=True)).tool_calls
    assert call.arguments == """{"tags": ['a', """


def test_only_the_first_of_parallel_calls_stays_where_one_is_allowed():
    events = parse("hermes", [f"A {hermes(WEATHER, NOW)} B"], parallel=False)
    message = collect(events)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [WEATHER]
    assert message.content.split() == ["A", "B"]


def test_ids_are_unique_and_of_the_shape_that_templates_want():
    for parser, shape in (("hermes", r"chatcmpl-tool-[0-9a-f]{32}"), ("mistral", r"[A-Za-z0-9]{9}")):
        made = tool_parser(parser)(TOOLS)
        events = made.feed(JSON_FORMATS[parser](*[NOW] * 50)) + made.finish(False)
        ids = [event.id for event in events if isinstance(event, ToolCallStart)]
        assert len(set(ids)) == 50 and all(re.fullmatch(shape, made_id) for made_id in ids)


def test_special_tokens_of_a_format_are_those_in_its_texts():
    """What a parser looks for must not be skipped as special."""
    for recorded in RECORDED:
        known = tool_parser(recorded.parser).special_tokens
        calls = recorded.text if recorded.name in ("one", "parallel") else ""
        for token in re.findall(
            r"<\|[\w/]+\|>|\[TOOL_CALLS\]|<\uff5c[^\uff5c]+\uff5c>|</?tool_calls?>", calls
        ):
            assert token in known, (recorded.id, token)


def test_qwen_types_follow_the_schema():
    schema = {
        "type": "object",
        "properties": {
            "choice": {"$ref": "#/$defs/choice"},
            "number": {"oneOf": [{"type": "number"}, {"type": "string"}]},
            "free": {},
            "text": {"type": ["string"]},
            "loop": {"$ref": "#/properties/loop"},
        },
        "additionalProperties": {"type": "integer"},
        "$defs": {"choice": {"enum": [1, 2, None]}},
    }
    values = {"choice": "2", "number": "1.5", "free": "[1]", "text": "[1]", "loop": "x", "more": "7"}
    text = "<function=f>" + "".join(f"<parameter={k}>{v}</parameter>" for k, v in values.items())
    made = tool_parser("qwen3_coder")([Tool("f", schema)])
    (call,) = collect(made.feed(text) + made.finish(False)).tool_calls
    assert json.loads(call.arguments) == {
        "choice": 2, "number": 1.5, "free": [1], "text": "[1]", "loop": "x", "more": 7
    }  # fmt: skip


def test_long_texts_are_read_in_time_proportional_to_their_length():
    long = json.dumps({"city": "x" * 20_000 + '\\"' * 2_000, "days": [[1]] * 1_000})
    for text in (
        hermes(("get_weather", long)),
        "<tool_call>" * 3_000,
        f'<tool_call>{{"arguments": {long}, "x": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": "' * 1_000,
        "a" * 30_000,
    ):
        seconds = []
        for length in (len(text) // 4, len(text)):
            pieces = [text[start : start + 4] for start in range(0, length, 4)]
            began = time.process_time()
            parse("hermes", pieces)
            seconds.append(time.process_time() - began)
        assert seconds[1] < 12 * seconds[0] + 0.05
