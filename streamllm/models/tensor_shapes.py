"""Which tensors a model has, found out by loading it from nothing."""

from __future__ import annotations

from collections.abc import Sequence

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import family_of
from streamllm.ops import ExpertMatrices, LayerNorm, Matrix, RMSNorm, Vector


class TensorShapes:
    """A :class:`streamllm.models.weights.WeightLoader` that reads nothing and notes what it is asked for.

    Attributes:
        shapes: every tensor by its whole name, and its shape.
        matrices: the layers and columns of every matrix but the experts'.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.matrices: list[tuple[Sequence[tuple[str, int]], int]] = []

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        self.matrices.append((parts, columns))
        self._note(parts, columns, bias=bias)

    def _note(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool) -> None:
        for name, rows in parts:
            self.shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                self.shapes[f"{name}.bias"] = (rows,)

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> ExpertMatrices:
        for parts in experts:
            self._note(parts, columns, bias=bias)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(self.vector(f"{name}.weight", size), size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if affine:
            self.vector(f"{name}.weight", size)
            self.vector(f"{name}.bias", size)
        return LayerNorm(None, None, size, eps)

    def vector(self, name: str, size: int) -> Vector:
        self.shapes[name] = (size,)


def tensor_shapes(config: ModelConfig) -> TensorShapes:
    """What a model with this config asks for."""
    shapes = TensorShapes()
    family_of(config.architecture).load_weights(shapes, config)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model with this config reads, and its shape."""
    return tensor_shapes(config).shapes
