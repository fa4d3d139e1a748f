"""Models from the Hugging Face hub, through its own library and its own cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError

# Weights as safetensors only, never pickles; everything else that a text model's folder needs.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "*.txt"]
_EXCLUDED = ["*.bin", "*.pt", "*.pth", "*.gguf", "consolidated*", "original/*", "onnx/*", "*.md"]


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` (or ``TRANSFORMERS_OFFLINE``) forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def fetch(repo_id: str, *, revision: str | None, offline: bool, progress: bool) -> Path:
    """The folder with a hub model's files: from the hub's cache where it is whole, else downloaded.

    Raises:
        ModelLoadError: no such model or revision, no permission, no network, or not a model of this format.
    """
    folder = _cached(repo_id, revision)
    if folder is None and offline:
        raise ModelLoadError(
            f"The model {repo_id} is not complete in the Hugging Face cache, and the network is not to be "
            "used (offline). Unset HF_HUB_OFFLINE, or download it once with `hf download`."
        )
    if folder is None:
        folder = _download(repo_id, revision, progress)
    missing = _missing_file(folder)
    if missing is not None:
        raise ModelLoadError(
            f"The hub's {repo_id} has no {missing}: only models with config.json and safetensors weights "
            "can be loaded from the hub. For a GGUF, download the file and give its path."
        )
    return folder


def _cached(repo_id: str, revision: str | None) -> Path | None:
    """The cached snapshot, if it is whole: an interrupted download leaves parts."""
    try:
        folder = _snapshot(repo_id, revision, local_files_only=True)
    except Exception:  # the library's errors differ between its versions; all mean that it is not cached
        return None
    return folder if _missing_file(folder) is None else None


def _snapshot(repo_id: str, revision: str | None, **kwargs: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo_id, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_EXCLUDED, **kwargs
        )
    )


def _download(repo_id: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not (progress and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        return _snapshot(repo_id, revision)
    except (
        Exception
    ) as error:  # a boundary: HTTP, validation and file errors of several libraries arrive here
        raise ModelLoadError(_explain(repo_id, revision, error)) from error
    finally:
        if quiet:
            enable_progress_bars()


def _explain(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
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
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"The hub refuses access to {repo_id} (HTTP {status}). Set HF_TOKEN to a token that may read it."
        )
    if status is not None:
        return f"The hub answered HTTP {status} for {repo_id}. Try again later."
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"The model {repo_id} is not on this machine and could not be fetched from the Hugging Face hub "
        f"({first_line}). Check the network, or give a folder or a .gguf file."
    )


def _missing_file(folder: Path) -> str | None:
    """The first file that loading needs and ``folder`` lacks."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None if (folder / "model.safetensors").is_file() else "model.safetensors"
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError):
        return "readable model.safetensors.index.json"
    return next((shard for shard in sorted(shards) if not (folder / shard).is_file()), None)
