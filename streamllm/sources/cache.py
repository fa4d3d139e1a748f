"""The folder where fetched models stay, and how files enter it: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from streamllm.errors import ModelLoadError


def cache_folder() -> Path:
    """``$STREAMLLM_CACHE``, else ``$XDG_CACHE_HOME/streamllm``, else ``~/.cache/streamllm`` (not created)."""
    own = os.environ.get("STREAMLLM_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "streamllm"


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that names the folder and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(
                f"The disk is full while a model is written to {folder}. Free some space, or set "
                "STREAMLLM_CACHE to a folder on another disk."
            ) from error
        raise ModelLoadError(
            f"The cache folder {folder} cannot be written ({error.strerror or error}). Make it writable, or "
            "set STREAMLLM_CACHE to a folder that is."
        ) from error


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds the lock file ``path`` while the block runs; waits for another process that holds it.

    Yields whether the lock is really held: some file systems have no locks. Callers must be right without
    one (unique temporary names), only slower.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
