"""What the parsers of all formats have in common."""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from streamllm.parsers.call_grammar import CallRules
from streamllm.parsers.events import (
    Content,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from streamllm.parsers.json_reader import NotJsonError, skip_whitespace
from streamllm.parsers.text_reader import EndOfOutput, Steps, TextReader
from streamllm.parsers.tools import Tool


class NotACallError(Exception):
    """What looked like a call is none."""


class ToolCallParser(ABC):
    """Finds the calls in a text of one format (an :class:`~streamllm.parsers.events.OutputParser`).

    A format is a subclass, made known by :func:`~streamllm.parsers.registry.register_tool_parser`. It says
    with what calls begin (:attr:`marks`), reads them (:meth:`_read_calls`) and writes the grammar that forces
    them (:meth:`grammar`).

    Args:
        tools: the request's tools: calls of others are content.
        parallel: ``False``: calls after the first are dropped.

    Attributes:
        name: what ``--tool-call-parser`` calls the format.
        aliases: other names for it.
        special_tokens: tokens that the parser must see in the text even where special tokens are skipped.
        marks: a call, or a list of them, begins with one of these.
        starts: at the very beginning of the text, calls may also begin with one of these, which stay unread.
        handles_reasoning: the format marks reasoning too, and this parser splits it off.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()
    handles_reasoning: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Tool], *, parallel: bool = True) -> None:
        self._reader = TextReader()
        self._tools = {tool.name: tool for tool in tools}
        self._parallel = parallel
        self._truncated = False
        self._events: list[Event] = []
        self._content = _Content(self._events)
        self._num_calls = 0
        self._candidate: str | None = None
        """Name of the call that is being read and has not begun."""
        self._is_open = False
        self._committed = False
        """A call has begun since the last mark."""
        self._steps = self._main()

    def feed(self, text: str) -> list[Event]:
        self._reader.feed(text)
        return self._advance()

    def finish(self, truncated: bool) -> list[Event]:
        self._truncated = truncated
        self._reader.end()
        return self._advance()

    @classmethod
    @abstractmethod
    def grammar(cls, rules: CallRules) -> str:
        """A grammar in Lark under which the model's text has calls as ``rules`` say, for
        ``StructuredOutputsParams.grammar``.

        Raises:
            InvalidRequestError: this format cannot be forced for one of the tools.
        """

    @classmethod
    def before_answer(cls, rules: CallRules) -> str:
        """What stands before an answer's text in formats that mark it, as Lark with a rule ``before``; empty
        where answers begin at once."""
        return ""

    @staticmethod
    def make_id() -> str:
        """A new call's id."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    # -- for the formats -----------------------------------------------------------------------------------

    @abstractmethod
    def _read_calls(self, mark: str) -> Steps[None]:
        """Read what follows a mark, or the text's beginning (``mark`` is empty).

        Raises:
            NotACallError, NotJsonError: it is no call, or ceases to be one: what has been read since the mark
                (or since the last arguments) is content.
            EndOfOutput: the text ends first.
        """

    def _parse(self) -> Steps[None]:
        """Read the whole text."""
        if self.starts:
            yield from skip_whitespace(self._reader)
            if (yield from self._reader.ahead(*self.starts)):
                yield from self._attempt("")
            else:
                self._give_back()
        while True:
            mark = yield from self._reader.until(self.marks, self._add_content)
            yield from self._attempt(mark)

    def _attempt(self, mark: str) -> Steps[None]:
        self._committed = False
        try:
            yield from self._read_calls(mark)
        except (NotACallError, NotJsonError):
            self._give_back()
        self._candidate = None
        self._reader.forget()

    def _add_content(self, text: str) -> None:
        self._content.add(text)
        self._reader.forget()

    def _give_back(self) -> None:
        """What has been read since the mark is content."""
        self._add_content("".join(self._reader.taken))

    def _check_name(self, name: str) -> str:
        """The name of one of the tools.

        Raises:
            NotACallError: of none.
        """
        if name not in self._tools:
            raise NotACallError
        self._candidate = name
        return name

    def _begin_call(self, name: str) -> None:
        """From here on it is a call, whatever follows."""
        self._num_calls += 1
        self._is_open = self._committed = True
        self._candidate = None
        self._content.end_part()
        self._reader.forget()
        self._add_event(ToolCallStart(self._num_calls - 1, self.make_id(), name))

    def _add_arguments(self, text: str) -> None:
        self._reader.forget()
        if text:
            self._add_event(ToolCallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        self._is_open = False
        self._add_event(ToolCallEnd(self._num_calls - 1))

    def _break_off(self, closing: str) -> NoReturn:
        """What has been read since the last arguments is none, and ends the call."""
        text = "".join(self._reader.taken)
        self._add_arguments(closing)
        self._end_call()
        self._add_content(text)
        raise NotACallError

    def _skip_end(self, *marks: str) -> Steps[bool]:
        """Read whitespace and one of the marks that end a call, which models also leave out, or the beginning
        of one that was cut off; returns whether one was there."""
        yield from skip_whitespace(self._reader)
        found = yield from self._reader.accept(*marks)
        if found is None and self._truncated and self._reader.ends_inside(*marks):
            self._reader.take_rest()
        return found is not None

    def _cut_arguments(self) -> str:
        """What has been read of an argument and not been added, when the text ends there."""
        return ""

    # -- inside --------------------------------------------------------------------------------------------

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events[:] = self._events[:], []
        return events

    def _add_event(self, event: ToolCallStart | ToolCallArguments | ToolCallEnd) -> None:
        if self._parallel or event.index == 0:
            self._events.append(event)

    def _main(self) -> Steps[None]:
        with contextlib.suppress(EndOfOutput):
            yield from self._parse()
        if self._is_open:
            self._add_arguments(self._cut_arguments())
            self._end_call()
        elif self._candidate is not None and self._truncated:
            self._begin_call(self._candidate)
            self._end_call()
        elif not self._committed:
            self._give_back()
        self._content.finish()


class _Content:
    """Text around calls. Whitespace at its edges is held back: with calls, it is content only between other
    content."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._held = ""
        self._has_text = False
        self._has_calls = False

    def add(self, text: str) -> None:
        solid = text.rstrip()
        if not solid:
            self._held += text
            return
        joined = self._held + solid
        if self._has_calls and not self._has_text:
            joined = joined.lstrip()
        self._events.append(Content(joined))
        self._has_text = True
        self._held = text[len(solid) :]

    def end_part(self) -> None:
        """A call begins."""
        self._has_calls = True

    def finish(self) -> None:
        if self._held and not self._has_calls:
            self._events.append(Content(self._held))
