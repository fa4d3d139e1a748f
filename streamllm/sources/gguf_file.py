"""A GGUF file's header, read without touching the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` package has a reader too; it
makes a numpy array of every string of the vocabulary, which takes seconds where this takes tens of
milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError

_STRING, _ARRAY = 8, 9
# struct format characters of GGUF's scalar types.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 8
_SHORT_ARRAY = 1024


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        name: the name in the file, such as ``"blk.0.attn_q.weight"``.
        shape: in numpy's order (rows first; GGUF itself stores the fastest dimension first).
        type_id: GGML's number of the storage type (``gguf.GGMLQuantizationType``).
        path: of the file.
        offset: of the first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    path: Path
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """The metadata and the tensor directory of a GGUF file (versions 2 and 3, little-endian).

    Attributes:
        path: the file.
        metadata: every key and value; arrays are lists. Without ``arrays``, those of strings and long ones
            are left out.
        tensors: the directory, by name in the file.
        size: of the file in bytes.

    Raises:
        ModelLoadError: the file is missing, not a GGUF, of another version, or cut short inside its header.
    """

    def __init__(self, path: Path, *, arrays: bool = True) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise ModelLoadError(
                        f"{path} is not a GGUF file, or is cut short: it has {self.size} bytes."
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._read_header(data, arrays)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (struct.error, IndexError) as error:
            raise ModelLoadError(
                f"{path} is cut short: its header runs past the end of the file ({self.size} bytes). "
                "Fetch the file again."
            ) from error
        except (ValueError, KeyError, RecursionError) as error:
            raise ModelLoadError(f"{path} has a damaged GGUF header. Fetch the file again.") from error

    def _read_header(self, data: mmap.mmap, arrays: bool) -> None:
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", data, 0)
        if magic != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} has GGUF version {version}; versions 2 and 3 can be read.")
        reader = _Reader(data, 24)
        for _ in range(num_values):
            key = reader.string()
            value = reader.value(reader.scalar("I"), arrays)
            if value is not None:
                self.metadata[key] = value
        entries = [reader.tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"alignment {alignment}")
        data_start = -(-reader.offset // alignment) * alignment
        for name, shape, type_id, offset in entries:
            self.tensors[name] = GGUFTensor(name, shape, type_id, self.path, data_start + offset)


def open_gguf(path: Path) -> GGUFFile:
    """The header of a model's file without long arrays; of a split model its first file, with the tensors of
    all the others.

    Raises:
        ModelLoadError: as :class:`GGUFFile`; a file of a split model is missing, or ``path`` is not the
            first.
    """
    file = GGUFFile(path, arrays=False)
    count = file.metadata.get("split.count", 1)
    if count == 1:
        return file
    first = f"-00001-of-{count:05d}.gguf"
    if not path.name.endswith(first):
        raise ModelLoadError(
            f"{path} is one of the {count} files of a split GGUF. Give the first, whose name ends in "
            f"{first}, and keep the others beside it under their own names."
        )
    for number in range(2, count + 1):
        part = path.with_name(f"{path.name.removesuffix(first)}-{number:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise ModelLoadError(f"The file {part.name} ({number} of {count}) is missing in {path.parent}.")
        file.tensors.update(GGUFFile(part, arrays=False).tensors)
    total = file.metadata.get("split.tensors.count", len(file.tensors))
    if len(file.tensors) != total:
        raise ModelLoadError(
            f"The {count} files of {path} hold {len(file.tensors)} tensors of {total}: they do not belong "
            "together. Fetch them again."
        )
    return file


class _Reader:
    """Walks the header; raises ``struct.error`` or ``IndexError`` at the end of the file."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset
        self.size = len(data)

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.offset)[0]
        self.offset += struct.calcsize("<" + code)
        return value

    def _take(self, length: int) -> int:
        """Moves over ``length`` bytes and returns where they start."""
        start, self.offset = self.offset, self.offset + length
        if self.offset > self.size:
            raise IndexError("end of file")
        return start

    def string(self) -> str:
        start = self._take(self.scalar("Q"))
        return self.data[start : self.offset].decode("utf-8")

    def value(self, type_id: int, arrays: bool) -> Any:
        """One value; ``None`` for an array that is only skipped."""
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.scalar(_SCALARS[type_id])
        item_type, length = self.scalar("I"), self.scalar("Q")
        if item_type in _SCALARS:
            code = _SCALARS[item_type]
            start = self._take(length * struct.calcsize("<" + code))
            if not arrays and length > _SHORT_ARRAY:
                return None
            return list(struct.unpack_from(f"<{length}{code}", self.data, start))
        if item_type == _STRING and not arrays:
            for _ in range(length):
                self._take(self.scalar("Q"))
            return None
        items = [self.value(item_type, True) for _ in range(length)]
        return items if arrays else None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} with {num_dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")
