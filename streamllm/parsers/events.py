"""What a parser finds in a model's text, and the message that it adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: ``index`` counts the message's calls from 0, ``name`` is one of the request's tools."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """No more arguments come for this call."""

    index: int


Event: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a whole; ``arguments`` is JSON text as the model wrote it, incomplete if it was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A message as a whole. ``content`` and ``reasoning`` are ``None`` where the model wrote none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


class OutputParser(Protocol):
    """Reads one generated text in pieces.

    However the text is cut into pieces, the events, merged (:func:`merged`), are the same. A piece that has
    been emitted is never taken back.
    """

    def feed(self, text: str) -> list[Event]:
        """Take in the next piece of text, which may be empty; returns what is certain by now."""

    def finish(self, truncated: bool) -> list[Event]:
        """Take in that no more text comes; returns the rest. Neither method may be called afterwards.

        Args:
            truncated: the text was cut off (``max_tokens``, a stop string) rather than ended by the model. A
                call that it cuts in two keeps what there is of its arguments.
        """


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """The events with adjacent pieces of the same text joined."""
    last: Event | None = None
    for event in events:
        if isinstance(event, (Content, Reasoning)) and type(last) is type(event):
            last = replace(event, text=last.text + event.text)  # type: ignore[union-attr]
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and last.index == event.index
        ):
            last = replace(event, text=last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def collect(events: Iterable[Event]) -> ParsedMessage:
    """The message that the events of one text add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart():
                starts.append(event)
                arguments[event.index] = []
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    return ParsedMessage(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=[ToolCall(start.id, start.name, "".join(arguments[start.index])) for start in starts],
    )
