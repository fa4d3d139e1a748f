"""Reading weights: a checkpoint's tensors become the matrices and vectors of a backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.loading_progress import LoadingProgress
from streamllm.models.lora_targets import is_adaptable
from streamllm.ops import ExpertMatrices, LayerNorm, Matrix, Ops, RMSNorm, Vector
from streamllm.ops.stored_rows import StoredRows

logger = logging.getLogger("streamllm.models")

WeightMode = Literal["float32", "packed"]
"""``"float32"``: matrices are dequantised. ``"packed"``: those in a format that the backend's kernels read
stay as the file holds them."""


class WeightLoader(Protocol):
    """What a family's ``load_weights`` takes its weights from. Names of tensors are Hugging Face's, without
    ``.weight`` or ``.bias``.

    Raises:
        ModelLoadError: a tensor is missing, has another shape than the config says, or cannot be read.
    """

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        """One matrix from the layers ``(name, rows)``, stacked row-wise; ``bias`` if they have one each."""

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> ExpertMatrices:
        """A matrix an expert, each from its layers as :meth:`linear` takes them, all with equally many
        rows."""

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """A norm whose factors are ``weight + offset`` (Gemma's files hold them less 1)."""

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        """A norm; without ``affine`` it has no tensors, its weights being 1 and its biases 0."""

    def vector(self, name: str, size: int) -> Vector:
        """A tensor of one dimension, by its whole name."""


class CheckpointLoader:
    """Builds weights for ``ops`` from a checkpoint, one tensor in memory at a time (a
    :class:`WeightLoader`).

    Args:
        progress: is told what has been read.
        weight_mode: what becomes of matrices; vectors (norms, biases) are float32 always.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        *,
        progress: LoadingProgress,
        weight_mode: WeightMode = "float32",
    ):
        self._checkpoint = checkpoint
        self._ops = ops
        self._packed_formats = _kept_formats(ops.packed_formats, weight_mode)
        self._dequantised: set[str] = set()
        self._progress = progress

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        matrix = self._ops.matrix(
            sum(rows for _, rows in parts),
            columns,
            self._read_parts(parts, columns),
            self._read_biases(parts) if bias else None,
        )
        if self._ops.lora is None or not is_adaptable(parts):
            return matrix
        return self._ops.adapted(matrix, parts[0][0], [rows for _, rows in parts])

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> ExpertMatrices:
        return self._ops.expert_matrices(
            sum(rows for _, rows in experts[0]),
            columns,
            (self._read_parts(parts, columns) for parts in experts),
            np.stack([self._read_biases(parts) for parts in experts]) if bias else None,
        )

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        weight = self._read(f"{name}.weight", (size,))
        return RMSNorm(self._ops.vector(weight + np.float32(offset) if offset else weight), size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if not affine:
            ones, zeros = np.ones(size, np.float32), np.zeros(size, np.float32)
            return LayerNorm(self._ops.vector(ones), self._ops.vector(zeros), size, eps)
        weight, bias = self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size)
        return LayerNorm(weight, bias, size, eps)

    def vector(self, name: str, size: int) -> Vector:
        return self._ops.vector(self._read(name, (size,)))

    def _read_biases(self, parts: Sequence[tuple[str, int]]) -> np.ndarray:
        return np.concatenate([self._read(f"{name}.bias", (rows,)) for name, rows in parts])

    def _read_parts(
        self, parts: Sequence[tuple[str, int]], columns: int
    ) -> Iterator[np.ndarray | StoredRows]:
        for name, rows in parts:
            yield self._read_matrix(f"{name}.weight", (rows, columns))
            self._checkpoint.release(f"{name}.weight")

    def _read_matrix(self, name: str, shape: tuple[int, int]) -> np.ndarray | StoredRows:
        if not self._packed_formats:
            return self._read(name, shape)
        stored_as = self._checkpoint.format(name)
        if stored_as in self._packed_formats:
            self._check_shape(name, self._checkpoint.shape(name), shape)
            self._progress.add(self._checkpoint.num_bytes(name))
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
        self._progress.add(self._checkpoint.num_bytes(name))
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
    """Memory that a model's weights will take, but for the padding of matrices to whole panels and for the
    scales that GGML's K types hold packed (up to 4 %).

    Args:
        packed_formats: those of the backend (``Ops.packed_formats``) that stay as they are.
        dense_itemsize: bytes of an element of the other matrices.
    """
    kept = _kept_formats(packed_formats, weight_mode)
    total = 0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) != 2:
            total += 4 * math.prod(shape)
        elif checkpoint.format(name) in kept:
            total += checkpoint.num_bytes(name)
        else:
            total += dense_itemsize * math.prod(shape)
    return total


def _kept_formats(packed_formats: Collection[str], weight_mode: WeightMode) -> frozenset[str]:
    return frozenset(packed_formats) if weight_mode == "packed" else frozenset()
