"""Arrays that notice what is written beside them; with sanitizers, also what is read there."""

from __future__ import annotations

import numpy as np
from helpers.cuda_emulation import poison


class GuardedArray:
    """A copy of ``values`` in a buffer whose other bytes are known.

    Args:
        gap: elements between the rows (the first axis) that are not the array's.
        shift: elements by which the array misses an address that is a multiple of 64 bytes.
    """

    _PATTERN = 0xA5
    _MARGIN = 512  # on both sides: together more than the buffers that numpy keeps, poisoned, for reuse

    def __init__(self, values: np.ndarray, *, gap: int = 0, shift: int = 0):
        itemsize = values.itemsize
        inner = np.empty(values.shape[1:], values.dtype)
        strides = ((inner.size + gap) * itemsize, *inner.strides)
        self._bytes = np.full(len(values) * strides[0] + 2 * self._MARGIN + 64, self._PATTERN, np.uint8)
        start = self._MARGIN + -(self._bytes.ctypes.data + self._MARGIN) % 64 + shift * itemsize
        self.array = np.ndarray(values.shape, values.dtype, self._bytes.data, start, strides)
        self.array[...] = values
        self._beside = np.ones_like(self._bytes, np.bool_)
        inside = np.ndarray((*values.shape, itemsize), np.bool_, self._beside.data, start, (*strides, 1))
        inside[...] = False
        edges = np.flatnonzero(np.diff(self._beside, prepend=False, append=False))
        for first, end in edges.reshape(-1, 2).tolist():
            poison(self._bytes.ctypes.data + first, end - first)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def stride(self) -> int:
        """Elements from row to row."""
        return int(self.array.strides[0] // self.array.itemsize)

    def assert_nothing_beside_it_changed(self) -> None:
        changed = np.flatnonzero(self._beside & (self._bytes != self._PATTERN))
        assert not len(changed), f"{len(changed)} bytes beside the array were written"
