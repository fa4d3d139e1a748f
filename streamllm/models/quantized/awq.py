"""AWQ (Lin et al. 2023), as AutoAWQ writes it for its ``gemm`` kernels.

A matrix ``[n, k]`` is ``qweight`` int32 ``[k, n / 8]``, in whose words the codes of eight rows lie, from the
lowest bits up those of rows 0, 2, 4, 6, 1, 3, 5 and 7; ``qzeros`` int32 ``[groups, n / 8]`` alike; and
``scales`` ``[groups, n]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamllm.models.config_fields import ConfigFields
from streamllm.models.quantized.integer_matrix import (
    Codes,
    GroupFactors,
    IntegerMatrix,
    groups_of,
    matrix_shape,
    num_groups,
    read_words,
    warn_of_dense,
)
from streamllm.models.quantized.refusals import read_group_size, unsupported
from streamllm.models.stored_layout import Sources

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

_BITS = 4
_PER_WORD = 32 // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its rows is."""
_VERSIONS = ("gemm", "exllama")
"""Values of ``version`` whose files have this layout."""
_ALIASES = {"bits": "w_bit", "group_size": "q_group_size"}
_SUFFIX = ".qweight"


@dataclass(frozen=True)
class AWQ:
    """What a ``quantization_config`` says of the matrices that are quantised.

    Attributes:
        group_size: columns that share a scale; ``None``: all.
    """

    group_size: int | None

    @classmethod
    def read(cls, fields: ConfigFields) -> AWQ:
        """
        Raises:
            ModelLoadError: what cannot be read, by name.
        """
        fields = fields.with_aliases(_ALIASES)
        if (bits := fields.integer("bits", _BITS)) != _BITS:
            raise unsupported(fields.path, f"AWQ with bits {bits} (not {_BITS}) is")
        version = str(fields.get("version") or _VERSIONS[0]).lower()
        if version not in _VERSIONS:
            raise unsupported(fields.path, f"AWQ in the layout {version!r} (not {' or '.join(_VERSIONS)}) is")
        return cls(read_group_size(fields, "group_size"))

    def sources(self, checkpoint: Checkpoint) -> Sources:
        """Every quantised matrix of the files."""
        sources: Sources = {}
        for stored in sorted(checkpoint.names()):
            if stored.endswith(_SUFFIX):
                module = stored.removesuffix(_SUFFIX)
                k, words = matrix_shape(checkpoint, stored)
                layout = _Layout(module, (words * _PER_WORD, k), self.group_size)
                groups = groups_of(k, self.group_size)
                sources[f"{module}.weight"] = IntegerMatrix.of(layout, layout.shape, _BITS, groups)
        warn_of_dense(sources)
        return sources


@dataclass(frozen=True)
class _Layout:
    """One matrix (an :class:`~streamllm.models.quantized.integer_matrix.IntegerLayout`)."""

    module: str
    shape: tuple[int, int]
    group_size: int | None

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        (n, k), groups = self.shape, num_groups(self.shape[1], self.group_size)
        return {
            f"{self.module}.qweight": (k, n // _PER_WORD),
            f"{self.module}.qzeros": (groups, n // _PER_WORD),
            f"{self.module}.scales": (groups, n),
        }

    def codes(self, checkpoint: Checkpoint) -> Codes:
        words = read_words(checkpoint, f"{self.module}.qweight")

        def unpack(rows: slice) -> npt.NDArray[np.uint8]:
            return _unpack_rows(words[:, rows.start // _PER_WORD : rows.stop // _PER_WORD])

        return unpack

    def factors(self, checkpoint: Checkpoint) -> GroupFactors:
        zeros = _unpack_rows(read_words(checkpoint, f"{self.module}.qzeros"))
        return GroupFactors(checkpoint.read(f"{self.module}.scales").T, zeros)


def _unpack_rows(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """The codes in words ``[columns, rows / 8]``, ``[rows, columns]``."""
    words = np.ascontiguousarray(words.T)
    codes = np.empty((len(words) * _PER_WORD, words.shape[1]), np.uint8)
    for row, place in enumerate(_PLACES):
        codes[row::_PER_WORD] = words >> np.uint32(_BITS * place) & np.uint32(15)
    return codes
