"""What a resolved model name is: files on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The quantisation at the end of a GGUF file's stem: "Model.Q4_1", "model-q4_k_m", "Model-UD-IQ2_XXS".
_QUANTISATION = re.compile(
    r"[._-]((?:i1-|UD-)?(?:I?Q\d[0-9A-Z_]*|TQ\d_\d|MXFP4(?:_MOE)?|B?F16|F32|FP16|FP32))$", re.IGNORECASE
)
_SPLIT = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: the model's name as the user gave it.
        served_name: the short id that clients see: a folder's name, a hub name as it was typed, a GGUF's stem
            without its quantisation.
        kind: ``"folder"`` (config.json, safetensors, tokenizer.json) or ``"gguf"``.
        path: the folder, or the ``.gguf`` file (the first one of a model split over several).
    """

    name: str
    served_name: str
    kind: Literal["folder", "gguf"]
    path: Path


def gguf_served_name(path: Path) -> str:
    """``SmolLM2-135M-Instruct.Q4_1.gguf`` is served as ``SmolLM2-135M-Instruct``."""
    stem = _SPLIT.sub("", path.stem)
    return _QUANTISATION.sub("", stem) or stem


def gguf_quantisation(file: str) -> str | None:
    """``"Q4_K_M"`` of ``"folder/Model-Q4_K_M-00001-of-00002.gguf"``; ``None`` where the name does not say."""
    match = _QUANTISATION.search(_SPLIT.sub("", file.removesuffix(".gguf")))
    return match[1] if match else None


def gguf_sets(files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The models among GGUF files: a model's name, split or not, and its files in order.

    A split model is known by the name that it would have in one file. Projectors of images and sound
    (``mmproj``) and importance matrices are no models; a split with parts missing is left out.
    """
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for file in files:
        stem = file.removesuffix(".gguf")
        if stem == file or re.search(r"mmproj|imatrix", stem.rsplit("/", 1)[-1], re.IGNORECASE):
            continue
        match = _SPLIT.search(stem)
        name = f"{_SPLIT.sub('', stem)}.gguf"
        found.setdefault(name, {})[int(match["number"]) if match else 1] = file
        counts[name] = int(match["count"]) if match else 1
    return {
        name: tuple(parts[number] for number in sorted(parts))
        for name, parts in sorted(found.items())
        if sorted(parts) == list(range(1, counts[name] + 1))
    }
