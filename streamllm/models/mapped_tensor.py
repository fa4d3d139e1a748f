"""A tensor inside a file that is mapped into memory."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import FLOAT_DTYPES, floats

FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Types that can be read, by safetensors' names."""


@dataclass(frozen=True)
class MappedTensor:
    """Where one tensor lies, without gaps.

    Attributes:
        file: the whole file, mapped.
        path: of the file.
        dtype: safetensors' name of the type.
        shape: rows first.
        offset, num_bytes: its place in the file.
    """

    file: mmap.mmap
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def format(self) -> str:
        """The type as :meth:`streamllm.models.checkpoint.Checkpoint.format` names it."""
        return FORMATS.get(self.dtype, self.dtype.lower())

    def stored(self) -> npt.NDArray[np.uint8]:
        """Its bytes, uint8 ``[rows, bytes of a row]``: a view of the file."""
        data = np.frombuffer(self.file, np.uint8, count=self.num_bytes, offset=self.offset)
        return data.reshape(self.shape[0], -1)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """Its values; a view of the file if that holds them as float32.

        Args:
            name: for the message.

        Raises:
            ModelLoadError: the type cannot be read.
        """
        if self.dtype not in FORMATS:
            raise ModelLoadError(
                f"The tensor {name} in {self.path} has the type {self.dtype}; supported are "
                f"{', '.join(FORMATS)}."
            )
        dtype = np.dtype(FLOAT_DTYPES[self.format])
        stored = np.frombuffer(self.file, dtype, count=math.prod(self.shape), offset=self.offset)
        return floats(stored, self.format).reshape(self.shape)

    def part(self, rows: slice | None) -> MappedTensor:
        """Rows of it, from ``start`` to ``stop``; ``None``: all."""
        if rows is None:
            return self
        row_bytes = self.num_bytes // max(self.shape[0], 1)
        count = rows.stop - rows.start
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + rows.start * row_bytes,
            num_bytes=count * row_bytes,
        )

    def will_need(self) -> None:
        """Has the kernel read it ahead."""
        advise(self.file, mmap.MADV_WILLNEED, self.offset, self.num_bytes)

    def release(self) -> None:
        """Lets go of the pages that it was read through; the kernel's cache may keep them."""
        advise(self.file, mmap.MADV_DONTNEED, self.offset, self.num_bytes)


def map_file(file: BinaryIO, *, copied: bool = False) -> mmap.mmap:
    """A file's content in memory.

    Args:
        copied: as it is now. Otherwise the file must stay what it is: who reads on in one that was cut short
            ends the process.
    """
    if not copied:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.seek(0)
    content = file.read()
    copy = mmap.mmap(-1, max(len(content), 1))
    copy[: len(content)] = content
    return copy


def advise(file: mmap.mmap, advice: int, offset: int, num_bytes: int) -> None:
    """Tells the kernel about the whole pages around ``num_bytes`` bytes; where it does not listen, nothing is
    lost."""
    start = offset - offset % mmap.PAGESIZE
    with contextlib.suppress(OSError, ValueError):
        file.madvise(advice, start, offset + num_bytes - start)
