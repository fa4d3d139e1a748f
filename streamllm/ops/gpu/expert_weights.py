"""The weights of a mixture's experts on a device, one under the other, so that a kernel finds any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix
from streamllm.ops.gpu.weight_rows import WeightRows


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A weight ``W [n, k]`` an expert.

    Attributes:
        rows: those of all experts in order, ``[num_experts * n, k]``, in one format.
        n: rows of an expert.
        bias: float32 ``[num_experts * n]``, or ``None``.
    """

    rows: WeightRows
    n: int
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantize(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """An expert's weight and bias, float32 ``[n, k]`` and ``[n]``."""
        first, last = expert * self.n, (expert + 1) * self.n
        ids = torch.arange(first, last, device=self.rows.values.device)
        return self.rows.dequantize(ids), None if self.bias is None else self.bias[first:last]


def stack_experts(
    matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, bias: Tensor | None = None
) -> ExpertWeights:
    """The weights of experts, at least one, all of one shape and without biases of their own.

    Args:
        dtype: of the activations: what rows are dequantised to if they are not all stored in one format.
        bias: float32 ``[num_experts, n]``.
    """
    pieces = [piece for matrix in matrices for piece in matrix.pieces]
    if len({piece.format for piece in pieces}) > 1:
        pieces = [_dense(piece, dtype) for piece in pieces]
    first = pieces[0]
    axis = 0 if first.format == "dense" else 1
    stacked: dict[str, Any] = {
        name: torch.cat([piece.tensors[name] for piece in pieces], dim=axis) for name in first.tensors
    }
    rows = replace(first, n=sum(piece.n for piece in pieces), **stacked)
    return ExpertWeights(rows, matrices[0].shape[0], None if bias is None else bias.flatten())


def _dense(piece: WeightRows, dtype: torch.dtype) -> WeightRows:
    ids = torch.arange(piece.n, device=piece.values.device)
    return WeightRows("dense", piece.n, piece.k, piece.dequantize(ids).to(dtype))
