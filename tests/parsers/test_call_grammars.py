"""The grammars that force calls: they compile, allow what parsers read as right calls, and nothing else."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from recorded import JSON_FORMATS, TOOLS, UNIT, harmony_call, hermes, objects, qwen

from streamllm.engine.constraint import constraint_source
from streamllm.engine.grammar_compile import Vocabulary, compile_grammar, to_llguidance
from streamllm.errors import InvalidRequestError
from streamllm.parsers.call_grammar import CallRules
from streamllm.parsers.events import collect
from streamllm.parsers.registry import output_parser, tool_parser
from streamllm.parsers.tools import Tool
from streamllm.structured_outputs import StructuredOutputsParams, Thinking

EOS = 256
OSLO = ("get_weather", '{"city": "Oslo", "days": 2}')
NOW = ("now", "{}")


class Grammar:
    """A format's grammar over single bytes, with the format's special tokens or without any."""

    def __init__(self, parser: str, *, special: bool, **rules) -> None:
        self.specials = {
            token: EOS + 1 + index
            for index, token in enumerate(tool_parser(parser).special_tokens if special else ())
        }
        rules = {"tools": TOOLS, "chat_template": "functools" * (parser == "phi4_mini_json"), **rules}
        self.text = tool_parser(parser).grammar(CallRules(special_token_ids=self.specials, **rules))
        source = constraint_source(StructuredOutputsParams(grammar=self.text))
        tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *(t.encode() for t in self.specials)]
        vocabulary = Vocabulary(tokens, [EOS, *self.specials.values()], [EOS]).to_llguidance()
        self.matcher = compile_grammar(vocabulary, to_llguidance(source)).matcher

    def accepts(self, text: str) -> bool:
        """Whether the whole text satisfies it."""
        pattern = f"({'|'.join(map(re.escape, self.specials))})" if self.specials else "(?!)"
        tokens: list[int] = []
        for part in re.split(pattern, text):
            tokens += [self.specials[part]] if part in self.specials else part.encode()
        matcher = self.matcher.deep_copy()
        return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


def pythonic(*calls: tuple[str, str]) -> str:
    written = []
    for name, text in calls:
        values = json.loads(text).items()
        arguments = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values)
        written.append(f"{name}({', '.join(arguments)})")
    return f"[{', '.join(written)}]"


def qwen_calls(*calls: tuple[str, str]) -> str:
    return "\n".join(
        qwen(name, **{key: str(value) for key, value in json.loads(text).items()}) for name, text in calls
    )


FORMATS = {
    **JSON_FORMATS,
    "llama4_json": lambda *calls: objects(*calls, key="parameters", separator="; "),
    "pythonic": pythonic,
    "llama4_pythonic": pythonic,
    "qwen3_coder": qwen_calls,
    "openai": lambda call: harmony_call(*call).removesuffix("<|call|>"),
}
HAS_PARALLEL = [parser for parser in FORMATS if parser != "openai"]
both = pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])


@both
@pytest.mark.parametrize("parser", FORMATS)
def test_required_calls_follow_their_schemas_and_nothing_else_is_said(parser, special):
    write = FORMATS[parser]
    grammar = Grammar(parser, special=special)
    for call in (OSLO, NOW, ("get_weather", '{"city": "Zürich", "unit": "celsius"}')):
        assert grammar.accepts(write(call)), call
    for call in (
        ("get_weather", '{"city": "Oslo", "days": "two"}'),
        ("get_weather", '{"city": "Oslo", "unit": "kelvin"}'),
        ("get_weather", '{"days": 1}'),
        ("zz", "{}"),
    ):
        assert not grammar.accepts(write(call)), call
    for text in ("", "Hello", write(OSLO)[:-1], "Hello " + write(OSLO), write(OSLO) + " Bye"):
        assert not grammar.accepts(text), text


@both
@pytest.mark.parametrize("parser", HAS_PARALLEL)
def test_several_calls_are_allowed_unless_parallel_is_off(parser, special):
    text = FORMATS[parser](OSLO, NOW, OSLO)
    assert Grammar(parser, special=special).accepts(text)
    one = Grammar(parser, special=special, parallel=False)
    assert one.accepts(FORMATS[parser](OSLO)) and not one.accepts(text)


@pytest.mark.parametrize("parser", FORMATS)
def test_a_named_choice_allows_its_tool_alone(parser):
    grammar = Grammar(parser, special=True, tools=TOOLS[1:2], parallel=False)
    assert grammar.accepts(FORMATS[parser](NOW)) and not grammar.accepts(FORMATS[parser](OSLO))


@both
@pytest.mark.parametrize("parser", [p for p in FORMATS if p != "openai"])
def test_free_text_is_free_until_a_call_begins(parser, special):
    write = FORMATS[parser]
    grammar = Grammar(parser, special=special, required=False)
    wrong = write(("get_weather", '{"days": 1}'))
    assert grammar.accepts("Hello {[<é\n") and grammar.accepts("") and grammar.accepts(write(OSLO))
    assert not grammar.accepts(wrong)
    if tool_parser(parser).starts:
        assert not grammar.accepts(write(OSLO) + " Bye")
    else:
        assert grammar.accepts(f"First.\n{write(OSLO)} then {write(NOW)} done")
        assert not grammar.accepts(f"First.\n{wrong}")


@both
@pytest.mark.parametrize("parser", FORMATS)
def test_parsers_read_what_their_grammars_allow(parser, special):
    """The arguments are as they were written, and valid by the tool's schema."""
    grammar = Grammar(parser, special=special)
    for call in (OSLO, NOW, ("get_weather", '{"city": "a\\"b", "unit": "fahrenheit"}')):
        text = FORMATS[parser](call)
        assert grammar.accepts(text)
        reader = output_parser(tool_parser(parser), None, TOOLS)
        message = collect(reader.feed(text) + reader.finish(False))
        (read,) = message.tool_calls
        assert message.content is None and read.name == call[0]
        assert json.loads(read.arguments) == json.loads(call[1])
        jsonschema.validate(
            json.loads(read.arguments), next(t for t in TOOLS if t.name == call[0]).parameters
        )


