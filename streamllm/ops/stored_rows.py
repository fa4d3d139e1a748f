"""Rows of a weight in the format of the file that they lie in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class StoredRows:
    """Some rows of a matrix, as stored.

    Attributes:
        format: the name of how they are stored: ``"float32"``, ``"float16"``, ``"bfloat16"``, or GGML's name
            of a quantised type in lower case, such as ``"q4_1"``.
        data: ``[rows, bytes of a row]``, a row's bytes side by side; may be a read-only view of the file.
    """

    format: str
    data: npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and bytes of a row."""
        return self.data.shape
