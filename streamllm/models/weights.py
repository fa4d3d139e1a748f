"""Reading weights: a checkpoint's tensors become the matrices and vectors of a backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy as np
from tqdm import tqdm

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.ops import Matrix, Ops, RMSNorm
from streamllm.ops.stored_rows import StoredRows

logger = logging.getLogger("streamllm.models")

WeightMode = Literal["float32", "packed"]
"""``"float32"``: matrices are dequantised. ``"packed"``: those in a format that the backend's kernels read
stay as the file holds them."""


class WeightLoader:
    """Builds weights for ``ops`` from named tensors, one tensor in memory at a time.

    Args:
        progress: show a bar (only where stderr is a terminal).
        weight_mode: what becomes of matrices; vectors (norms, biases) are float32 always.
    """

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, *, progress: bool, weight_mode: WeightMode = "float32"
    ):
        self._checkpoint = checkpoint
        self._ops = ops
        self._packed_formats = _kept_formats(ops.packed_formats, weight_mode)
        self._dequantised: set[str] = set()
        self._bar = tqdm(
            total=len(checkpoint.names()),
            desc="Loading weights",
            unit="tensor",
            leave=False,
            disable=None if progress else True,
        )

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        """One matrix from the layers ``(name, rows)``, stacked row-wise; ``bias`` if they have one each."""
        biases = [self._read(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        return self._ops.matrix(
            sum(rows for _, rows in parts),
            columns,
            self._read_parts(parts, columns),
            np.concatenate(biases) if biases else None,
        )

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self._ops.vector(self._read(f"{name}.weight", (size,))), size, eps)

    def close(self) -> None:
        self._bar.close()

    def _read_parts(
        self, parts: Sequence[tuple[str, int]], columns: int
    ) -> Iterator[np.ndarray | StoredRows]:
        for name, rows in parts:
            yield self._read_matrix(f"{name}.weight", (rows, columns))

    def _read_matrix(self, name: str, shape: tuple[int, int]) -> np.ndarray | StoredRows:
        if not self._packed_formats:
            return self._read(name, shape)
        stored_as = self._checkpoint.format(name)
        if stored_as in self._packed_formats:
            self._check_shape(name, self._checkpoint.shape(name), shape)
            self._bar.update()
            return self._checkpoint.read_stored(name)
        if stored_as != "float32" and stored_as not in self._dequantised:
            self._dequantised.add(stored_as)
            logger.warning(
                "there is no kernel for weights of type %s (%s and maybe others): they become float32, which "
                "takes more memory and time",
                stored_as, name,
            )  # fmt: skip
        return self._read(name, shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor = self._checkpoint.read(name)
        self._check_shape(name, tensor.shape, shape)
        self._bar.update()
        return tensor

    @staticmethod
    def _check_shape(name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if actual != expected:
            raise ModelLoadError(f"Tensor {name} has shape {list(actual)}; the config says {list(expected)}.")


def weight_bytes(
    checkpoint: Checkpoint,
    packed_formats: Collection[str],
    weight_mode: WeightMode,
    *,
    dense_itemsize: int = 4,
) -> int:
    """Memory that a model's weights will take, but for the padding of matrices to whole panels.

    Args:
        packed_formats: those of the backend (``Ops.packed_formats``) that stay as they are.
        dense_itemsize: bytes of an element of the other matrices.
    """
    kept = _kept_formats(packed_formats, weight_mode)
    total = 0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        is_matrix = len(shape) == 2
        if is_matrix and checkpoint.format(name) in kept:
            total += checkpoint.num_bytes(name)
        else:
            total += (dense_itemsize if is_matrix else 4) * math.prod(shape)
    return total


def _kept_formats(packed_formats: Collection[str], weight_mode: WeightMode) -> frozenset[str]:
    return frozenset(packed_formats) if weight_mode == "packed" else frozenset()