@both
def test_harmony_may_think_before_a_call_and_answer_where_none_is_required(special):
    call, next_message = FORMATS["openai"](OSLO), "<|end|><|start|>assistant"
    analysis = "<|channel|>analysis<|message|>Well, {}\n" + next_message
    answer = "<|channel|>final<|message|>It is 5."
    required = Grammar("openai", special=special)
    assert required.accepts(analysis + call)
    assert not required.accepts(answer) and not required.accepts(analysis + answer)
    free = Grammar("openai", special=special, required=False)
    preamble = "<|channel|>commentary<|message|>I look." + next_message
    for text in (answer, analysis + answer, analysis + preamble + call, call):
        assert free.accepts(text), text
    assert not free.accepts("It is 5.") and not free.accepts(harmony_call("zz", "{}"))


def test_mistral_writes_the_form_of_its_template():
    new = Grammar("mistral", special=True, chat_template="... [TOOL_CALLS]' + name + '[ARGS]' ...")
    assert new.accepts(f"[TOOL_CALLS]{OSLO[0]}[ARGS]{OSLO[1]}[TOOL_CALLS]now[ARGS]{{}}")
    assert not new.accepts(FORMATS["mistral"](OSLO))
    free = Grammar("mistral", special=True, required=False, chat_template="[ARGS]")
    assert free.accepts("So: [TOOL_CALLS]now[ARGS]{}") and not free.accepts("[TOOL_CALLS]zz[ARGS]{}")


def test_granite_and_phi_write_the_form_of_their_templates():
    assert Grammar("granite", special=False, chat_template="<tool_call>").accepts(
        f"<tool_call>[{objects(NOW)}]"
    )
    marks = f"<|tool_call|>[{objects(NOW)}]<|/tool_call|>"
    assert Grammar("phi4_mini_json", special=True, chat_template="").accepts(marks)
    assert not Grammar("phi4_mini_json", special=False, chat_template="").accepts(marks)
    free = Grammar("phi4_mini_json", special=True, chat_template="", required=False)
    assert free.accepts("import functools") and free.accepts("See: " + marks)
    assert not free.accepts('functools[{"name": "zz"}]')


# -- schemas in formats that are no JSON -------------------------------------------------------------------

RICH = Tool(
    "rich",
    {
        "$defs": {
            "color": {"enum": ["red", 'bl"ue\n']},
            "point": {"type": "array", "items": {"type": "integer"}},
        },
        "type": "object",
        "title": "Rich",
        "properties": {
            "a": {"type": ["string", "null"]},
            "color": {"$ref": "#/$defs/color"},
            "at": {"$ref": "#/$defs/point"},
            "b": {"anyOf": [{"type": "boolean"}, {"const": "auto"}]},
        },
        "required": ["color", "b"],
        "additionalProperties": False,
    },
)


