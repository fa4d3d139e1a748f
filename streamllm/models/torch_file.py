"""The tensors of a file that ``torch.save`` wrote, without torch and without running what a pickle says.

Format: a ZIP archive of uncompressed entries (torch 1.6 and later): ``*/data.pkl``, a pickle of names and
tensors, and ``*/data/KEY``, the storages that these point into. Of the pickle only what describes tensors is
understood; anything else, code above all, is refused.
https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.models.mapped_tensor import MappedTensor, map_file

_STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
"""torch's classes, safetensors' names of their types, and bytes of an element."""


_ARCHIVE_ERRORS = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, zlib.error)
"""What zipfile raises for damaged archives: encodings, compressions and ciphers it takes the damage for."""


@dataclass(frozen=True)
class _Storage:
    key: str
    kind: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _StorageClass:
    name: str


def open_torch_file(path: Path, *, copied: bool = False) -> dict[str, MappedTensor]:
    """Maps a file and reads which tensors it has.

    Args:
        copied: the file may change afterwards (:func:`~streamllm.models.mapped_tensor.map_file`).

    Raises:
        ModelLoadError: not such a file, damaged, cut short, or with more than tensors in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in entries if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise _convert(path, "it holds no single data.pkl")
            content = archive.read(pickles[0])
        with open(path, "rb") as file:
            mapped = map_file(file, copied=copied)
    except _ARCHIVE_ERRORS as error:
        raise ModelLoadError(
            f"{path} is not a file of torch.save (1.6 or later), or is cut short. Fetch the file again, or "
            "convert it to safetensors."
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    folder = pickles[0].removesuffix("data.pkl")
    found = _read_pickle(path, content)
    return {name: _place(mapped, path, entries, folder, name, tensor) for name, tensor in found.items()}


def _read_pickle(path: Path, content: bytes) -> dict[str, _Tensor]:
    try:
        found = _TensorUnpickler(io.BytesIO(content)).load()
    except ModelLoadError as error:
        raise _convert(path, str(error)) from error
    except Exception as error:  # a damaged pickle raises anything
        raise ModelLoadError(f"{path} has a damaged data.pkl ({error}). Fetch the file again.") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict):
        raise _convert(path, f"it holds a {type(found).__name__}, not tensors by name")
    return {str(name): value for name, value in found.items() if isinstance(value, _Tensor)}


class _TensorUnpickler(pickle.Unpickler):
    """Makes tensors' descriptions, and refuses whatever else a pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _STORAGES:
            return _StorageClass(name)
        raise ModelLoadError(f"its pickle asks for {module}.{name}, which is no part of a tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        _, storage_class, key, *_ = pid
        return _Storage(str(key), storage_class.name)


def _rebuild_tensor(storage: _Storage, first: int, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, int(first), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


def _place(
    mapped: mmap.mmap,
    path: Path,
    entries: dict[str, zipfile.ZipInfo],
    folder: str,
    name: str,
    tensor: _Tensor,
) -> MappedTensor:
    dtype, itemsize = _STORAGES[tensor.storage.kind]
    entry = entries.get(f"{folder}data/{tensor.storage.key}")
    num_bytes = math.prod(tensor.shape) * itemsize
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or min(tensor.shape, default=0) < 0:
        raise ModelLoadError(f"{path} lacks the data of the tensor {name}. Fetch the file again.")
    if tensor.strides != _row_major(tensor.shape):
        raise _convert(path, f"the tensor {name} is stored with gaps or transposed")
    first = tensor.first * itemsize
    offset = _data_start(mapped, entry) + first
    if first < 0 or first + num_bytes > entry.file_size or offset + num_bytes > len(mapped):
        raise ModelLoadError(f"{path} is cut short in the tensor {name}. Fetch the file again.")
    return MappedTensor(mapped, path, dtype, tensor.shape, offset, num_bytes)


def _data_start(mapped: mmap.mmap, entry: zipfile.ZipInfo) -> int:
    """Behind the entry's local header, whose name and extra field have lengths of their own."""
    header = mapped[entry.header_offset : entry.header_offset + 30].ljust(30, b"\0")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return int(entry.header_offset + 30 + name_length + extra_length)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _convert(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} cannot be read safely: {reason}. Convert it to safetensors with Transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
    )
