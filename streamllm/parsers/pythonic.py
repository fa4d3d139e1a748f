"""Calls written as in Python: ``[get_weather(city="Paris", days=3), ...]``
(https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md)."""

from __future__ import annotations

import re
from typing import ClassVar

from streamllm.parsers.call_grammar import (
    CallForm,
    CallRules,
    calls_grammar,
    check_plain_name,
    json_rule,
    unenforceable,
)
from streamllm.parsers.json_reader import dump_json, escape, skip_whitespace
from streamllm.parsers.schema_fields import schema_fields, separated
from streamllm.parsers.text_reader import EndOfOutput, Steps
from streamllm.parsers.tool_call_parser import NotACallError, ToolCallParser
from streamllm.parsers.tools import Tool
from streamllm.parsers.values import json_from_python, python_escape

_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_OUTSIDE_STRINGS = re.compile(r"[^\"'()\[\]{},]+")
_CLOSES = {")": "(", "]": "[", "}": "{"}
_ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10, "\r": 3, **dict.fromkeys("01234567", 4)}


class PythonicParser(ToolCallParser):
    """The text begins with the list of calls. Arguments must be named.

    A string is streamed as it arrives; any other value comes when it is complete, converted from Python
    (``True`` or ``true``, ``None`` or ``null``), or as a string if it is no literal.
    """

    name = "pythonic"
    starts = ("[",)
    ends: ClassVar[tuple[str, ...]] = ()

    _value: list[str] | None = None
    """What there is of a value that is not complete."""

    def _read_calls(self, mark: str) -> Steps[None]:
        yield from skip_whitespace(self._reader)
        if not (yield from self._reader.accept("[")):
            raise NotACallError
        while True:
            yield from skip_whitespace(self._reader)
            name = yield from self._reader.word(_NAME)
            if not (yield from self._reader.accept("(")):
                raise NotACallError
            yield from self._read_arguments(self._check_name(name))
            self._reader.forget()
            yield from skip_whitespace(self._reader)
            yield from self._reader.accept(",")
            yield from skip_whitespace(self._reader)
            if (yield from self._reader.accept("]")):
                break
        if self.ends:
            yield from self._skip_end(*self.ends)

    def _read_arguments(self, name: str) -> Steps[None]:
        begun = False
        while True:
            yield from skip_whitespace(self._reader)
            if (yield from self._reader.accept(")")):
                break
            keyword = yield from self._reader.word(_KEYWORD)
            yield from skip_whitespace(self._reader)
            if not keyword or not (yield from self._reader.accept("=")):
                if begun:
                    self._break_off("}")
                raise NotACallError
            if not begun:
                self._begin_call(name)
            self._add_arguments(f"{', ' if begun else '{'}{dump_json(keyword)}: ")
            begun = True
            yield from skip_whitespace(self._reader)
            yield from self._read_value()
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept(",")) and (yield from self._reader.peek()) != ")":
                self._break_off("}")
        if not begun:
            self._begin_call(name)
        self._add_arguments("}" if begun else "{}")
        self._end_call()

    def _read_value(self) -> Steps[None]:
        if (yield from self._reader.peek()) in _PLAIN:
            yield from self._stream_string()
            return
        self._value = []
        yield from self._collect_value(self._value)
        self._add_arguments(json_from_python("".join(self._value)))
        self._value = None

    def _collect_value(self, pieces: list[str]) -> Steps[None]:
        """Anything but a string, up to the comma or bracket that ends it."""
        opened: list[str] = []
        while True:
            yield from self._reader.run(_OUTSIDE_STRINGS, pieces.append)
            character = yield from self._reader.peek()
            if character in _PLAIN:
                yield from self._collect_string(pieces)
                continue
            if character in _CLOSES:
                if not opened or opened.pop() != _CLOSES[character]:
                    return
            elif character != ",":
                opened.append(character)
            elif not opened:
                return
            pieces.append(self._reader.take(1))

    def _collect_string(self, pieces: list[str]) -> Steps[None]:
        quote = self._reader.take(1)
        pieces.append(quote)
        while True:
            yield from self._reader.run(_PLAIN[quote], pieces.append)
            yield from self._reader.peek()
            pieces.append(self._reader.take(1))
            if pieces[-1] == quote:
                return
            yield from self._reader.peek()
            pieces.append(self._reader.take(1))

    def _stream_string(self) -> Steps[None]:
        quote = self._reader.take(1)
        tripled = yield from self._reader.accept(quote * 2)
        closing = quote * 3 if tripled else quote
        self._add_arguments('"')
        while True:
            yield from self._reader.run(_PLAIN[quote], lambda text: self._add_arguments(escape(text)))
            if (yield from self._reader.peek()) == "\\":
                self._add_arguments((yield from self._read_escape()))
            elif (yield from self._reader.accept(closing)):
                self._add_arguments('"')
                return
            else:
                self._add_arguments(escape(self._reader.take(1)))

    def _read_escape(self) -> Steps[str]:
        length = _ESCAPE_LENGTHS.get((yield from self._reader.look(2))[1:], 2)
        text = yield from self._reader.look(length)
        if len(text) < length:
            self._reader.take_rest()
            raise EndOfOutput
        length, meaning = python_escape(text)
        self._reader.take(length)
        return meaning

    def _cut_arguments(self) -> str:
        return "".join(self._value or ())

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = CallForm(
            before=lambda tool: f"{check_plain_name(tool)}(",
            after=")",
            opening="[",
            separator=", ",
            closing="]",
            marks=cls.marks,
            arguments=lambda tool, prefix: _arguments_rule(tool, prefix, rules),
        )
        return calls_grammar(rules, form, not_a_call=r"[^\s\[]")


class Llama4PythonicParser(PythonicParser):
    """Llama 4 may put the list between ``<|python_start|>`` and ``<|python_end|>``."""

    name = "llama4_pythonic"
    special_tokens = ("<|python_start|>", "<|python_end|>")
    marks = ("<|python_start|>",)
    ends = ("<|python_end|>",)


def _arguments_rule(tool: Tool, prefix: str, rules: CallRules) -> tuple[str, list[str]]:
    fields = schema_fields(tool)
    separator = rules.literal(", ")
    if fields is None:
        any_argument = rf"{prefix}_0: /[A-Za-z_][A-Za-z0-9_]*=/ {json_rule({}, tool)}"
        return f"({prefix}_0 ({separator} {prefix}_0)*)?", [any_argument]
    lines = []
    for index, field in enumerate(fields):
        if not _IDENTIFIER.fullmatch(field.name):
            raise unenforceable(tool, f"the parameter {field.name[:100]!r} is no Python identifier")
        lines.append(f"{prefix}_{index}: {rules.literal(field.name + '=')} {json_rule(field.schema, tool)}")
    expression, more = separated(fields, separator, prefix)
    return expression, [*lines, *more]
