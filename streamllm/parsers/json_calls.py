"""Formats in which a call is a JSON object between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from streamllm.parsers.call_grammar import CallForm, CallRules, calls_grammar
from streamllm.parsers.json_reader import NotJsonError, copy_value, read_string, skip_whitespace
from streamllm.parsers.text_reader import Steps
from streamllm.parsers.tool_call_parser import NotACallError, ToolCallParser
from streamllm.parsers.tools import Tool

_CLOSERS = re.compile(r"[\s\]}]+")


class JsonCallParser(ToolCallParser):
    """Reads ``{"name": ..., "arguments": {...}}``, alone or in a list; either may stand where the other is
    expected.

    Members come in any order, and ``parameters`` means ``arguments``. Without either, the arguments are
    ``{}``. Other members are ignored.

    Attributes:
        ends: what may follow the object or list; models also leave it out.
        arguments_member: what the format calls the arguments.
        other_members: members besides name and arguments that a call may have; ``None``: any.
        needs_arguments: an object without arguments is no call.
    """

    ends: ClassVar[tuple[str, ...]] = ()
    arguments_member: ClassVar[str] = "arguments"
    other_members: ClassVar[frozenset[str] | None] = None
    needs_arguments: ClassVar[bool] = False

    def _read_calls(self, mark: str) -> Steps[None]:
        yield from self._read_objects()
        if self.ends:
            yield from self._skip_end(*self.ends)

    def _read_objects(self) -> Steps[None]:
        yield from skip_whitespace(self._reader)
        if not (yield from self._reader.accept("[")):
            yield from self._read_object()
            return
        while True:
            yield from skip_whitespace(self._reader)
            yield from self._read_object()
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept(",")):
                yield from self._reader.accept("]")
                return

    def _read_object(self) -> Steps[None]:
        """One call. Once it has begun, what breaks it ends it."""
        if not (yield from self._reader.accept("{")):
            raise NotACallError
        name: str | None = None
        early: list[str] | None = None
        begun = False
        while True:
            yield from skip_whitespace(self._reader)
            if (yield from self._reader.accept("}")):
                break
            if begun and (yield from self._reader.peek()) != '"':
                return
            key = yield from self._read_key()
            if key == "name" and name is None:
                name = self._check_name((yield from read_string(self._reader)))
                if early is not None:
                    self._write_call(name, early)
                    begun = True
            elif key in ("arguments", "parameters") and not begun and early is None:
                if name is None:
                    early = yield from self._collect_arguments()
                else:
                    begun = True
                    if not (yield from self._stream_arguments(name)):
                        yield from self._reader.run(_CLOSERS)
                        return
            elif begun or self.other_members is None or key in self.other_members:
                yield from copy_value(self._reader, len)
            else:
                raise NotACallError
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept(",")) and (yield from self._reader.peek()) != "}":
                if begun:
                    return
                raise NotACallError
        if not begun:
            if name is None or self.needs_arguments:
                raise NotACallError
            self._write_call(name, ["{}"])
        self._reader.forget()

    def _read_key(self) -> Steps[str]:
        key = yield from read_string(self._reader)
        yield from skip_whitespace(self._reader)
        if not (yield from self._reader.accept(":")):
            raise NotJsonError
        yield from skip_whitespace(self._reader)
        return key

    def _stream_arguments(self, name: str) -> Steps[bool]:
        """Begin a call and stream its arguments, which must be an object; returns whether they came to their
        end."""
        if (yield from self._reader.peek()) != "{":
            raise NotACallError
        self._begin_call(name)
        whole = yield from copy_value(self._reader, self._add_arguments)
        self._end_call()
        return whole

    def _collect_arguments(self) -> Steps[list[str]]:
        """Arguments that stand before the name."""
        if (yield from self._reader.peek()) != "{":
            raise NotACallError
        pieces: list[str] = []
        if not (yield from copy_value(self._reader, pieces.append)):
            raise NotACallError
        return pieces

    def _write_call(self, name: str, arguments: list[str]) -> None:
        self._begin_call(name)
        self._add_arguments("".join(arguments))
        self._end_call()

    @classmethod
    def _head(cls, tool: Tool) -> str:
        return f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{cls.arguments_member}": '


class HermesParser(JsonCallParser):
    """Nous Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4 and many others: ``<tool_call>``, an object,
    ``</tool_call>`` (https://github.com/NousResearch/Hermes-Function-Calling)."""

    name = "hermes"
    aliases = ("granite4",)
    special_tokens = ("<tool_call>", "</tool_call>")
    marks = ("<tool_call>",)
    ends = ("</tool_call>",)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        return calls_grammar(
            rules,
            CallForm(
                before=lambda tool: f"<tool_call>\n{cls._head(tool)}",
                after="}\n</tool_call>",
                separator="\n",
                trigger="<tool_call>",
                marks=cls.marks,
            ),
        )


class GraniteParser(JsonCallParser):
    """IBM Granite 3: ``<|tool_call|>`` (3.0) or ``<tool_call>`` (3.1 and later) and a list of objects."""

    name = "granite"
    special_tokens = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    marks = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        plain = "<|tool_call|>" not in rules.special_token_ids and "<tool_call>" in rules.chat_template
        mark = "<tool_call>" if plain else "<|tool_call|>"
        return calls_grammar(rules, replace(_list_form(cls._head, mark), marks=cls.marks))


class Granite20bParser(JsonCallParser):
    """Granite 20B Function Calling: ``<function_call>`` and an object, for each call
    (https://huggingface.co/ibm-granite/granite-20b-functioncalling)."""

    name = "granite-20b-fc"
    special_tokens = ("<function_call>",)
    marks = ("<function_call>",)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        return calls_grammar(
            rules,
            CallForm(
                before=lambda tool: f"<function_call> {cls._head(tool)}",
                after="}",
                separator="\n",
                trigger="<function_call>",
                marks=cls.marks,
            ),
        )


class Phi4MiniParser(JsonCallParser):
    """Phi-4-mini: ``functools`` and a list of objects, or a list between ``<|tool_call|>`` and
    ``<|/tool_call|>`` (https://huggingface.co/microsoft/Phi-4-mini-instruct)."""

    name = "phi4_mini_json"
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")
    marks = ("functools", "<|tool_call|>")
    ends = ("<|/tool_call|>",)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        if "functools" in rules.chat_template or "<|tool_call|>" not in rules.special_token_ids:
            form = replace(_list_form(cls._head, "functools"), trigger="functools[")
        else:
            form = _list_form(cls._head, "<|tool_call|>", closing="]<|/tool_call|>")
        # The word alone is Python's, too.
        return calls_grammar(rules, replace(form, marks=("functools[", "<|tool_call|>")))


class JambaParser(JsonCallParser):
    """Jamba 1.5: a list of objects between ``<tool_calls>`` and ``</tool_calls>``."""

    name = "jamba"
    special_tokens = ("<tool_calls>", "</tool_calls>")
    marks = ("<tool_calls>",)
    ends = ("</tool_calls>",)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = _list_form(cls._head, "<tool_calls>", closing="]</tool_calls>")
        return calls_grammar(rules, replace(form, marks=cls.marks))


class InternLMParser(JsonCallParser):
    """InternLM 2.5: an object between ``<|action_start|><|plugin|>`` and ``<|action_end|>``."""

    name = "internlm"
    special_tokens = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    marks = ("<|action_start|>",)
    ends = ("<|action_end|>",)
    arguments_member = "parameters"

    def _read_calls(self, mark: str) -> Steps[None]:
        yield from skip_whitespace(self._reader)
        if not (yield from self._reader.accept("<|plugin|>")):
            raise NotACallError
        yield from super()._read_calls(mark)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        return calls_grammar(
            rules,
            CallForm(
                before=lambda tool: f"<|action_start|><|plugin|>\n{cls._head(tool)}",
                after="}<|action_end|>",
                separator="\n",
                trigger="<|action_start|>",
                marks=cls.marks,
            ),
        )


def _list_form(head: Callable[[Tool], str], mark: str, *, closing: str = "]") -> CallForm:
    return CallForm(
        before=head,
        after="}",
        opening=f"{mark}[",
        separator=", ",
        closing=closing,
        trigger=mark,
    )
