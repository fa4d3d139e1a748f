"""What sampling's addresses point to, gathered in one piece of memory that goes to the device as one copy.

The runner's :class:`~streamllm.ops.step_inputs.SamplingBuffers` point into memory of the host: edits, masks
and logits that take the place of a row's. Kernels read the same layouts, with addresses of the device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from streamllm.ops.step_inputs import ROW_EDITS, SamplingBuffers

_ALIGNMENT = 16
_ARRAYS = (
    ("bias_ids", "num_biases"),
    ("bias_values", "num_biases"),
    ("seen_ids", "num_seen"),
    ("output_counts", "num_seen"),
    ("banned_ids", "num_banned"),
)
"""Addresses in a :data:`ROW_EDITS` and the fields that hold their lengths; elements have four bytes."""


class StagingTooSmallError(ValueError):
    """The staging area does not hold what the rows point to.

    Attributes:
        needed: bytes that would do.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"the rows need {needed} bytes of staging, not {available}")
        self.needed = needed


@dataclass(slots=True, frozen=True)
class PackedRows:
    """Where the rows find on the device what they were given on the host.

    Attributes:
        edits, allowed_mask, grammar_mask, replacement: int64 ``[count]`` device addresses, 0 for none: what
            the fields of :class:`~streamllm.ops.gpu.kernels.DeviceSampling` hold.
        num_bytes: leading bytes of the staging area to copy; 0 for nothing.
    """

    edits: np.ndarray
    allowed_mask: np.ndarray
    grammar_mask: np.ndarray
    replacement: np.ndarray
    num_bytes: int


def pack(
    sampling: SamplingBuffers, count: int, vocab_size: int, staging: np.ndarray, device_base: int
) -> PackedRows:
    """Copies what the leading ``count`` rows point to into ``staging``; memory that rows share, once.

    Rows with a target and padding are not drawn and have no rules, whatever their addresses say.

    Args:
        vocab_size: of the logits, which says how long masks and replacements are.
        staging: uint8 ``[size]``, contiguous, which the caller copies to the device before it samples.
        device_base: the address that ``staging[0]`` has there; a multiple of 16.

    Raises:
        StagingTooSmallError: there is more; nothing was written.
    """
    edits, allowed_mask, grammar_mask, replacement = np.zeros((4, count), np.int64)
    packed = PackedRows(edits, allowed_mask, grammar_mask, replacement, 0)
    names = ("edits", "allowed_mask", "grammar_mask", "replacement")
    given = [name for name in names if getattr(sampling, name)[:count].any()]
    if not given:
        return packed
    drawn = sampling.target[:count] == -1
    pieces = _Pieces(device_base)
    sizes = {"replacement": 4 * vocab_size, "edits": ROW_EDITS.itemsize}
    mask_size = 4 * -(-vocab_size // 32)
    records: dict[int, np.ndarray] = {}
    for name in given:
        addresses = np.where(drawn, getattr(sampling, name)[:count], 0)
        packed_addresses = getattr(packed, name)
        for row in np.flatnonzero(addresses).tolist():
            address = int(addresses[row])
            packed_addresses[row] = pieces.add(address, sizes.get(name, mask_size))
            if name == "edits" and address not in records:
                records[address] = _translated(address, pieces)
    pieces.write(staging)
    for address, record in records.items():
        offset = pieces.add(address, ROW_EDITS.itemsize) - device_base
        staging[offset : offset + ROW_EDITS.itemsize] = record.view(np.uint8)
    return replace(packed, num_bytes=pieces.num_bytes)


def _translated(address: int, pieces: _Pieces) -> np.ndarray:
    """A copy of the :data:`ROW_EDITS` at an address, ``[1]``, with its arrays where they will be."""
    record = np.frombuffer(ctypes.string_at(address, ROW_EDITS.itemsize), ROW_EDITS).copy()
    for name, length in _ARRAYS:
        num_bytes = 4 * int(record[length][0])
        record[name] = pieces.add(int(record[name][0]), num_bytes) if num_bytes else 0
    return record


class _Pieces:
    """Stretches of host memory and where they will lie on the device, one after the other.

    Attributes:
        num_bytes: of all of them, gaps included.
    """

    def __init__(self, device_base: int) -> None:
        self.num_bytes = 0
        self._base = device_base
        self._offsets: dict[tuple[int, int], int] = {}

    def add(self, address: int, size: int) -> int:
        """The device address of a stretch, which is the same for the same stretch."""
        offset = self._offsets.get((address, size))
        if offset is None:
            offset = self._offsets[address, size] = self.num_bytes
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._base + offset

    def write(self, staging: np.ndarray) -> None:
        """Copies them all."""
        if self.num_bytes > staging.nbytes:
            raise StagingTooSmallError(self.num_bytes, staging.nbytes)
        start = staging.ctypes.data
        for (address, size), offset in self._offsets.items():
            ctypes.memmove(start + offset, address, size)
