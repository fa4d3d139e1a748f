"""Weights in a Hugging Face folder, memory-mapped: safetensors or files of ``torch.save``, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.mapped_tensor import MappedTensor
from streamllm.models.safetensors_file import open_safetensors
from streamllm.models.stored_layout import StoredLayout
from streamllm.models.torch_file import open_torch_file
from streamllm.ops.stored_rows import StoredRows

HEAD = "lm_head.weight"
_NAMES = ("model.safetensors", "pytorch_model.bin")
_COMPARED_AT_ONCE = 1 << 24


class FolderCheckpoint:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists;
    where there are neither, of ``pytorch_model.bin`` and its shards.

    With ``tied``, a stored head is left out (it equals the embedding), or stands in for an embedding that was
    not stored.

    Raises:
        ModelLoadError: no weights, a missing shard, a file that is damaged or cut short.
    """

    def __init__(self, folder: Path, layout: StoredLayout, *, tied: bool) -> None:
        self._folder = folder
        self._tensors = _open_all(weight_files(folder), layout)
        if tied and HEAD in self._tensors:
            head = self._tensors.pop(HEAD)
            self._tensors.setdefault(layout.embedding, head)

    def names(self) -> set[str]:
        return set(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        tensor = self._tensor(name).part(rows)
        tensor.will_need()
        return tensor.values(name)

    def format(self, name: str) -> str:
        return self._tensor(name).format

    def num_bytes(self, name: str) -> int:
        return self._tensor(name).num_bytes

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        tensor = self._tensor(name).part(rows)
        tensor.will_need()
        return StoredRows(tensor.format, tensor.stored())

    def release(self, name: str) -> None:
        self._tensor(name).release()

    def _tensor(self, name: str) -> MappedTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"The weights in {self._folder} lack the tensor {name}.")
        return self._tensors[name]


def stored_head_differs(folder: Path, layout: StoredLayout) -> bool:
    """Whether both the embedding and the head are stored, with different values.

    transformers then does not tie them, whatever the config says. ``False`` where there are no weights.
    """
    try:
        files = weight_files(folder)
    except ModelLoadError:
        return False
    tensors = _open_all(files, layout)
    if layout.embedding not in tensors or HEAD not in tensors:
        return False
    embedding, head = tensors[layout.embedding], tensors[HEAD]
    if (embedding.dtype, embedding.shape) != (head.dtype, head.shape):
        return True
    return any(
        embedding.file[
            embedding.offset + start : embedding.offset + min(start + _COMPARED_AT_ONCE, head.num_bytes)
        ]
        != head.file[head.offset + start : head.offset + min(start + _COMPARED_AT_ONCE, head.num_bytes)]
        for start in range(0, head.num_bytes, _COMPARED_AT_ONCE)
    )


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights, all of them present."""
    for name in _NAMES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
        if (folder / name).is_file():
            return [folder / name]
    raise ModelLoadError(
        f"The folder {folder} has no weights: neither {' nor '.join(_NAMES)} (or their .index.json with all "
        "shards)."
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / Path(name).name for name in names]
    except OSError as error:
        raise ModelLoadError(f"{index} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not an index of a model's shards.") from error
    for number, path in enumerate(files, 1):
        if not path.is_file():
            raise ModelLoadError(
                f"The shard {path.name} ({number} of {len(files)}) is missing in {index.parent}."
            )
    return files


def _open_all(files: list[Path], layout: StoredLayout) -> dict[str, MappedTensor]:
    tensors: dict[str, MappedTensor] = {}
    for path in files:
        found = open_torch_file(path) if path.suffix == ".bin" else open_safetensors(path)
        tensors.update({layout.name_of(name): tensor for name, tensor in found.items()})
    return tensors
