"""The prompt at which ``chat`` and ``complete`` read what a person types, or lines of a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping

from streamllm.cli.display import say
from streamllm.errors import StreamLLMError


def read_and_ask(ask: Callable[[str], None], model: str, commands: Mapping[str, Callable[[], None]]) -> int:
    """Read lines and ``ask`` each, until the input ends, ``/exit``, or Ctrl-C at the prompt.

    Args:
        ask: shows the answer to a line; a Ctrl-C meanwhile only stops that answer.
        model: its name, for the greeting.
        commands: what a line ``/name`` does instead, besides ``/exit``.

    Returns:
        0.

    Raises:
        StreamLLMError: ``ask`` did, and nobody is there to read about it and go on.
        KeyboardInterrupt: Ctrl-C at the prompt.
    """
    attended = sys.stdin.isatty()
    known = ", ".join([*commands, "/exit"])
    if attended:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history in input())
        say(f"{model}: Ctrl-C stops an answer, a second one leaves; {known}")
    while True:
        try:
            line = input("> " if attended and sys.stdout.isatty() else "")
        except EOFError:
            return 0
        command = line.strip()
        if command == "/exit":
            return 0
        if command in commands:
            commands[command]()
        elif re.fullmatch(r"/[a-z]+", command):
            say(f"{command} is no command; there are {known}")
        elif command:
            _ask(ask, line, attended)


def _ask(ask: Callable[[str], None], line: str, attended: bool) -> None:
    try:
        ask(line)
    except KeyboardInterrupt:
        if not attended:
            raise
        say("stopped")
    except StreamLLMError as error:
        if not attended:
            raise
        say(f"streamllm: error: {error}")
