"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first of several strings in a stream and keeps back no more than it must.

    The result does not depend on how the text is cut into pieces. Of several stop strings the one that ends
    first in the text counts; of those that end at the same character, the longest. Kept back is the longest
    end of the text that is a true prefix of some stop string.

    Args:
        stops: non-empty strings.
        include_in_output: the stop string found stays at the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Args:
            text: may be empty.
            armed: ``False`` while stop strings do not count yet (``min_tokens``): the text is ordinary output
                and no match can begin in it.

        Returns:
            The text that may go out, and the stop string if one was found. Generation ends there: what
            followed it in ``text`` is dropped, and no further text may be pushed.
        """
        if not self._matchers:
            return text, None
        if not armed:
            for matcher in self._matchers:
                matcher.matched = 0
            return self.finish() + text, None
        found: tuple[int, int, str] | None = None
        for matcher in self._matchers:
            end = matcher.feed(text)
            if end is not None:
                candidate = (end, -len(matcher.stop), matcher.stop)
                found = candidate if found is None else min(found, candidate)
        held = self.finish()
        pending = held + text
        if found is not None:
            end, _, stop = found
            end += len(held)
            return pending[: end if self._include_in_output else end - len(stop)], stop
        safe = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[safe:]
        return pending[:safe], None

    def finish(self) -> str:
        """The text kept back, released because generation has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt search for one string; its table grows only as far as matches get.

    Attributes:
        stop: the string.
        matched: length of the longest end of the text so far that is a prefix of ``stop``.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _borders[n]: length of the longest true prefix of stop[:n] that is also its suffix.
        self._borders = [0, 0]

    def feed(self, text: str) -> int | None:
        """Where in ``text`` the first match ends, if there is one."""
        stop, matched = self.stop, self.matched
        begin = 0
        if matched == 0:
            begin = text.find(stop[0])
            if begin < 0:
                return None
        for index in range(begin, len(text)):
            character = text[index]
            while matched and stop[matched] != character:
                matched = self._border(matched)
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return index + 1
        self.matched = matched
        return None

    def _border(self, length: int) -> int:
        borders, stop = self._borders, self.stop
        while len(borders) <= length:
            border, character = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + (stop[border] == character))
        return borders[length]
