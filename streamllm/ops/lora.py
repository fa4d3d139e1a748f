"""What low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) are to the operations.

An adapter adds ``b @ (a @ x)`` to some rows of the products ``W @ x``. Loaded adapters lie in slots, and each
row of a step has the slot of its sequence's adapter, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

NO_ADAPTER = -1
"""The slot of a row without an adapter."""


@dataclass(frozen=True)
class LoraLimits:
    """
    Attributes:
        max_loras: slots, and so different adapters in one step.
        max_rank: the largest rank of an adapter's updates.
    """

    max_loras: int
    max_rank: int


@dataclass(frozen=True, eq=False)
class LoraUpdate:
    """What an adapter adds to the rows ``[first_row, first_row + rows)`` of one matrix ``W [n, k]``: they
    become those of ``W + b @ a``.

    Attributes:
        first_row: where one of the matrix's parts begins; the update covers the whole part.
        a: float32 ``[rank, k]``.
        b: float32 ``[rows, rank]``, with the adapter's scale in it.
    """

    first_row: int
    a: np.ndarray
    b: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.b.shape[0])

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter as it was read.

    Attributes:
        name: what requests call it.
        content: a digest of all that its outputs depend on; equal for equal files.
        rank: the largest rank of its updates.
        updates: by the name of the matrix that they belong to
            (:class:`streamllm.models.lora_targets.AdaptableMatrix`), at most one for each of its parts.
    """

    name: str
    content: bytes
    rank: int
    updates: Mapping[str, tuple[LoraUpdate, ...]]

    @property
    def num_bytes(self) -> int:
        """Memory that its updates take as they are here."""
        return sum(update.a.nbytes + update.b.nbytes for each in self.updates.values() for update in each)
