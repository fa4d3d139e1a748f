"""Rows of a weight in the format of the file that they lie in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class StoredRows:
    """Some rows of a matrix, as stored.

    Formats are ``"float32"``, ``"float16"``, ``"bfloat16"``, and blocks of consecutive elements of a row,
    one block after the other:

    - GGML's types under their names in lower case, such as ``"q4_1"`` (``"mxfp4"`` is one of them).
    - ``int4_32``, ``int4_64``, ``int4_128``, ``int8_32``, ``int8_64``, ``int8_128``: integers of 4 or 8 bits
      that share a scale and a minimum along so many elements, which is what most checkpoints of Hugging Face
      that are quantised to integers come to (:mod:`streamllm.models.quantized`). A block is the scale and
      the minimum, float32, little-endian, and then its integers. An element is ``scale * q + minimum``.
      ``int8``: q is a byte, signed. ``int4``: q is a nibble less 8; every 32 elements are 16 bytes, byte i
      of which has element i in the low nibble and element 16 + i in the high one.
    - ``float8_e4m3``: a row is a scale for every 128 elements (the last ones may be fewer), float32,
      little-endian, and then a byte an element, the numbers of ``torch.float8_e4m3fn``. An element is
      ``scale * number`` (:mod:`streamllm.ops.float8_rows`). Scales of larger blocks, of whole rows or of the
      whole matrix are repeated.

    Attributes:
        format: the name of how they are stored.
        data: ``[rows, bytes of a row]``, a row's bytes side by side; may be a read-only view of the file.
    """

    format: str
    data: npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and bytes of a row."""
        return self.data.shape
