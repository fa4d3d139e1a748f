"""What the readers of quantised checkpoints say alike."""

from __future__ import annotations

from pathlib import Path

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import ConfigFields

UNQUANTISED_INSTEAD = "Use the model's unquantised weights (with --quantization int8) or a GGUF of it."
"""What to do about a format that cannot be read."""


def unsupported(path: Path, what: str) -> ModelLoadError:
    """The error of weights that cannot be read.

    Args:
        path: of the file that says what they are.
        what: they are: ``"GPTQ with bits 3 is"``.
    """
    return ModelLoadError(f"{path}: {what} not supported. {UNQUANTISED_INSTEAD}")


def read_group_size(fields: ConfigFields, name: str) -> int | None:
    """Columns that share a scale; ``None`` where -1 says: all.

    Raises:
        ModelLoadError: it is neither.
    """
    return None if fields.get(name) == -1 else fields.integer(name)