def test_optional_python_arguments_come_in_any_selection_in_order():
    grammar = Grammar("pythonic", special=False, tools=[RICH])
    for text in (
        '[rich(color="red", b=true)]',
        '[rich(a="x", color="red", b="auto")]',
        '[rich(a=null, color="bl\\"ue\\n", at=[1, 2], b=false)]',
    ):
        assert grammar.accepts(text), text
    for text in (
        "[rich()]",
        '[rich(color="red")]',
        '[rich(b=true, color="red")]',
        '[rich(, color="red", b=true)]',
        '[rich(color="green", b=true)]',
        '[rich(color="red", b=True)]',
        '[rich(color="red", at=[1.5], b=true)]',
    ):
        assert not grammar.accepts(text), text
    all_optional = Tool("f", {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}})
    grammar = Grammar("pythonic", special=False, tools=[all_optional])
    for text in ("[f()]", "[f(x=1)]", "[f(y=1)]", "[f(x=1, y=2)]"):
        assert grammar.accepts(text), text
    assert not grammar.accepts("[f(y=2, x=1)]")


def test_tags_hold_bare_strings_and_json():
    grammar = Grammar("qwen3_coder", special=False, tools=[RICH])
    for values in (
        {"color": "red", "b": "true"},
        {"a": "any\ntext </parameter> here", "color": 'bl"ue\n', "at": "[1, 2]", "b": "auto"},
        {"a": "null", "color": "red", "b": "false"},
    ):
        assert grammar.accepts(qwen("rich", **values)), values
    for values in (
        {"color": "red"},
        {"color": '"red"', "b": "true"},
        {"color": "red", "b": "maybe"},
        {"color": "red", "at": "1", "b": "true"},
        {"color": "red", "b": "true", "more": "1"},
    ):
        assert not grammar.accepts(qwen("rich", **values)), values


@pytest.mark.parametrize("parser", ["pythonic", "qwen3_coder"])
def test_a_tool_without_a_schema_takes_any_arguments(parser):
    grammar = Grammar(parser, special=False, tools=[Tool("f")])
    for values in ({}, {"x": 1}, {"x_1": 2, "y": 3}):
        assert grammar.accepts(FORMATS[parser](("f", json.dumps(values)))), values


@pytest.mark.parametrize(
    ("parser", "parameters", "reason"),
    [
        ("hermes", {"type": "array"}, 'type must be "object"'),
        ("hermes", {"x-guidance": {}}, "x-guidance is not supported"),
        ("pythonic", {"anyOf": [{"required": ["a"]}]}, "anyOf beside properties"),
        ("pythonic", {"properties": {"a-b": {}}}, "'a-b' is no Python identifier"),
        ("pythonic", {"properties": {"a": {"$ref": "#"}}}, "must point into"),
        ("pythonic", {"properties": {"a": False}}, "must be an object or true"),
        ("pythonic", {"properties": {}, "required": ["a"]}, "required names 'a'"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength of a string"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["1", 1]}}}, "'1' would be misread"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "cannot be written as a tag"),
        ("qwen3_coder", {"properties": {"a": {"$ref": "#/$defs/none"}}, "$defs": {}}, "must lead to one"),
    ],
)
def test_schemas_that_a_format_cannot_enforce_are_refused_by_reason(parser, parameters, reason):
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        Grammar(parser, special=False, tools=[Tool("f", parameters)])
    assert caught.value.param == "tools" and "the parameters of f" in caught.value.message


@pytest.mark.parametrize("parser", ["pythonic", "qwen3_coder", "openai", "deepseek_v3", "deepseek_v31"])
def test_names_that_a_format_cannot_write_are_refused(parser):
    with pytest.raises(InvalidRequestError, match="'a b' cannot be called"):
        Grammar(parser, special=False, tools=[Tool("a b")])


def test_names_are_quoted_where_the_format_quotes_them():
    name = 'a "b" é'
    grammar = Grammar("hermes", special=False, tools=[Tool(name, {"properties": {"u": UNIT}})])
    text = hermes((json.dumps(name, ensure_ascii=False)[1:-1], '{"u": "celsius"}'))
    assert grammar.accepts(text)
    reader = tool_parser("hermes")([Tool(name)])
    assert collect(reader.feed(text) + reader.finish(False)).tool_calls[0].name == name


def test_an_answer_in_harmony_follows_its_channels_header():
    parser = tool_parser("openai")
    specials = {token: EOS + 1 + index for index, token in enumerate(parser.special_tokens)}
    before = parser.before_answer(CallRules((), special_token_ids=specials))
    source = constraint_source(StructuredOutputsParams(choice=["yes"]), Thinking(before))
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *(t.encode() for t in specials)]
    vocabulary = Vocabulary(tokens, [EOS, *specials.values()], [EOS]).to_llguidance()
    grammar = Grammar.__new__(Grammar)
    grammar.specials = specials
    grammar.matcher = compile_grammar(vocabulary, to_llguidance(source)).matcher
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert grammar.accepts(f"{thought}<|channel|>final<|message|>yes")
    assert grammar.accepts("<|channel|>final<|message|>yes")
    assert not grammar.accepts(f"{thought}<|channel|>final<|message|>no")
    assert not grammar.accepts("yes")
