"""Models from the Hugging Face hub, in its own cache.

huggingface_hub says what a repository holds and with which credentials; the files are downloaded here, for
the sake of resuming, checksums and time-outs (:mod:`streamllm.sources.blob_download`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from streamllm.errors import ModelLoadError
from streamllm.sources.blob_download import TIMEOUT, BlobDownload, RemoteFile
from streamllm.sources.cache import cache_errors, exclusive
from streamllm.sources.hub_cache import (
    COMMIT,
    CachedRepository,
    has_tokenizer,
    missing_file,
    shards_of,
    snapshot_files,
)
from streamllm.sources.hub_files import choose_gguf, description_files, weight_index

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::(?P<file>\w[\w.-]*(?:/\w[\w.-]*)*))?"
)


@dataclass(frozen=True)
class HubName:
    """A repository, and the file or quantisation of one with GGUFs: ``org/name:Q4_K_M``."""

    repo_id: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """``None`` for what cannot be on the hub. Ollama's ``hf.co/`` or the page's address may lead."""
        match = _NAME.fullmatch(name)
        return cls(match["repo"], match["file"]) if match else None

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.file}" if self.file else self.repo_id


@dataclass(frozen=True)
class HubModel:
    """A model's files in the hub's cache: a folder, or the first file of a GGUF."""

    kind: Literal["folder", "gguf"]
    path: Path


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` (or ``TRANSFORMERS_OFFLINE``) forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def fetch(
    name: HubName, *, revision: str | None, offline: bool, progress: bool, update: bool = False
) -> HubModel:
    """A hub model's files: from the hub's cache where they are whole, else downloaded.

    Args:
        update: ask the hub whether the revision has changed, even if it is cached.

    Raises:
        ModelLoadError: no such model, file or revision, no permission, no network, a wrong checksum, a full
            disk or an unwritable cache, or not a model of these formats. What was in the cache stays.
    """
    found = cached(name, revision)
    # Other programs note a revision before all of it is there.
    is_whole = found is not None and (found.kind == "gguf" or has_tokenizer(found.path))
    if found is not None and (offline or (is_whole and not update)):
        return found
    if offline:
        raise ModelLoadError(
            f"The model {name} is not complete in the Hugging Face cache, and the network is not to be used "
            f"(offline). Unset HF_HUB_OFFLINE, or fetch it once with `streamllm pull {name}`."
        )
    return Repository.ask(name.repo_id, revision).download(name, revision, progress)


def cached(name: HubName, revision: str | None) -> HubModel | None:
    """What the cache holds of a model, if it is whole: an interrupted download leaves parts."""
    snapshot = CachedRepository(name.repo_id).snapshot(revision)
    if snapshot is None:
        return None
    if name.file is None and missing_file(snapshot) is None:
        return HubModel("folder", snapshot)
    try:
        ggufs = choose_gguf(snapshot_files(snapshot), name.file, name.repo_id)
    except ModelLoadError:  # the network decides which one is meant
        return None
    return HubModel("gguf", snapshot / ggufs[0]) if ggufs else None


@dataclass(frozen=True)
class Repository:
    """What the hub says about a repository at one commit.

    Attributes:
        files: huggingface_hub's ``RepoSibling`` by name.
        headers: of requests, with the user's token.
    """

    repo_id: str
    commit: str
    endpoint: str
    files: Mapping[str, Any]
    headers: Mapping[str, str]

    @classmethod
    def ask(cls, repo_id: str, revision: str | None) -> Repository:
        """
        Raises:
            ModelLoadError: no such model or revision, no permission, or no answer.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers

        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        try:
            api = HfApi(endpoint=endpoint)
            info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT)
        except Exception as error:  # a boundary: HTTP, validation and other errors of several libraries
            raise ModelLoadError(explain(repo_id, revision, error)) from error
        if not COMMIT.fullmatch(str(info.sha)):
            raise ModelLoadError(
                f"{endpoint} names no commit of {repo_id}: it does not speak the Hugging Face hub's API. "
                "Check HF_ENDPOINT and the network."
            )
        files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        return cls(repo_id, str(info.sha), endpoint, files, build_hf_headers(library_name="streamllm"))

    def download(self, name: HubName, revision: str | None, progress: bool) -> HubModel:
        """Fetches what ``name`` needs; only once all is there does the cache say that the revision is."""
        from tqdm import tqdm

        ggufs = self.ggufs(name)
        cache = CachedRepository(self.repo_id)
        with cache_errors(cache.folder, "HF_HUB_CACHE"):
            cache.locks.mkdir(parents=True, exist_ok=True)
            with (
                exclusive(cache.locks / "streamllm.lock", on_wait=self._say_waiting),
                tqdm(
                    total=0,
                    unit="B",
                    unit_scale=True,
                    desc=f"Downloading {name}",
                    disable=not (progress and sys.stderr.isatty()),
                ) as bar,
            ):
                download = BlobDownload(cache, self.headers, bar)
                if ggufs:
                    self._fetch(download, cache, ggufs)
                else:
                    self._fetch(download, cache, description_files(self.files))
                    self._fetch(download, cache, self._weights(cache))
                cache.set_commit(revision, self.commit)
        snapshot = cache.folder / "snapshots" / self.commit
        return HubModel("gguf", snapshot / ggufs[0]) if ggufs else HubModel("folder", snapshot)

    def _say_waiting(self) -> None:
        logger.warning("Another process is downloading %s; waiting for it.", self.repo_id)

    def ggufs(self, name: HubName) -> tuple[str, ...]:
        """The GGUF to fetch; empty for a folder of config, weights and tokenizer."""
        if name.file is None and "config.json" in self.files and weight_index(self.files):
            return ()
        ggufs = choose_gguf(self.files, name.file, name.repo_id)
        if ggufs is not None:
            return ggufs
        if name.file is not None:
            raise ModelLoadError(f"The hub's {self.repo_id} has no .gguf files. Leave out :{name.file}.")
        missing = (
            "config.json" if "config.json" not in self.files else "model.safetensors or pytorch_model.bin"
        )
        raise ModelLoadError(
            f"The hub's {self.repo_id} has no {missing} and no .gguf file: it is not a language model that "
            "can be loaded."
        )

    def _weights(self, cache: CachedRepository) -> list[str]:
        index = str(weight_index(self.files))
        if not index.endswith(".index.json"):
            return [index]
        shards = shards_of(cache.folder / "snapshots" / self.commit / index)
        if shards is None:
            raise ModelLoadError(f"The hub's {self.repo_id} has a {index} that is no index of shards.")
        for shard in shards:
            if shard not in self.files:
                raise ModelLoadError(f"The hub's {self.repo_id} has no {shard}, which its {index} lists.")
        return shards

    def _fetch(self, download: BlobDownload, cache: CachedRepository, names: Iterable[str]) -> None:
        import httpx

        snapshot = cache.folder / "snapshots" / self.commit
        files = [self.remote_file(name) for name in names if not (snapshot / name).is_file()]
        try:
            download.fetch(files)
        except httpx.HTTPError as error:
            raise ModelLoadError(explain(self.repo_id, self.commit, error)) from error
        for file in files:
            cache.link(self.commit, file.name, cache.blob(file.blob))

    def remote_file(self, name: str) -> RemoteFile:
        """Where a file of the repository is, how large, and its checksum."""
        file = self.files[name]
        url = f"{self.endpoint}/{self.repo_id}/resolve/{self.commit}/{quote(name)}"
        return RemoteFile(name, url, file.size or 0, file.lfs.sha256 if file.lfs else str(file.blob_id))


def explain(repo_id: str, revision: str | None, error: Exception) -> str:
    """One line for an error of huggingface_hub or httpx."""
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    if isinstance(error, errors.GatedRepoError) or _error_code(response) == "GatedRepo":
        return (
            f"The hub's {repo_id} is gated: accept its terms on https://huggingface.co/{repo_id} and set "
            "HF_TOKEN (or run `hf auth login`)."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The model {repo_id} does not exist: there is no such folder here and no such model on the hub "
            "(or it is private: then set HF_TOKEN)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The hub's {repo_id} has no revision {revision!r}."
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r} is neither an existing folder nor a hub id (org/name)."
    status = getattr(response, "status_code", None)
    if status in (401, 403):
        return (
            f"The hub refuses access to {repo_id} (HTTP {status}). Set HF_TOKEN to a token that may read it."
        )
    if status is not None:
        return f"The hub answered HTTP {status} for {repo_id}. Try again later."
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"The model {repo_id} could not be fetched from the Hugging Face hub ({first_line}). Check the "
        "network and try again (what has arrived is kept), or give a folder or a .gguf file."
    )


def _error_code(response: Any) -> str | None:
    return getattr(response, "headers", {}).get("X-Error-Code")
