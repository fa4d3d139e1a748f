"""Qwen3-Coder's calls in XML (https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, its chat template)::

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from streamllm.parsers.call_grammar import (
    CallForm,
    CallRules,
    calls_grammar,
    check_plain_name,
    json_rule,
    unenforceable,
)
from streamllm.parsers.json_reader import dump_json, escape, skip_whitespace
from streamllm.parsers.schema_fields import Field, schema_fields
from streamllm.parsers.text_reader import WHITESPACE, Emit, EndOfOutput, Steps, Trimmed
from streamllm.parsers.tool_call_parser import NotACallError, ToolCallParser
from streamllm.parsers.tools import Tool
from streamllm.parsers.values import MAX_REFERENCES, json_from_text, json_types, resolve

_TAG_NAME = re.compile(r"[^<>\n]+")
_VALUE_END = "</parameter>"
_END = f"\n{_VALUE_END}\n"
_STRING = frozenset({"string"})
_TAGS = ("<parameter=", "</function>", "</tool_call>")
_UNCONSTRAINED = {"type", "title", "description", "default", "examples", "$comment", "$defs", "definitions"}


class Qwen3CoderParser(ToolCallParser):
    """Arguments are tags with bare text in them; their schemas say which of them are strings.

    A string is streamed as it arrives; any other value comes when it is complete, as JSON of a type that its
    schema allows, or as a string if it is none. One newline after a value's tag and one before its end belong
    to the format. ``</parameter>`` within a value does not end it unless another tag follows.
    """

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    special_tokens = ("<tool_call>", "</tool_call>")
    marks = ("<tool_call>", "<function=")

    _value: list[str] | None = None
    """What there is of a value that is not complete."""

    def _read_calls(self, mark: str) -> Steps[None]:
        if mark == "<tool_call>":
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept("<function=")):
                raise NotACallError
        while True:
            yield from self._read_function()
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept("<function=")):
                break
        yield from self._skip_end("</tool_call>")

    def _read_function(self) -> Steps[None]:
        """One call. Once its name is known it is one; what breaks it ends it."""
        name = self._check_name((yield from self._read_tag_name()))
        self._begin_call(name)
        num_arguments = 0
        while (yield from self._comes_parameter()):
            try:
                key = yield from self._read_tag_name()
            except NotACallError:
                self._break_off("}" if num_arguments else "{}")
            self._add_arguments(f"{', ' if num_arguments else '{'}{dump_json(key)}: ")
            num_arguments += 1
            yield from self._read_value(self._types(name, key))
        self._add_arguments("}" if num_arguments else "{}")
        self._end_call()
        yield from self._skip_end("</function>")

    def _comes_parameter(self) -> Steps[bool]:
        yield from skip_whitespace(self._reader)
        if (yield from self._reader.accept("<parameter=")):
            return True
        if self._truncated and ((yield from self._reader.at_end()) or self._reader.ends_inside(*_TAGS)):
            self._reader.take_rest()
            raise EndOfOutput
        return False

    def _read_tag_name(self) -> Steps[str]:
        name = yield from self._reader.word(_TAG_NAME)
        if not (yield from self._reader.accept(">")):
            raise NotACallError
        return name.strip()

    def _types(self, name: str, key: str) -> frozenset[str]:
        parameters = self._tools[name].parameters or {}
        properties = parameters.get("properties")
        schema = parameters.get("additionalProperties")
        if isinstance(properties, dict) and key in properties:
            schema = properties[key]
        elif not isinstance(schema, dict):
            return _STRING
        return json_types(schema, parameters)

    def _read_value(self, types: frozenset[str]) -> Steps[None]:
        yield from self._reader.accept("\n")
        if types == _STRING:
            self._add_arguments('"')
            add = Trimmed(lambda text: self._add_arguments(escape(text)), _without_newline)
            yield from self._read_text(add)
            self._add_arguments('"')
            return
        self._value = []
        yield from self._read_text(self._value.append)
        self._add_arguments(json_from_text(_without_newline("".join(self._value)), types))
        self._value = None

    def _read_text(self, emit: Emit) -> Steps[None]:
        """Read up to the end of a value."""
        while True:
            yield from self._reader.until((_VALUE_END,), emit)
            spaces: list[str] = []
            yield from self._reader.run(WHITESPACE, spaces.append)
            tag = yield from self._reader.ahead(*_TAGS)
            if tag or (yield from self._reader.at_end()) or self._reader.ends_inside(*_TAGS):
                return
            emit(_VALUE_END + "".join(spaces))

    def _cut_arguments(self) -> str:
        return "".join(self._value or ())

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = CallForm(
            before=lambda tool: f"<tool_call>\n<function={check_plain_name(tool)}>\n",
            after="</function>\n</tool_call>",
            separator="\n",
            trigger="<tool_call>",
            marks=cls.marks,
            arguments=lambda tool, prefix: _arguments_rule(tool, prefix, rules),
        )
        return calls_grammar(rules, form)


def _without_newline(text: str) -> str:
    return text.removesuffix("\n")


# -- grammar -----------------------------------------------------------------------------------------------


def _arguments_rule(tool: Tool, prefix: str, rules: CallRules) -> tuple[str, list[str]]:
    fields = schema_fields(tool)
    text = rf"{prefix}_text[lazy]: /(.|\n)*/ {rules.literal(_END)}"
    if fields is None:
        begin = rules.literal("<parameter=")
        return f"({begin} /[A-Za-z_][A-Za-z0-9_\\-]*>\n/ {prefix}_text)*", [text]
    items, lines = [], [text]
    for index, field in enumerate(fields):
        if not _TAG_NAME.fullmatch(field.name):
            raise unenforceable(tool, f"the parameter {field.name[:100]!r} cannot be written as a tag")
        begin = rules.literal(f"<parameter={field.name}>\n")
        value = _value_rule(field, f"{prefix}_text", tool, rules)
        lines.append(f"{prefix}_{index}: {begin} ({value})")
        items.append(f"{prefix}_{index}{'' if field.required else '?'}")
    return " ".join(items), lines


def _value_rule(field: Field, text_rule: str, tool: Tool, rules: CallRules) -> str:
    """Lark for a value and the end of its tag."""
    types = json_types(field.schema, field.schema)
    alternatives = list(_alternatives(field.schema, field.schema, tool))
    if any(alternative is None for alternative in alternatives):
        return text_rule
    texts = []
    for alternative in alternatives:
        if isinstance(alternative, str):
            if json_from_text(alternative, types) != dump_json(alternative) or _VALUE_END in alternative:
                raise unenforceable(tool, f"the value {alternative[:100]!r} would be misread in a tag")
            texts.append(rules.literal(alternative))
        else:
            texts.append(json_rule(alternative, tool))
    return f"({' | '.join(texts)}) {rules.literal(_END)}"


def _alternatives(schema: Any, root: dict[str, Any], tool: Tool) -> Iterator[str | dict[str, Any] | None]:
    """What a value may be: a string, JSON by a schema, or any text (``None``)."""
    for _ in range(MAX_REFERENCES):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            break
        schema = resolve(schema["$ref"], root)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise unenforceable(tool, "a value's schema must be an object or true, and its $ref must lead to one")
    options = schema.get("anyOf") or schema.get("oneOf")
    types = json_types(schema, root)
    if isinstance(schema.get("enum"), list):
        for value in schema["enum"]:
            yield value if isinstance(value, str) else {"const": value}
    elif isinstance(schema.get("const"), str):
        yield schema["const"]
    elif types and "string" not in types:
        yield {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
    elif isinstance(options, list) and set(schema) <= {"anyOf", "oneOf", *_UNCONSTRAINED}:
        for option in options:
            yield from _alternatives(option, root, tool)
    elif set(schema) <= _UNCONSTRAINED:
        yield None
    else:
        keyword = sorted(set(schema) - _UNCONSTRAINED)[0]
        raise unenforceable(tool, f"{keyword[:100]} of a string, which is written without quotes")
