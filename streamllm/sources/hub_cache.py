"""The Hugging Face hub's cache, read and written in its own layout.

https://huggingface.co/docs/huggingface_hub/guides/manage-cache: ``models--org--name`` holds ``blobs`` (files
by their hash), ``snapshots/COMMIT`` (links to them by name) and ``refs`` (a branch's or tag's commit).
Reading it here and not with huggingface_hub spares a cached model that library's import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from streamllm.sources.hub_files import weight_index

COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIX = "models--"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "spiece.model")
_COPIED = 1 << 20


def hub_cache() -> Path:
    """``$HF_HUB_CACHE``, else ``$HF_HOME/hub``, else ``~/.cache/huggingface/hub`` (not created)."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return Path(os.path.expandvars(own)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


@dataclass(frozen=True)
class CachedRepository:
    """A model repository's place in the cache, there or not."""

    repo_id: str

    @property
    def folder(self) -> Path:
        return hub_cache() / (_PREFIX + self.repo_id.replace("/", "--"))

    @property
    def locks(self) -> Path:
        """The folder of the lock files, one a blob, that huggingface_hub holds while it downloads."""
        return hub_cache() / ".locks" / self.folder.name

    def blob(self, name: str) -> Path:
        return self.folder / "blobs" / name

    def commit(self, revision: str | None) -> str | None:
        """The commit that a revision (``None``: main) was when it was last fetched."""
        revision = revision or "main"
        if COMMIT.fullmatch(revision):
            return revision
        try:
            return (self.folder / "refs" / revision).read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError, ValueError):
            return None

    def snapshot(self, revision: str | None) -> Path | None:
        """The folder of a cached revision, whole or not."""
        commit = self.commit(revision)
        folder = self.folder / "snapshots" / commit if commit else None
        return folder if folder is not None and folder.is_dir() else None

    def revisions(self) -> dict[str, Path]:
        """Cached snapshots by branch or tag, or by commit where that is all that leads to them."""
        refs = self.folder / "refs"
        names = [path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file()]
        found = {name: path for name in sorted(names) if (path := self.snapshot(name)) is not None}
        for path in sorted((self.folder / "snapshots").glob("*")):
            if path.is_dir() and path not in found.values():
                found[path.name] = path
        return found

    def link(self, commit: str, name: str, blob: Path) -> None:
        """Puts a blob into a snapshot under its name."""
        pointer = self.folder / "snapshots" / commit / name
        if pointer.exists():
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a link whose blob was removed
            pointer.unlink()
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:
            return
        except OSError:
            # A file system without links: then the file itself lies there, as huggingface_hub does it. Small
            # ones are copied, for another name may have the same content.
            if blob.stat().st_size < _COPIED:
                shutil.copyfile(blob, pointer)
            else:
                os.replace(blob, pointer)

    def set_commit(self, revision: str | None, commit: str) -> None:
        """Notes what a revision stands for, so that it is found without the network."""
        revision = revision or "main"
        if revision == commit or self.commit(revision) == commit:
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            file.write(commit)
        os.replace(file.name, path)

    def remove(self) -> None:
        """Deletes all revisions, whole or not."""
        shutil.rmtree(self.folder)
        shutil.rmtree(self.locks, ignore_errors=True)


def cached_repositories() -> list[CachedRepository]:
    """Every model repository in the cache, by name."""
    try:
        names = sorted(entry.name for entry in hub_cache().iterdir() if entry.is_dir())
    except OSError:
        return []
    return [
        CachedRepository(n.removeprefix(_PREFIX).replace("--", "/", 1))
        for n in names
        if n.startswith(_PREFIX)
    ]


def snapshot_files(snapshot: Path) -> list[str]:
    """Names of a snapshot's files that are there, with their folders."""
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())


def missing_file(folder: Path) -> str | None:
    """The first file that loading a folder model needs and ``folder`` lacks."""
    if not (folder / "config.json").is_file():
        return "config.json"
    names = snapshot_files(folder)
    index = weight_index(names)
    if index is None:
        return "model.safetensors or pytorch_model.bin"
    if not index.endswith(".index.json"):
        return None
    shards = shards_of(folder / index)
    if shards is None:
        return f"readable {index}"
    return next((shard for shard in shards if shard not in names), None)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder model has a tokenizer of any kind."""
    return any(path.is_file() for pattern in _TOKENIZERS for path in folder.glob(pattern))


def shards_of(index: Path) -> list[str] | None:
    """Files that an index of shards lists; ``None`` if it cannot be read."""
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, OSError):
        return None
    return sorted(map(str, shards))
