"""Reading a text that arrives in pieces as if it were there as a whole.

Parsers are generators: they ``yield`` where they must see more text to go on. What they decide therefore
depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser: ``yield`` asks for more text, the value returned is what it read."""

Emit: TypeAlias = Callable[[str], object]

WHITESPACE = re.compile(r"\s+")


class EndOfOutput(Exception):
    """The text has ended where a parser needs more of it."""


class TextReader:
    """The text that has arrived and is not read yet.

    Everything that is read is also kept in :attr:`taken` until :meth:`forget`, so that a parser that finds
    out that it misread can give the text back.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self._text = ""
        self._position = 0
        self._ended = False

    def feed(self, text: str) -> None:
        """More text arrives."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more text will arrive."""
        self._ended = True

    def forget(self) -> None:
        """What has been read so far will not be given back."""
        self.taken.clear()

    def take(self, count: int) -> str:
        """Read so many characters, which must be there."""
        text = self._text[self._position : self._position + count]
        self._position += count
        self.taken.append(text)
        return text

    def take_rest(self) -> str:
        """Read all that is there."""
        return self.take(len(self._text) - self._position)

    def peek(self) -> Steps[str]:
        """The next character, which stays unread.

        Raises:
            EndOfOutput: there is none.
        """
        while self._position == len(self._text):
            if self._ended:
                raise EndOfOutput
            yield
        return self._text[self._position]

    def look(self, count: int) -> Steps[str]:
        """The next characters, unread: so many, or fewer where the text ends before."""
        while len(self._text) - self._position < count and not self._ended:
            yield
        return self._text[self._position : self._position + count]

    def at_end(self) -> Steps[bool]:
        """Whether nothing follows."""
        while self._position == len(self._text) and not self._ended:
            yield
        return self._position == len(self._text)

    def run(self, characters: re.Pattern[str], emit: Emit | None = None) -> Steps[None]:
        """Read all that is of ``characters`` (a pattern such as ``[...]+``), up to what is not or to the
        text's end."""
        while not (yield from self.at_end()):
            match = characters.match(self._text, self._position)
            if match is None:
                return
            piece = self.take(match.end() - self._position)
            if emit is not None:
                emit(piece)

    def word(self, characters: re.Pattern[str]) -> Steps[str]:
        """A run as text; it ends where another character follows.

        Raises:
            EndOfOutput: the text ends first.
        """
        pieces: list[str] = []
        yield from self.run(characters, pieces.append)
        yield from self.peek()
        return "".join(pieces)

    def ahead(self, *options: str) -> Steps[str | None]:
        """With which of the options the text goes on, the longest of them, unread; ``None``: none of them."""
        while True:
            left = self._text[self._position : self._position + max(map(len, options))]
            if self._ended or not any(len(o) > len(left) and o.startswith(left) for o in options):
                return max((o for o in options if left.startswith(o)), key=len, default=None)
            yield

    def accept(self, *options: str) -> Steps[str | None]:
        """Read one of the options if the text goes on with it; returns which."""
        option = yield from self.ahead(*options)
        if option is not None:
            self.take(len(option))
        return option

    def ends_inside(self, *options: str) -> bool:
        """Whether the text has ended with the beginning of one of the options."""
        rest = self._text[self._position :]
        return self._ended and bool(rest) and any(option.startswith(rest) for option in options)

    def until(self, marks: Sequence[str], emit: Emit) -> Steps[str]:
        """Read up to and including the first of ``marks``; what comes before it is emitted as it arrives.

        Args:
            marks: not empty strings; there may be none.
            emit: takes the pieces, which may be empty.

        Returns:
            The mark.

        Raises:
            EndOfOutput: none comes; everything has been emitted.
        """
        while True:
            found = _first(self._text, self._position, marks)
            if found is not None:
                start, mark = found
                emit(self.take(start - self._position))
                return self.take(len(mark))
            held = 0 if self._ended else _partial(self._text, self._position, marks)
            emit(self.take(len(self._text) - held - self._position))
            if self._ended:
                raise EndOfOutput
            yield


class Trimmed:
    """Passes a text on in pieces, without what stands at its edges.

    Args:
        emit: takes the pieces, never an empty one.
        trim: takes off the text's end what is to be left out.
        start: leave out the whitespace that the text begins with, too.
    """

    def __init__(self, emit: Emit, trim: Callable[[str], str] = str.rstrip, *, start: bool = False) -> None:
        self._emit = emit
        self._trim = trim
        self._at_start = start
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        solid = self._trim(text)
        self._held = text[len(solid) :]
        if solid:
            self._emit(solid)


def _first(text: str, position: int, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where in the text the first of the marks stands."""
    found = [(start, mark) for mark in marks if (start := text.find(mark, position)) >= 0]
    return min(found, default=None)


def _partial(text: str, position: int, marks: Sequence[str]) -> int:
    """Length of the longest end of the text with which a mark may begin."""
    longest = min(max(map(len, marks), default=1) - 1, len(text) - position)
    firsts = {mark[0] for mark in marks}
    for start in range(len(text) - longest, len(text)):
        if text[start] in firsts and any(mark.startswith(text[start:]) for mark in marks):
            return len(text) - start
    return 0
