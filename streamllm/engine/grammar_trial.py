"""A process in which constraints are compiled before the engine compiles them.

A constraint is a program that a stranger wrote. The grammar library has limits, yet some constraints
overflow its stack (a chain of 10,000 rules) and some keep it busy for ever (an intersection of a dozen
patterns), and a thread can neither survive the one nor be stopped in the other. This process may die of
either: it has little stack and memory, and an alarm clock. What passes here takes the engine no longer than
it took here.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from typing import IO, TypeVar

import msgspec

from streamllm.engine.constraint import ConstraintSource

COMPILE_SECONDS = 2.0
MASK_SECONDS = 0.05
"""What a grammar's first mask may take; a typical one takes 50 µs."""

MAX_STACK_BYTES = 2 * 2**20
MAX_MEMORY_BYTES = 2 * 2**30
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Verdict(msgspec.Struct, array_like=True):
    """What came of a trial: the grammar in the library's notation, or why it cannot be enforced."""

    grammar: str | None = None
    error: str | None = None


class TrialProcess:
    """The process as the engine sees it; started by the first trial. Used by one thread at a time.

    Args:
        vocabulary: an encoded :class:`~streamllm.engine.grammar_compile.Vocabulary`.
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, source: ConstraintSource) -> Verdict:
        """Try a constraint; blocks for at most some seconds.

        Raises:
            OSError: the process cannot be started.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, msgspec.msgpack.encode(source))
            return msgspec.msgpack.decode(_read(process.stdout), type=Verdict)
        except (OSError, EOFError):
            self.close()
        if process.returncode == -signal.SIGALRM:
            return Verdict(
                error=f"it is too complex: compiling it takes more than {COMPILE_SECONDS:g} seconds"
            )
        return Verdict(error="it is too complex: compiling it takes too much memory or too deep a recursion")

    def close(self) -> None:
        """End the process, whatever it does. A later trial starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    @property
    def started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process and wait until it is ready, some tenths of a second; harmless when it runs.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None:
            return
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "streamllm.engine.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The package need not be installed, and the working directory is not to be trusted.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
            # A Ctrl-C at the terminal is the server's business.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, self._vocabulary)
            _read(process.stdout)
        except (OSError, EOFError):
            self.close()
            raise OSError("the process that tries constraints cannot be started") from None


def main() -> None:
    """Serve trials from stdin until it closes."""
    import resource

    from streamllm.engine.grammar_compile import Vocabulary

    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = msgspec.msgpack.decode(_read(requests), type=Vocabulary).to_llguidance()
    _write(replies, b"")
    while True:
        try:
            source = msgspec.msgpack.decode(_read(requests), type=ConstraintSource)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)
        verdict = _try(tokenizer, source)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, msgspec.msgpack.encode(verdict))


def _try(tokenizer: object, source: ConstraintSource) -> Verdict:
    from streamllm.engine.grammar_compile import ConstraintError, compile_grammar, one_line, to_llguidance

    try:
        grammar = to_llguidance(source)
        matcher = compile_grammar(tokenizer, grammar).matcher.deep_copy()
    except ConstraintError as error:
        return Verdict(error=str(error))
    began = time.process_time()
    matcher.compute_bitmask()
    seconds = time.process_time() - began
    if matcher.is_error():
        reason = matcher.get_error()
        return Verdict(error="no text satisfies it" if "NoExtension" in reason else one_line(reason))
    if seconds > MASK_SECONDS:
        return Verdict(error=f"it is too complex: its first token alone takes {1e3 * seconds:.0f} ms")
    return Verdict(grammar=grammar)


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """
    Raises:
        EOFError: the other side is gone.
    """
    header = pipe.read(_LENGTH.size)
    if len(header) == _LENGTH.size:
        message = pipe.read(_LENGTH.unpack(header)[0])
        if len(message) == _LENGTH.unpack(header)[0]:
            return message
    raise EOFError


if __name__ == "__main__":
    main()
