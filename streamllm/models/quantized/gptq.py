"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it.

A matrix ``[n, k]`` is ``qweight`` int32 ``[k / c, n]`` with c codes of consecutive columns in a word, lowest
bits first, ``qzeros`` int32 ``[groups, n / c]`` with those of consecutive rows, ``scales`` ``[groups, n]``,
and ``g_idx`` int32 ``[k]``, the group of each column. Files of the first format (``checkpoint_format``
"gptq", or none) hold zero points less 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import ConfigFields
from streamllm.models.quantized.integer_matrix import (
    Codes,
    GroupFactors,
    IntegerMatrix,
    groups_of,
    matrix_shape,
    num_groups,
    read_groups,
    read_words,
    unpack_words,
    warn_of_dense,
)
from streamllm.models.quantized.refusals import read_group_size, unsupported
from streamllm.models.stored_layout import Sources

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points of a ``checkpoint_format`` lack."""
_SUFFIX = ".qweight"


@dataclass(frozen=True)
class GPTQ:
    """What a ``quantization_config`` says of the matrices that are quantised.

    Attributes:
        bits: of a code.
        group_size: columns that share a scale; ``None``: all.
        zero_offset: what stored zero points lack.
    """

    bits: int
    group_size: int | None
    zero_offset: int

    @classmethod
    def read(cls, fields: ConfigFields) -> GPTQ:
        """
        Raises:
            ModelLoadError: what cannot be read, by name.
        """
        bits = fields.integer("bits")
        if bits not in (4, 8):
            raise unsupported(fields.path, f"GPTQ with bits {bits} (not 4 or 8) is")
        dynamic = fields.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise fields.wrong("dynamic", "an object")
        if changed := [key for key in dynamic if not str(key).startswith("-:")]:
            raise unsupported(
                fields.path, f"GPTQ with other bits in some modules (dynamic {changed[0]!r}) is"
            )
        if fields.flag("is_marlin_format"):
            raise ModelLoadError(
                f"{fields.path}: GPTQ repacked for Marlin is not supported; use the same model in the format "
                "'gptq'."
            )
        offset = fields.choice("checkpoint_format", "gptq", _ZERO_OFFSETS)
        return cls(bits, read_group_size(fields, "group_size"), offset)

    def sources(self, checkpoint: Checkpoint) -> Sources:
        """Every quantised matrix of the files."""
        sources: Sources = {}
        for stored in sorted(checkpoint.names()):
            if stored.endswith(_SUFFIX):
                module = stored.removesuffix(_SUFFIX)
                sources[f"{module}.weight"] = self._matrix(checkpoint, module)
        warn_of_dense(sources)
        return sources

    def _matrix(self, checkpoint: Checkpoint, module: str) -> IntegerMatrix:
        words, n = matrix_shape(checkpoint, f"{module}.qweight")
        k = words * (32 // self.bits)
        groups = groups_of(k, self.group_size)
        index = f"{module}.g_idx"
        layout = _Layout(module, (n, k), self, checkpoint.has(index))
        if layout.has_index:
            groups = read_groups(checkpoint, index, k, layout.num_groups)
        return IntegerMatrix.of(layout, (n, k), self.bits, groups)


@dataclass(frozen=True)
class _Layout:
    """One matrix (an :class:`~streamllm.models.quantized.integer_matrix.IntegerLayout`)."""

    module: str
    shape: tuple[int, int]
    scheme: GPTQ
    has_index: bool

    @property
    def num_groups(self) -> int:
        return num_groups(self.shape[1], self.scheme.group_size)

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        (n, k), per_word = self.shape, 32 // self.scheme.bits
        shapes = {
            f"{self.module}.qweight": (k // per_word, n),
            f"{self.module}.qzeros": (self.num_groups, n // per_word),
            f"{self.module}.scales": (self.num_groups, n),
        }
        return {**shapes, f"{self.module}.g_idx": (k,)} if self.has_index else shapes

    def codes(self, checkpoint: Checkpoint) -> Codes:
        words = read_words(checkpoint, f"{self.module}.qweight")

        def unpack(rows: slice) -> npt.NDArray[np.uint8]:
            return unpack_words(words[:, rows].T, self.scheme.bits)

        return unpack

    def factors(self, checkpoint: Checkpoint) -> GroupFactors:
        bits = self.scheme.bits
        zeros = unpack_words(read_words(checkpoint, f"{self.module}.qzeros"), bits)
        # The zero point 0, less 1, is stored as the largest code.
        zeros = (zeros + np.uint8(self.scheme.zero_offset)) & np.uint8((1 << bits) - 1)
        return GroupFactors(checkpoint.read(f"{self.module}.scales").T, zeros.T)
