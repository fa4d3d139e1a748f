"""How answers are shown: as they are, or as Markdown where a person looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from streamllm.cli.client import Answer, Piece
from streamllm.errors import StreamLLMError
from streamllm.logs import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


def show_with_figures(answer: Answer, *, markdown: bool, stats: bool) -> None:
    """:func:`show`, then end the answer, and with ``stats`` say how fast it was, however it ended."""
    try:
        show(answer, markdown=markdown)
    finally:
        answer.close()
        if stats:
            say(answer.figures())


def show(answer: Answer, *, markdown: bool) -> None:
    """Write an answer to standard output while it comes.

    A terminal gets no control characters of the model's, reasoning dimmed, and Markdown where ``markdown``;
    a file or a pipe gets the answer's text alone.
    """
    if not sys.stdout.isatty():
        _show_text(answer, plain=True)
    elif markdown:
        _show_markdown(answer)
    else:
        _show_text(answer, plain=False)


def say(text: str) -> None:
    """A line about an answer, on standard error."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _show_text(answer: Answer, *, plain: bool) -> None:
    try:
        for piece in answer:
            if plain and piece.is_thought:
                continue
            sys.stdout.write(piece.text if plain else _for_terminal(piece))
            sys.stdout.flush()
    finally:
        _write_line_end()


def _write_line_end() -> None:
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left again as it exits, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StreamLLMError("standard output was closed by its reader.") from None


def _for_terminal(piece: Piece) -> str:
    text = escape_control_characters(piece.text.replace("\r", ""))
    return f"\x1b[2m{text}\x1b[0m" if piece.is_thought else text


# -- Markdown ----------------------------------------------------------------------------------------------


class _Tail:
    """The unfinished end of a Markdown text, of which the last screenful is shown."""

    def __init__(self) -> None:
        self.text = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.segment import Segment, Segments

        lines = console.render_lines(_markdown(self.text), options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield Segments([*line, Segment.line()])


def _show_markdown(answer: Answer) -> None:
    """Blocks are printed for good when they are over; only the last one is drawn again and again, so that
    answers may be longer than the screen."""
    from rich.console import Console
    from rich.live import Live

    console, tail = Console(), _Tail()
    thinking = False
    with Live(
        tail, console=console, refresh_per_second=12, transient=True, vertical_overflow="visible"
    ) as live:
        try:
            for piece in answer:
                text = escape_control_characters(piece.text.replace("\r", ""))
                if piece.is_thought != thinking:
                    _print(console, tail.text, thinking)
                    tail.text, thinking = "", piece.is_thought
                tail.text += text
                if "\n" in text:
                    finished, tail.text = split_blocks(tail.text)
                    _print(console, finished, thinking)
        finally:
            last, tail.text = tail.text, ""
            live.refresh()
            _print(console, last, thinking)


def _print(console: Console, text: str, is_thought: bool) -> None:
    if text.strip():
        console.print(_markdown(text), style="dim" if is_thought else None)
        console.print()


def _markdown(text: str) -> Any:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown cut before its last block: after a blank line that neither a fence nor an indented line that
    goes on (of a list's item) stands against."""
    cut = position = 0
    fence: str | None = None
    after_blank = False
    for line in text.splitlines(keepends=True):
        if fence is None and after_blank and not line[0].isspace():
            cut = position
        marker = line.lstrip()[:3]
        if marker in ("```", "~~~"):
            fence = marker if fence is None else None if fence == marker else fence
        after_blank = not line.strip()
        position += len(line)
    return text[:cut], text[cut:]
