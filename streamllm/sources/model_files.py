"""What a resolved model name is: files on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The quantisation at the end of a GGUF file's stem: "Model.Q4_1", "model-q4_k_m", "Model-UD-IQ2_XXS".
_QUANTISATION = re.compile(
    r"[._-](?:i1-|UD-)?(?:I?Q\d[0-9A-Z_]*|TQ\d_\d|MXFP4(?:_MOE)?|B?F16|F32|FP16|FP32)$", re.IGNORECASE
)


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: the model's name as the user gave it.
        served_name: the short id that clients see: a folder's name, a hub id, a GGUF's stem without its
            quantisation.
        kind: ``"folder"`` (config.json, safetensors, tokenizer.json) or ``"gguf"``.
        path: the folder, or the ``.gguf`` file.
    """

    name: str
    served_name: str
    kind: Literal["folder", "gguf"]
    path: Path


def gguf_served_name(path: Path) -> str:
    """``SmolLM2-135M-Instruct.Q4_1.gguf`` is served as ``SmolLM2-135M-Instruct``."""
    return _QUANTISATION.sub("", path.stem) or path.stem
