"""gpt-oss's harmony format (https://github.com/openai/harmony/blob/main/docs/format.md).

Reasoning, answer and calls are messages on channels::

    <|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from streamllm.parsers.call_grammar import (
    CallRules,
    check_plain_name,
    free_text,
    json_rule,
    object_schema,
    text_before,
)
from streamllm.parsers.events import Content, Reasoning
from streamllm.parsers.json_reader import copy_value, skip_whitespace
from streamllm.parsers.text_reader import Emit, Steps, Trimmed
from streamllm.parsers.tool_call_parser import ToolCallParser
from streamllm.parsers.tools import Tool

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER_MARKS = (_MESSAGE, *_ENDS)
_BODY_MARKS = (*_ENDS, _START, _CHANNEL)
_HEADER_STARTS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS, "assistant", " to=", "to=")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_FINAL = "<|channel|>final<|message|>"


class HarmonyParser(ToolCallParser):
    """Reads what follows ``<|start|>assistant``.

    * The analysis channel is reasoning, whoever it is addressed to but a function of the request.
    * A message to ``functions.NAME`` is a call, on any channel; its text is the arguments. Marks inside of
      their strings do not end it.
    * Everything else is content: the final channel, preambles on the commentary channel, and messages to
      functions that the request does not have.
    * Several messages of a kind are parted by a newline. Text without a header is content.
    """

    name = "openai"
    special_tokens = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    handles_reasoning = True

    def __init__(self, tools: Sequence[Tool], *, parallel: bool = True) -> None:
        super().__init__(tools, parallel=parallel)
        self._written: set[type[Content] | type[Reasoning]] = set()
        self._has_arguments = False

    def _parse(self) -> Steps[None]:
        mark = ""
        if not (yield from self._reader.ahead(*_HEADER_STARTS)):
            mark = yield from self._read_text(Content)
        while True:
            recipient, channel = yield from self._read_header(mark)
            name = recipient.removeprefix(_FUNCTIONS)
            if name in self._tools:
                mark = yield from self._read_call(name)
            else:
                mark = yield from self._read_text(Reasoning if channel == "analysis" else Content)

    def _read_calls(self, mark: str) -> Steps[None]:
        raise NotImplementedError  # messages are no calls within content

    def _read_header(self, mark: str) -> Steps[tuple[str, str]]:
        """Recipient and channel of the next message, empty where the header does not say; ``mark`` ended the
        one before. A header without a message is dropped."""
        pieces = [mark]
        while (yield from self._reader.until(_HEADER_MARKS, self._skipped(pieces))) != _MESSAGE:
            pieces.clear()
        header = "".join(pieces)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        return recipient[1] if recipient else "", channel[1] if channel else ""

    def _skipped(self, pieces: list[str]) -> Emit:
        def emit(text: str) -> None:
            pieces.append(text)
            self._reader.forget()

        return emit

    def _read_text(self, kind: type[Content] | type[Reasoning]) -> Steps[str]:
        """Read a message that is no call; returns the mark that ends it."""
        first = True

        def emit(text: str) -> None:
            nonlocal first
            self._reader.forget()
            if text:
                parted = first and kind in self._written
                self._events.append(kind("\n" + text if parted else text))
                self._written.add(kind)
                first = False

        return (yield from self._reader.until(_BODY_MARKS, emit))

    def _read_call(self, name: str) -> Steps[str]:
        """Read a message to a function; returns the mark that ends it."""
        self._begin_call(name)
        self._has_arguments = False
        yield from skip_whitespace(self._reader)
        if (yield from self._reader.ahead("{")):
            yield from copy_value(self._reader, self._add_arguments)
        mark = yield from self._reader.until(_BODY_MARKS, Trimmed(self._add_arguments))
        self._add_arguments(self._cut_arguments())
        self._end_call()
        return mark

    def _add_arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        super()._add_arguments(text)

    def _cut_arguments(self) -> str:
        return "" if self._has_arguments or self._truncated else "{}"

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        """Reasoning may come first, and without ``required`` preambles and an answer; one call ends the text,
        as its mark ends the model's turn."""
        lines = [
            *_messages_before(rules),
            f"call: {' | '.join(f'call_{index}' for index in range(len(rules.tools)))}",
        ]
        for index, tool in enumerate(rules.tools):
            header = (
                f"<|channel|>commentary to=functions.{check_plain_name(tool)} <|constrain|>json<|message|>"
            )
            lines.append(f"call_{index}: {rules.literal(header)} {json_rule(object_schema(tool), tool)}")
        if rules.required:
            return "\n".join(["start: analysis? call", *lines])
        answer = f"answer: {rules.literal(_FINAL)} TEXT?"
        start = "start: (analysis | preamble)* (call | answer)"
        return "\n".join([start, answer, f"TEXT: {free_text()}", *lines])

    @classmethod
    def before_answer(cls, rules: CallRules) -> str:
        before = f"before: (analysis | preamble)* {rules.literal(_FINAL)}"
        return "\n".join([before, *_messages_before(rules)])


def _messages_before(rules: CallRules) -> list[str]:
    """Lark for messages that come before an answer or a call."""
    return [
        *text_before("<|end|>", "body", rules),
        f"next: {rules.literal('<|start|>assistant')}",
        f"analysis: {rules.literal('<|channel|>analysis<|message|>')} body next",
        f"preamble: {rules.literal('<|channel|>commentary<|message|>')} body next",
    ]
