"""Downloads files into the hub's cache: resumed, several at a time, and checked before they count.

huggingface_hub compares sizes only, and since version 2 begins an interrupted file from its start. Here what
has arrived stays as ``blobs/HASH.incomplete``, the name that its older versions resume too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from streamllm.errors import ModelLoadError
from streamllm.sources.cache import exclusive
from streamllm.sources.hub_cache import CachedRepository

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

TIMEOUT = 10.0
"""Seconds without an answer, or without a byte, after which a connection counts as broken."""

_ATTEMPTS = 2  # that may bring nothing, one after the other
_PARALLEL = 4
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at one commit.

    Attributes:
        name: in the repository, with its folders.
        url: where it is downloaded.
        size: in bytes.
        blob: its name in the cache and its checksum: SHA-256 of a file in LFS (64 digits), else git's SHA-1.
    """

    name: str
    url: str
    size: int
    blob: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", self.blob):
            raise ModelLoadError(f"The hub gives no checksum for {self.name}, but {self.blob!r}.")
        if self.name.startswith(("/", ".")) or "\\" in self.name or ".." in self.name.split("/"):
            raise ModelLoadError(f"The hub lists a file {self.name!r}, which would lie outside its folder.")

    def digest(self) -> Any:
        """An empty hash of the kind that :attr:`blob` is."""
        if len(self.blob) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class BlobDownload:
    """Fetches blobs of one repository.

    Args:
        headers: of every request; credentials go to the hub's own host only.
        bar: a tqdm bar of bytes.
    """

    def __init__(self, repository: CachedRepository, headers: Mapping[str, str], bar: Any):
        self._repository = repository
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._bar = bar
        self._stop = threading.Event()

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Puts every file among the blobs, whole and checked.

        Raises:
            ModelLoadError: a checksum is wrong (the file is deleted), or the disk has too little space.
            httpx.HTTPError: the hub does not answer, refuses or breaks off; what has arrived stays.
            OSError: a file cannot be written; what has arrived stays.
        """
        import httpx

        missing = [file for file in files if not self._repository.blob(file.blob).exists()]
        if not missing:
            return
        self._repository.blob("").mkdir(parents=True, exist_ok=True)
        self._repository.locks.mkdir(parents=True, exist_ok=True)
        self._check_space(missing)
        size = sum(file.size for file in missing)
        self._bar.total = (self._bar.total or 0) + size
        logger.info(
            "Downloading %.1f MB of %s to %s", size / 1e6, self._repository.repo_id, self._repository.folder
        )
        with (
            httpx.Client(headers=self._headers, follow_redirects=True, timeout=TIMEOUT) as client,
            ThreadPoolExecutor(_PARALLEL, "download") as pool,
        ):
            try:
                for done in as_completed([pool.submit(self._fetch_one, client, file) for file in missing]):
                    done.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _check_space(self, files: Sequence[RemoteFile]) -> None:
        folder = self._repository.folder
        needed = sum(file.size - _size(self._part(file)) for file in files)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ModelLoadError(
                f"The disk is full: {self._repository.repo_id} needs {needed / 1e9:.2f} GB more and {folder} "
                f"has {free / 1e9:.2f} GB. Free some space, or set HF_HUB_CACHE to a folder on another disk."
            )

    def _part(self, file: RemoteFile) -> Path:
        return self._repository.blob(f"{file.blob}.incomplete")

    def _fetch_one(self, client: httpx.Client, file: RemoteFile) -> None:
        blob, part = self._repository.blob(file.blob), self._part(file)
        with exclusive(self._repository.locks / f"{file.blob}.lock", give_up=self._stop.is_set) as locked:
            if blob.exists():  # another process was faster
                self._bar.update(file.size)
                return
            if locked:
                self._fetch_to(client, file, part, blob)
            elif not self._stop.is_set():
                # Without locks two processes could write to the same part: this one is nobody else's.
                part = part.with_name(f"{file.blob}.{os.getpid()}.incomplete")
                try:
                    self._fetch_to(client, file, part, blob)
                finally:
                    part.unlink(missing_ok=True)

    def _fetch_to(self, client: httpx.Client, file: RemoteFile, part: Path, blob: Path) -> None:
        with open(part, "a+b", buffering=0) as target:
            digest = self._receive_all(client, file, target)
            if self._stop.is_set():
                return
            os.fsync(target.fileno())
        if digest.hexdigest() != file.blob:
            part.unlink()
            raise ModelLoadError(
                f"{file.name} of {self._repository.repo_id} arrived with a wrong checksum "
                f"({digest.name.upper()} {digest.hexdigest()}, the hub says {file.blob}). It was deleted; "
                "try again."
            )
        os.replace(part, blob)

    def _receive_all(self, client: httpx.Client, file: RemoteFile, target: BinaryIO) -> Any:
        """Brings ``target`` to the file's size, over several connections if need be; returns its hash."""
        import httpx

        digest = self._resumed(file, target)
        fruitless = 0
        while (start := target.tell()) < file.size and not self._stop.is_set():
            try:
                digest = self._receive(client, file, target, digest)
            except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError):
                fruitless = fruitless + 1 if target.tell() <= start else 0
                if fruitless == _ATTEMPTS:
                    raise
        return digest

    def _resumed(self, file: RemoteFile, target: BinaryIO) -> Any:
        """The hash of what an earlier attempt left in ``target``, which is read to its end."""
        digest = file.digest()
        if _size(Path(target.name)) > file.size:
            target.truncate(0)
        target.seek(0)
        while chunk := target.read(_CHUNK):
            digest.update(chunk)
            self._bar.update(len(chunk))
            if self._stop.is_set():
                break
        return digest

    def _receive(self, client: httpx.Client, file: RemoteFile, target: BinaryIO, digest: Any) -> Any:
        """One request for what is missing."""
        start = target.tell()
        headers = {"Range": f"bytes={start}-"} if start else {}
        with client.stream("GET", file.url, headers=headers) as response:
            response.raise_for_status()
            if start and response.status_code != 206:  # a server that knows no ranges
                target.truncate(0)
                target.seek(0)
                self._bar.update(-start)
                digest = file.digest()
            for chunk in response.iter_raw():
                target.write(chunk)
                digest.update(chunk)
                self._bar.update(len(chunk))
                if self._stop.is_set() or target.tell() > file.size:
                    break
        return digest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
