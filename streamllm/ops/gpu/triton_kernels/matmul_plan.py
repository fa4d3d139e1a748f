"""How a matrix product is cut into programs.

Everything that the order of a sum depends on (tiles along k, splits) follows from the weight and the
configuration; the number of rows decides how many of them share a tile, and where splits are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from streamllm.ops.gpu.triton_kernels.tuning import configuration
from streamllm.ops.gpu.weight_layout import LAYOUTS

WIDE_ROWS = 64
"""Rows of activations in a tile beyond which it is a wide one."""

ROW_SCALED = frozenset(name for name, layout in LAYOUTS.items() if layout.is_row_scaled)
"""Formats with one scale a row, which is multiplied in at the very end."""

TILES_IN_CACHE = 8
"""Tiles along n whose row tiles follow each other."""

_SHORTEST_SPLIT = 512
_MOST_SPLITS = 16
_FEWEST_ROWS = 16


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How products with weights of one format, and perhaps shape, are tiled.

    Attributes:
        block_n: rows of the weight in a tile.
        block_rows: the most rows of activations in a tile.
        num_warps, num_stages: of programs whose tiles are not wide.
        wide_warps, wide_stages: of the others.
        programs: k is split until there are about so many programs for one tile of rows.
    """

    block_n: int
    block_rows: int
    num_warps: int
    num_stages: int
    wide_warps: int
    wide_stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """One launch of the product kernel.

    Attributes:
        splits: how many sums over parts of k make up an element.
        spread: whether they are spread over programs.
    """

    grid: tuple[int, int]
    block_n: int
    block_rows: int
    tile_k: int
    splits: int
    spread: bool
    num_warps: int
    num_stages: int

    def constants(self, row_format: str, has_bias: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        return {
            "LAYOUT": LAYOUTS.get(row_format),
            "HAS_ROW_SCALES": row_format in ROW_SCALED,
            "HAS_BIAS": has_bias,
            "SPLITS": self.splits,
            "SPREAD": self.spread,
            "BLOCK_N": self.block_n,
            "BLOCK_ROWS": self.block_rows,
            "TILE_K": self.tile_k,
            "TILES_IN_CACHE": TILES_IN_CACHE,
        }


def product_config(architecture: str, row_format: str, x_bytes: int, n: int, k: int) -> ProductConfig:
    """The tables' configuration (:mod:`streamllm.ops.gpu.triton_kernels.tuning`) for a weight ``[n, k]`` and
    activations of ``x_bytes`` an element."""
    problem = product_problem(row_format, x_bytes, n, k)
    return ProductConfig(**configuration("matmul", architecture, problem))


def product_problem(row_format: str, x_bytes: int, n: int, k: int) -> str:
    """The problem's name in a table."""
    return f"{8 * x_bytes}-bit {row_format} n={n} k={k}"


def plan_product(
    config: ProductConfig, row_format: str, x_bytes: int, rows: int, n: int, k: int
) -> ProductPlan:
    """The launch for ``rows`` rows of activations, at least 1."""
    block_rows = min(config.block_rows, max(_FEWEST_ROWS, triton.next_power_of_2(rows)))
    tiles_n = triton.cdiv(n, config.block_n)
    splits = _num_splits(config.programs / tiles_n, k)
    tiles = tiles_n * triton.cdiv(rows, block_rows)
    # Partial sums cost memory traffic: not where half of the programs are there without.
    spread = splits > 1 and 2 * tiles <= config.programs
    wide = block_rows > WIDE_ROWS
    return ProductPlan(
        grid=(tiles, splits if spread else 1),
        block_n=config.block_n,
        block_rows=block_rows,
        tile_k=tile_k(row_format, x_bytes),
        splits=splits,
        spread=spread,
        num_warps=config.wide_warps if wide else config.num_warps,
        num_stages=config.wide_stages if wide else config.num_stages,
    )


def tile_k(row_format: str, x_bytes: int) -> int:
    """Columns that a step of a program's loop takes: the tile of a format, or 128 bytes of a dense weight."""
    return 128 // x_bytes if row_format == "dense" else LAYOUTS[row_format].tile


def _num_splits(wanted: float, k: int) -> int:
    """The power of 2 that is nearest to ``wanted`` and leaves splits long enough."""
    splits = 1
    while 1.5 * splits < wanted and 2 * splits <= min(k // _SHORTEST_SPLIT, _MOST_SPLITS):
        splits *= 2
    return splits
