"""Reading weights: a checkpoint's tensors become the matrices and vectors of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.ops import Matrix, Ops, RMSNorm


class WeightLoader:
    """Builds weights for ``ops`` from named tensors, one tensor in memory at a time.

    Args:
        progress: show a bar (only where stderr is a terminal).
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, *, progress: bool):
        self._checkpoint = checkpoint
        self._ops = ops
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

    def _read_parts(self, parts: Sequence[tuple[str, int]], columns: int) -> Iterator[np.ndarray]:
        for name, rows in parts:
            yield self._read(f"{name}.weight", (rows, columns))

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor = self._checkpoint.read(name)
        if tensor.shape != shape:
            raise ModelLoadError(
                f"Tensor {name} has shape {list(tensor.shape)}; the config says {list(shape)}."
            )
        self._bar.update()
        return tensor
