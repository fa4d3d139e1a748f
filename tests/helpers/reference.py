"""Transformers as the reference: is a generated continuation what its greedy decoding would give?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from streamllm.sources.model_files import ModelFiles

NEAR_TIE = 1e-4
"""Where Transformers' own two best logits are closer than this, either token is right."""


def load_transformers(path: Path) -> Any:
    """The model of a folder or a GGUF file in Transformers, float32."""
    from compare_transformers import load_transformers

    return load_transformers(ModelFiles(str(path), path.stem, "gguf" if path.is_file() else "folder", path))


def teacher_forced_logits(model: Any, prompt: list[int], output: list[int]) -> np.ndarray:
    """Transformers' float32 logits at each output position, given everything before it:
    ``[len(output), vocab]``."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt + output[:-1]])
        return model(ids, logits_to_keep=len(output)).logits[0].numpy()


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> int:
    """Each output token is Transformers' greedy choice after the tokens before it, so by induction the whole
    output is its greedy continuation. Returns the number of near ties that were decided differently."""
    logits = teacher_forced_logits(model, prompt, output)
    differing = 0
    for position, token_id in enumerate(output):
        best = int(logits[position].argmax())
        if token_id != best:
            gap = float(logits[position, best] - logits[position, token_id])
            assert gap < NEAR_TIE, f"position {position}: {token_id} instead of {best}, {gap:.2e} below it"
            differing += 1
    return differing
