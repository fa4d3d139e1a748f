"""What a model's matrices are multiplied by, measured on a short text (``calibration.txt``).

A few inputs of a layer are tens to thousands of times as large as most, the same ones whatever the text: an
error in their columns is what a quantised matrix is wrong by. Weighing errors by the inputs' mean squares is
the diagonal of what GPTQ minimises (arXiv:2210.17323).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from streamllm.models.checkpoint import Checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.prompt_ops import PromptOps, StoredWeights
from streamllm.models.registry import family_of
from streamllm.models.rope import RopeTable
from streamllm.ops import Ops
from streamllm.sources.model_files import ModelFiles

logger = logging.getLogger("streamllm.models")

Array = npt.NDArray[np.float32]

_TEXT = Path(__file__).with_name("calibration.txt")
_MAX_TOKENS = 640
_FLOOR = 0.01


def column_importance(checkpoint: Checkpoint, config: ModelConfig, files: ModelFiles) -> dict[str, Array]:
    """How much an error in each column of a matrix counts, float32 ``[columns]``, by the tensor's name.

    All matrices in the model's layers are there, but for experts that no token of the text chose. Reads the
    whole model, one matrix at a time.

    Args:
        files: have the tokenizer.

    Raises:
        ModelLoadError: no tokenizer, or a tensor that cannot be read.
    """
    token_ids = _token_ids(config, files)
    logger.info("int4: reading %d tokens to see which columns of the matrices count", len(token_ids))
    energies = input_energies(checkpoint, config, token_ids)
    # An input that the text never drives is not one that no text does.
    return {name: energy + np.float32(_FLOOR) * energy.mean() for name, energy in energies.items()}


def input_energies(checkpoint: Checkpoint, config: ModelConfig, token_ids: Sequence[int]) -> dict[str, Array]:
    """The mean square of what each column of a matrix is multiplied by, over a prompt's tokens.

    Args:
        token_ids: at least one; at most ``config.context_length``.
    """
    energies: dict[str, Array] = {}

    def note(names: tuple[str, ...], x: Array) -> None:
        if len(x):
            energy = np.square(x).mean(0)
            energies.update((name, energy) for name in names if np.isfinite(energy).all())

    family = family_of(config.architecture)
    ops = PromptOps(checkpoint, RopeTable(config.ropes, len(token_ids)), token_ids, note)
    # A forward makes no weights, and those methods are what PromptOps lacks of Ops.
    family.forward(family.load_weights(StoredWeights(checkpoint), config), cast(Ops, ops), None)
    return energies


def _token_ids(config: ModelConfig, files: ModelFiles) -> list[int]:
    from streamllm.text.tokenizer import Tokenizer

    make = Tokenizer.from_gguf if files.kind == "gguf" else Tokenizer.from_folder
    token_ids = make(files.path).encode(_TEXT.read_text(encoding="utf-8"))
    return [id for id in token_ids if id < config.vocab_size][: min(_MAX_TOKENS, config.context_length)]
