"""How the files of a family's models differ from what its ``load_weights`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamllm.models.tensor_source import TensorSource
from streamllm.ops.stored_rows import StoredRows

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

Sources = dict[str, TensorSource]
"""By name, those tensors of a model that its files hold in another place or shape."""


MULTIMODAL_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""How folders of both generations call the text model inside a multimodal one."""


def _as_stored(config: Any, checkpoint: Checkpoint) -> Sources:
    return {}


@dataclass(frozen=True)
class StoredLayout:
    """
    Attributes:
        embedding: the name of the token embedding, which a tied head equals.
        prefixes: how names begin in some folders, and what ``load_weights`` calls them:
            ``{"decoder.": "model.decoder."}``.
        quant_methods: ``quant_method`` of a ``quantization_config`` whose tensors ``sources`` knows.
        sources: made for a model's config and opened files.
    """

    embedding: str = "model.embed_tokens.weight"
    prefixes: Mapping[str, str] = field(default_factory=lambda: MULTIMODAL_PREFIXES)
    quant_methods: frozenset[str] = frozenset()
    sources: Callable[[Any, Checkpoint], Sources] = _as_stored

    def name_of(self, stored: str) -> str:
        """The name of a tensor that a folder calls ``stored``."""
        for prefix, meant in self.prefixes.items():
            if stored.startswith(prefix):
                return meant + stored.removeprefix(prefix)
        return stored


class ArrangedCheckpoint:
    """A checkpoint in which some tensors are made from stored ones (a
    :class:`~streamllm.models.checkpoint.Checkpoint`).

    Args:
        names: of the model's tensors.
    """

    def __init__(self, files: Checkpoint, sources: Mapping[str, TensorSource], names: Iterable[str]) -> None:
        self._files = files
        self._sources = sources
        self._names = frozenset(names)

    def names(self) -> set[str]:
        return set(self._names)

    def has(self, name: str) -> bool:
        source = self._sources.get(name)
        return all(self._files.has(stored) for stored in (source.stored if source else [name]))

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources.get(name)
        return source.shape if source else self._files.shape(name)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        source = self._sources.get(name)
        return source.read(self._files, rows) if source else self._files.read(name, rows)

    def format(self, name: str) -> str:
        source = self._sources.get(name)
        return source.format(self._files) if source else self._files.format(name)

    def num_bytes(self, name: str) -> int:
        source = self._sources.get(name)
        return source.num_bytes(self._files) if source else self._files.num_bytes(name)

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        source = self._sources.get(name)
        return source.read_stored(self._files, rows) if source else self._files.read_stored(name, rows)

    def release(self, name: str) -> None:
        source = self._sources.get(name)
        for stored in source.stored if source else [name]:
            self._files.release(stored)
