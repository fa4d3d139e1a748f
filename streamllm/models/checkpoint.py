"""A model's weights by name, whatever file they lie in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.models.model_config import ModelConfig
from streamllm.models.quantized import with_quantised_matrices
from streamllm.models.registry import stored_layout
from streamllm.models.stored_layout import ArrangedCheckpoint, StoredLayout
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.ops.stored_rows import StoredRows
from streamllm.sources.model_files import ModelFiles

logger = logging.getLogger("streamllm.models")


Quantization = Literal["int8", "int4"]
"""What float matrices can become as they are read."""


class Checkpoint(Protocol):
    """Named tensors, read one at a time.

    Names are Hugging Face's: ``"model.embed_tokens.weight"``, ``"model.layers.0.self_attn.q_proj.weight"``,
    ``"model.norm.weight"``, ``"lm_head.weight"`` (not there where the embedding serves as the head).
    """

    def names(self) -> set[str]:
        """All tensors of the model."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, matrices as [rows (outputs), columns (inputs)]. ``ModelLoadError`` without it."""

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        """A tensor as float32, C-contiguous; may be a read-only view of the file.

        Args:
            rows: the only ones that are wanted (of a vector, elements), from ``start`` to ``stop``.

        Raises:
            ModelLoadError: the tensor is missing, or stored in a type that cannot be read.
        """

    def format(self, name: str) -> str:
        """How a tensor is stored: ``"float32"``, ``"bfloat16"``, ``"q4_1"``, ...
        (:class:`streamllm.ops.stored_rows.StoredRows` has the names)."""

    def num_bytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file."""

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        """A matrix as stored, its rows in the order of :meth:`read`; may be a read-only view of the file.

        Args:
            rows: the only ones that are wanted, from ``start`` to ``stop``.

        Raises:
            ModelLoadError: the tensor is missing.
        """

    def release(self, name: str) -> None:
        """Lets go of the memory through which a tensor's part of the file was read."""


def open_checkpoint(
    files: ModelFiles, config: ModelConfig, *, quantization: Quantization | None = None
) -> Checkpoint:
    """Opens a model's weights and checks them against its config, without reading their data.

    Args:
        quantization: what float matrices become as they are read.

    Raises:
        ConfigError: ``quantization`` of a model that Transformers loads.
        ModelLoadError: one line that names the file or tensor: no weights, a file that is damaged or cut
            short, a missing tensor, a shape that contradicts the config.
    """
    checkpoint: Checkpoint
    if config.through_transformers:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization} does not go with {config.architecture}, which runs through "
                "Transformers; leave it out."
            )
        from streamllm.models.folder_checkpoint import FolderCheckpoint

        return FolderCheckpoint(files.path, StoredLayout(), tied=False)
    layout = stored_layout(config.architecture)
    if files.kind == "gguf":
        from streamllm.models.gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(files.path, config)
    else:
        from streamllm.models.folder_checkpoint import FolderCheckpoint

        checkpoint = FolderCheckpoint(files.path, layout, tied=config.tie_word_embeddings)
        checkpoint = with_quantised_matrices(checkpoint, files.path, known=layout.quant_methods)
    sources, shapes = layout.sources(config, checkpoint), expected_shapes(config)
    for name, expected in shapes.items():
        stored = sources[name].stored if name in sources else {name: expected}
        for stored_name, stored_shape in stored.items():
            _check(checkpoint, files.path, stored_name, stored_shape)
    read = set(shapes).union(*(source.stored for source in sources.values()))
    if ignored := sorted(checkpoint.names() - read):
        logger.info("%d tensors are not read, such as %s", len(ignored), ignored[0])
    if sources or ignored:
        checkpoint = ArrangedCheckpoint(checkpoint, sources, shapes)
    if quantization is None:
        return checkpoint
    from streamllm.models.calibration import column_importance
    from streamllm.models.load_quantization import QuantizedCheckpoint

    floats = checkpoint
    return QuantizedCheckpoint(floats, quantization, lambda: column_importance(floats, config, files))


def _check(checkpoint: Checkpoint, path: Path, name: str, expected: tuple[int, ...]) -> None:
    if not checkpoint.has(name):
        hint = ""
        if name == "lm_head.weight":
            hint = " (and the config says that it is not tied to the embedding)"
        raise ModelLoadError(f"The weights in {path} lack the tensor {name}{hint}.")
    actual = checkpoint.shape(name)
    if actual != expected:
        raise ModelLoadError(
            f"The tensor {name} in {path} has shape {list(actual)}; by the model's config it must be "
            f"{list(expected)}."
        )
