"""Whether two machines have the same model: its configuration by digest, its weights by size."""

from __future__ import annotations

import hashlib
from pathlib import Path

from streamllm.sources.model_files import ModelFiles, gguf_sets

_HEADER_BYTES = 1 << 20
"""Of a GGUF file: its metadata, or at least the beginning."""

_WEIGHTS = (".safetensors", ".bin")
_CONFIGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def fingerprint(files: ModelFiles) -> dict[str, str]:
    """What is compared, by the name of each file."""
    if files.kind == "gguf":
        return {path.name: f"{_digest(path, _HEADER_BYTES)} {_size(path)}" for path in _parts(files.path)}
    found = {name: _digest(files.path / name) for name in _CONFIGS if (files.path / name).is_file()}
    weights = sorted(path for path in files.path.iterdir() if path.suffix in _WEIGHTS)
    return found | {path.name: _size(path) for path in weights}


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """What differs, for people: ``"config.json has other contents"``; ``None``: nothing."""
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            return f"{name} is missing"
        if name not in ours:
            return f"{name} is there, and not on the engine's"
        if ours[name] != theirs[name]:
            sizes = (ours[name].split()[-1], theirs[name].split()[-1])
            if all(size.isdecimal() for size in sizes) and sizes[0] != sizes[1]:
                return f"{name} has {sizes[1]} bytes instead of {sizes[0]}"
            return f"{name} has other contents"
    return None


def _parts(path: Path) -> list[Path]:
    """All files of a GGUF that may be split."""
    siblings = [each.name for each in path.parent.glob("*.gguf")]
    for names in gguf_sets(siblings).values():
        if path.name in names:
            return [path.parent / name for name in names]
    return [path]


def _size(path: Path) -> str:
    return str(path.stat().st_size)


def _digest(path: Path, limit: int = -1) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(limit)).hexdigest()
