"""The tensors of one safetensors file.

Format: https://github.com/huggingface/safetensors#format. The header's length in eight bytes, a JSON header,
the data. The safetensors package cannot give numpy a bfloat16 tensor, so the few lines that read the format
are here.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.models.mapped_tensor import MappedTensor, map_file

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000


def open_safetensors(path: Path, *, copied: bool = False) -> dict[str, MappedTensor]:
    """Maps a file and reads its header.

    Args:
        copied: the file may change afterwards (:func:`~streamllm.models.mapped_tensor.map_file`).

    Raises:
        ModelLoadError: not such a file, damaged or cut short.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            size = file.seek(0, 2)
            if start.startswith(b"version"):
                raise ModelLoadError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull`.")
            if size < 8:
                raise _cut_short(path, size)
            mapped = map_file(file, copied=copied)
            size = len(mapped)
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


def _parse(mapped: mmap.mmap, path: Path, data_start: int, entry: dict[str, Any]) -> MappedTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    if begin < 0 or end < begin or any(size < 0 for size in shape):
        raise ValueError("negative size")
    if dtype in _ITEM_BYTES and end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError("size and shape do not agree")
    return MappedTensor(mapped, path, dtype, shape, data_start + begin, end - begin)
