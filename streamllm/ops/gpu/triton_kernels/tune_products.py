"""Measures how matrix products are tiled best on this GPU: for ``streamllm tune-gpu``.

Two searches, one after the other: few rows decide on the weight's tile and the splits, on which the order of
sums depends; many rows on the rest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import family_of
from streamllm.ops import LayerNorm, RMSNorm
from streamllm.ops.gpu.triton_kernels.matmul import multiply_rows
from streamllm.ops.gpu.triton_kernels.matmul_plan import (
    WIDE_ROWS,
    ProductConfig,
    product_config,
)
from streamllm.ops.gpu.triton_kernels.tune import Timer, median_time, time_of
from streamllm.ops.gpu.triton_kernels.tuning import gpu_architecture
from streamllm.ops.gpu.weight_rows import WeightRows

FEW_ROWS, MANY_ROWS = 16, 2048

_FEW_ROWS_TILES = {2: ((64, 4), (128, 4), (128, 8)), 4: ((32, 4), (64, 4), (64, 8))}
"""By bytes of an activation: rows of the weight in a tile, and warps."""

_MANY_ROWS_TILES = {2: ((64, 4), (64, 8), (128, 8), (256, 8)), 4: ((16, 4), (32, 4), (64, 8))}
"""Likewise: rows of activations in a tile, and warps."""


@dataclass(frozen=True)
class MeasuredProduct:
    """One configuration's time in milliseconds; ``None`` where it does not run on this GPU."""

    config: ProductConfig
    milliseconds: float | None


def weight_shapes(config: ModelConfig) -> dict[tuple[int, int], str]:
    """``(n, k)`` of the products in a model's layers, an expert's among them, and the name of a tensor that
    each weight is made of."""
    notes = _ShapeNotes()
    family_of(config.architecture).load_weights(notes, config)
    return notes.found


class _ShapeNotes:
    """Takes the place of what reads weights (a :class:`streamllm.models.weights.WeightLoader`)."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], str] = {}

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> None:
        name = parts[0][0]
        if any(word.isdecimal() for word in name.split(".")):  # a numbered layer's
            self.found.setdefault((sum(rows for _, rows in parts), columns), f"{name}.weight")

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> None:
        self.linear(experts[0], columns)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(None, size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        return LayerNorm(None, None, size, eps)

    def vector(self, name: str, size: int) -> None:
        return None


def random_weight(row_format: str, n: int, k: int, dtype: torch.dtype, device: torch.device) -> WeightRows:
    """A weight whose values mean nothing."""
    if row_format == "dense":
        return WeightRows("dense", n, k, torch.randn(n, k, dtype=dtype, device=device))
    weight = WeightRows.allocate(row_format, n, k, device)
    for name, tensor in weight.tensors.items():
        if tensor.is_floating_point():
            tensor.fill_(1)
        else:
            limits = torch.iinfo(tensor.dtype)
            # Exponents of moderate powers of two.
            low, high = (120, 127) if name == "scales" else (limits.min, limits.max)
            tensor.random_(low, high)
    return weight


def candidates(known: ProductConfig, rows: int, x_bytes: int) -> Iterator[ProductConfig]:
    """What is measured: the configuration in use first, so that it wins a tie."""
    yield known
    changes: Iterable[dict[str, int]]
    if rows <= WIDE_ROWS:
        changes = (
            {"block_n": block_n, "num_warps": warps, "num_stages": stages, "programs": programs}
            for (block_n, warps), stages, programs in itertools.product(
                _FEW_ROWS_TILES[x_bytes], (3, 4, 5), (known.programs, 2 * known.programs)
            )
        )
    else:
        changes = (
            {"block_rows": block_rows, "wide_warps": warps, "wide_stages": stages}
            for (block_rows, warps), stages in itertools.product(_MANY_ROWS_TILES[x_bytes], (2, 3, 4))
        )
    for change in changes:
        if (config := replace(known, **change)) != known:
            yield config


def measure(
    weight: WeightRows, known: ProductConfig, rows: int, dtype: torch.dtype, timer: Timer = median_time
) -> Iterator[MeasuredProduct]:
    """Each candidate in turn, with ``rows`` rows of activations."""
    x = torch.randn(rows, weight.k, device=weight.values.device).to(dtype)
    out = torch.empty(rows, weight.n, dtype=dtype, device=x.device)
    for config in candidates(known, rows, dtype.itemsize):
        multiply = functools.partial(multiply_rows, out, x, weight, None, config)
        yield MeasuredProduct(config, time_of(multiply, timer))


def tune(
    row_format: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, MeasuredProduct], None],
    timer: Timer = median_time,
) -> ProductConfig:
    """The best configuration for one weight; in use remains what nothing beats.

    Args:
        report: told each measurement, with its number of rows.
    """
    best = product_config(gpu_architecture(device), row_format, dtype.itemsize, n, k)
    weight = random_weight(row_format, n, k, dtype, device)
    for rows in (FEW_ROWS, MANY_ROWS):
        fastest = math.inf
        for measured in measure(weight, best, rows, dtype, timer):
            report(rows, measured)
            if measured.milliseconds is not None and measured.milliseconds < fastest:
                fastest, best = measured.milliseconds, measured.config
    return best
