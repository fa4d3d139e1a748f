"""The models in the caches, ours and the hub's: what there is, how large, and when it was last used."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.sources.cache import cache_folder
from streamllm.sources.gguf_file import GGUFFile
from streamllm.sources.hub_cache import CachedRepository, cached_repositories, missing_file, snapshot_files
from streamllm.sources.hub_files import weight_index
from streamllm.sources.model_files import gguf_quantisation, gguf_sets


@dataclass(frozen=True)
class InstalledModel:
    """A whole model in a cache.

    Attributes:
        name: what serve, plan and remove call it.
        revision: what ``--revision`` must say; ``None``: nothing.
        kind: ``"folder"`` or ``"gguf"``.
        format: ``"GGUF Q4_1"``, ``"safetensors bfloat16"``, ``"bin float16"``.
        architecture: as in ``config.json``, or as llama.cpp calls it; ``None`` if the file does not say.
        size: in bytes on the disk.
        last_used: seconds since 1970.
    """

    name: str
    revision: str | None
    kind: str
    format: str
    architecture: str | None
    size: int
    last_used: float


def installed_models() -> list[InstalledModel]:
    """Every whole model in the caches, those last used first."""
    found = [*_in_wheels(), *(model for repository in cached_repositories() for model in _on_hub(repository))]
    return sorted(found, key=lambda model: (-model.last_used, model.name))


def mark_used(path: Path) -> None:
    """Notes in its access time that a model is used, also where the file system does not."""
    with contextlib.suppress(OSError):
        file = _dated_file(path)
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def _dated_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _in_wheels() -> Iterator[InstalledModel]:
    for record in sorted(cache_folder().glob("pypi/*/source.json")):
        folder = record.parent
        project, _, version = folder.name.rpartition("-")
        try:
            names = json.loads(record.read_text(encoding="utf-8"))["ggufs"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name in names:
            if (folder / name).is_file():
                suffix = f"/{name}" if len(names) > 1 else ""
                yield _gguf(f"pypi:{project}=={version}{suffix}", [folder / name])


def _on_hub(repository: CachedRepository) -> Iterator[InstalledModel]:
    for revision, snapshot in repository.revisions().items():
        other = None if revision == "main" else revision
        if missing_file(snapshot) is None:
            yield _folder(repository.repo_id, other, snapshot)
        for name, parts in gguf_sets(snapshot_files(snapshot)).items():
            tag = gguf_quantisation(name) or name.rsplit("/", 1)[-1]
            yield _gguf(f"{repository.repo_id}:{tag}", [snapshot / part for part in parts], other)


def _gguf(name: str, paths: list[Path], revision: str | None = None) -> InstalledModel:
    last_used = paths[0].stat().st_atime
    architecture = None
    with _times_kept(paths[0]), contextlib.suppress(ModelLoadError):
        architecture = GGUFFile(paths[0], arrays=False).metadata.get("general.architecture")
    quantisation = gguf_quantisation(paths[0].name)
    return InstalledModel(
        name,
        revision,
        "gguf",
        f"GGUF {quantisation}" if quantisation else "GGUF",
        architecture,
        sum(path.stat().st_size for path in paths),
        last_used,
    )


def _folder(name: str, revision: str | None, snapshot: Path) -> InstalledModel:
    config_file = snapshot / "config.json"
    last_used = config_file.stat().st_atime
    with _times_kept(config_file):
        config = _read_config(config_file)
    names = snapshot_files(snapshot)
    stored_as = "safetensors" if "safetensors" in str(weight_index(names)) else "bin"
    dtype = config.get("dtype") or config.get("torch_dtype")
    architectures = config.get("architectures")
    return InstalledModel(
        name,
        revision,
        "folder",
        f"{stored_as} {dtype}" if isinstance(dtype, str) else stored_as,
        str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        sum((snapshot / name).stat().st_size for name in names),
        last_used,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


@contextlib.contextmanager
def _times_kept(path: Path) -> Iterator[None]:
    """Looking at a model is not using it."""
    before = path.stat()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
