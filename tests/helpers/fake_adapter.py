"""Adapters for the fake model: a folder with a text, from which everything that they do follows."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

from streamllm.errors import ModelLoadError
from streamllm.ops.lora import LoraAdapter, LoraUpdate


def fake_adapter(text: str, name: str = "adapter") -> LoraAdapter:
    """The adapter that a text is."""
    content = blake2b(text.encode(), digest_size=16).digest()
    update = LoraUpdate(0, np.zeros((1, 4), np.float32), np.zeros((4, 1), np.float32))
    return LoraAdapter(name, content, 1, {"matrix": (update,)})


def write_adapter(folder: Path, text: str) -> str:
    """Writes an adapter's folder, or another text into it, and returns its path."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter.txt").write_text(text)
    return str(folder)


def read_fake_adapter(name: str, path: str) -> LoraAdapter:
    """The adapter in a folder; one whose text begins with ``!`` is broken."""
    file = Path(path) / "adapter.txt"
    if not file.exists():
        raise ModelLoadError(f"{path} is no adapter: it has no adapter.txt.")
    if (text := file.read_text()).startswith("!"):
        raise ModelLoadError(f"{path}: {text[1:]}")
    return fake_adapter(text, name)


def choice_of(adapter: LoraAdapter | bytes | None, choice_index: int = 0) -> int:
    """The choice index under which the fake model draws for an adapter: other adapters, other tokens."""
    content = adapter.content if isinstance(adapter, LoraAdapter) else adapter
    return choice_index + (0 if content is None else 1000 + int.from_bytes(content[:4], "little"))
