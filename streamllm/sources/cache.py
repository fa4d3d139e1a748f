"""The folder where fetched models stay, and how files enter it: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from streamllm.errors import ModelLoadError

_POLL_SECONDS = 0.1


def cache_folder() -> Path:
    """``$STREAMLLM_CACHE``, else ``$XDG_CACHE_HOME/streamllm``, else ``~/.cache/streamllm`` (not created)."""
    own = os.environ.get("STREAMLLM_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "streamllm"


@contextlib.contextmanager
def cache_errors(folder: Path, variable: str = "STREAMLLM_CACHE") -> Iterator[None]:
    """Turns what the file system refuses into one line that names the folder and the way out.

    Args:
        variable: the environment variable that moves ``folder``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(
                f"The disk is full while a model is written to {folder}. Free some space, or set "
                f"{variable} to a folder on another disk."
            ) from error
        raise ModelLoadError(
            f"The cache folder {folder} cannot be written ({error.strerror or error}). Make it writable, or "
            f"set {variable} to a folder that is."
        ) from error


@contextlib.contextmanager
def exclusive(
    path: Path, *, on_wait: Callable[[], None] | None = None, give_up: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Holds the lock file ``path`` while the block runs; waits for another process that holds it.

    Yields whether the lock is really held: some file systems have no locks. Callers must be right without
    one (unique temporary names), only slower.

    Args:
        on_wait: called once if another process holds the lock.
        give_up: asked again and again while waiting; once it is true, the block runs without the lock.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(path, "a") as file:
        yield _lock(fcntl.flock, file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, on_wait, give_up)


def _lock(
    flock: Callable[[int, int], None],
    descriptor: int,
    operation: int,
    on_wait: Callable[[], None] | None,
    give_up: Callable[[], bool],
) -> bool:
    """Whether the lock could be had. Polls, for a thread that waits in flock cannot be told to stop."""
    while True:
        try:
            flock(descriptor, operation)
            return True
        except BlockingIOError:
            if give_up():
                return False
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False
