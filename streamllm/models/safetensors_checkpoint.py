"""Weights in safetensors files, memory-mapped; sharded or not.

Format: https://github.com/huggingface/safetensors#format. The header's length in eight bytes, a JSON
header, the data.
The safetensors package cannot give numpy a bfloat16 tensor, so the few lines that read the format are here.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.ops.stored_rows import StoredRows

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_MAX_HEADER = 100_000_000
# bfloat16 is read as its bits: the upper half of a float32.
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_COMPARED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class _Tensor:
    file: mmap.mmap
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsCheckpoint:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists.

    With ``tied``, a stored head is left out (it equals the embedding), or stands in for an embedding that was
    not stored.

    Raises:
        ModelLoadError: no weights, a missing shard, a file that is damaged or cut short.
    """

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self._folder = folder
        self._tensors: dict[str, _Tensor] = {}
        for path in weight_files(folder):
            self._tensors.update(_open_file(path))
        if tied and HEAD in self._tensors:
            head = self._tensors.pop(HEAD)
            self._tensors.setdefault(EMBEDDING, head)

    def names(self) -> set[str]:
        return set(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ModelLoadError(
                f"The tensor {name} in {tensor.path} has the type {tensor.dtype}; supported are F32, F16, "
                "BF16, F64."
            )
        dtype = np.dtype(_DTYPES[tensor.dtype])
        values = np.frombuffer(tensor.file, dtype, count=math.prod(tensor.shape), offset=tensor.offset)
        if tensor.dtype == "BF16":
            values = values.astype(np.uint32)
            values <<= 16
            values = values.view(np.float32)
        return np.require(values, dtype=np.float32, requirements=["C", "A"]).reshape(tensor.shape)

    def format(self, name: str) -> str:
        stored_as = self._tensor(name).dtype
        return _FORMATS.get(stored_as, stored_as.lower())

    def num_bytes(self, name: str) -> int:
        return self._tensor(name).num_bytes

    def read_stored(self, name: str) -> StoredRows:
        tensor = self._tensor(name)
        data = np.frombuffer(tensor.file, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return StoredRows(self.format(name), data.reshape(tensor.shape[0], -1))

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ModelLoadError(f"The weights in {self._folder} lack the tensor {name}.")
        return self._tensors[name]


def stored_head_differs(folder: Path) -> bool:
    """Whether both the embedding and the head are stored, with different values.

    transformers then does not tie them, whatever the config says. ``False`` where there are no weights.
    """
    try:
        files = weight_files(folder)
    except ModelLoadError:
        return False
    tensors: dict[str, _Tensor] = {}
    for path in files:
        tensors.update(_open_file(path))
    if EMBEDDING not in tensors or HEAD not in tensors:
        return False
    embedding, head = tensors[EMBEDDING], tensors[HEAD]
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
    """The safetensors files of a model, all of them present."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        has_pickles = any(folder.glob("*.bin"))
        hint = " (*.bin weights are not read: convert them to safetensors)" if has_pickles else ""
        raise ModelLoadError(
            f"The folder {folder} has no weights: neither model.safetensors nor "
            f"model.safetensors.index.json{hint}."
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / Path(name).name for name in names]
    except OSError as error:
        raise ModelLoadError(f"{index} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not an index of safetensors shards.") from error
    for number, path in enumerate(files, 1):
        if not path.is_file():
            raise ModelLoadError(f"The shard {path.name} ({number} of {len(files)}) is missing in {folder}.")
    return files


def _open_file(path: Path) -> dict[str, _Tensor]:
    """Maps a file and reads its header."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            size = file.seek(0, 2)
            if start.startswith(b"version"):
                raise ModelLoadError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull`.")
            if size < 8:
                raise _cut_short(path, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    data_start = 8 + int.from_bytes(start, "little")
    if data_start > _MAX_HEADER:
        raise ModelLoadError(f"{path} is not a safetensors file.")
    if data_start > size:
        raise _cut_short(path, size)
    try:
        header: dict[str, Any] = json.loads(mapped[8:data_start])
        header.pop("__metadata__", None)
        tensors = {name: _parse(mapped, path, data_start, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path} has a damaged safetensors header. Fetch the file again.") from error
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > size:
            raise _cut_short(path, size)
    return tensors


def _cut_short(path: Path, size: int) -> ModelLoadError:
    return ModelLoadError(f"{path} is cut short: it ends after {size} bytes. Fetch the file again.")


def _parse(mapped: mmap.mmap, path: Path, data_start: int, entry: dict[str, Any]) -> _Tensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    if begin < 0 or end < begin or any(size < 0 for size in shape):
        raise ValueError("negative size")
    if dtype in _DTYPES and end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError("size and shape do not agree")
    return _Tensor(mapped, path, dtype, shape, data_start + begin, end - begin)
