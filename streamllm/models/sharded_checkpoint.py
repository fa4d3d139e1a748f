"""A checkpoint as one rank of tensor parallelism sees it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from streamllm.models.checkpoint import Checkpoint
from streamllm.models.parallel import parts_of
from streamllm.models.sharding import ShardingPlan, TensorShard
from streamllm.models.stored_columns import take_columns
from streamllm.ops.stored_rows import StoredRows

logger = logging.getLogger("streamllm.models")

_CONVERTED_AT_ONCE = 1 << 24


class ShardedCheckpoint:
    """A rank's parts of a model's tensors, under the tensors' names (a
    :class:`~streamllm.models.checkpoint.Checkpoint`). Of what others have nothing is read but where rows are
    stored together that must be taken apart."""

    def __init__(self, whole: Checkpoint, plan: ShardingPlan) -> None:
        self._whole = whole
        self._plan = plan

    def names(self) -> set[str]:
        absent = {name for name, shard in self._plan.tensors.items() if shard.rows == ()}
        return self._whole.names() - absent

    def has(self, name: str) -> bool:
        return self._whole.has(name) and self._shard(name).rows != ()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(self._whole.shape(name))

    def format(self, name: str) -> str:
        return "float32" if self._shard(name).dequantised else self._whole.format(name)

    def num_bytes(self, name: str) -> int:
        whole = self._whole.shape(name)
        own = math.prod(self.shape(name))
        if self._shard(name).dequantised:
            return 4 * own
        return self._whole.num_bytes(name) * own // max(math.prod(whole), 1)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        shard = self._shard(name)
        if shard.columns is not None:
            return self._read_columns(name, rows, shard.columns)
        parts = [self._whole.read(name, part) for part in _own_rows(shard, rows)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        shard = self._shard(name)
        if shard.dequantised:
            return StoredRows("float32", self.read(name, rows).view(np.uint8))
        parts = [self._whole.read_stored(name, part) for part in _own_rows(shard, rows)]
        stored = parts[0]
        if len(parts) > 1:
            stored = StoredRows(stored.format, np.concatenate([part.data for part in parts]))
        return stored if shard.columns is None else take_columns(stored, shard.columns, name)

    def release(self, name: str) -> None:
        self._whole.release(name)

    def warn_of_dequantised(self, kept_formats: Collection[str]) -> None:
        """Says once which matrices do not stay packed for being divided.

        Args:
            kept_formats: in which they would.
        """
        names = [
            name
            for name, shard in self._plan.tensors.items()
            if shard.dequantised and self._whole.format(name) in kept_formats
        ]
        if names:
            logger.warning(
                "%d matrices such as %s have blocks (%s) that lie on several of the %d ranks: they become "
                "float32, which takes more memory and time",
                len(names), names[0], self._whole.format(names[0]), self._plan.size,
            )  # fmt: skip

    def _read_columns(self, name: str, rows: slice | None, columns: range) -> npt.NDArray[np.float32]:
        """Some rows at a time, since whole ones are converted."""
        count, width = self._whole.shape(name)
        rows = rows or slice(0, count)
        values = np.empty((rows.stop - rows.start, len(columns)), np.float32)
        for part in parts_of(len(values), max(_CONVERTED_AT_ONCE // width, 1)):
            whole = self._whole.read(name, slice(rows.start + part.start, rows.start + part.stop))
            values[part] = whole[:, columns.start : columns.stop]
        return values

    def _shard(self, name: str) -> TensorShard:
        return self._plan.tensors.get(name, TensorShard())


def _own_rows(shard: TensorShard, rows: slice | None) -> list[slice | None]:
    """Rows of a rank's part as rows of the tensor."""
    if shard.rows is None:
        return [rows]
    own: list[slice | None] = []
    start = 0
    wanted = rows or slice(0, sum(map(len, shard.rows)))
    for part in shard.rows:
        first, last = max(wanted.start - start, 0), min(wanted.stop - start, len(part))
        if first < last:
            own.append(slice(part.start + first, part.start + last))
        start += len(part)
    return own
