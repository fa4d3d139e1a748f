"""compressed-tensors (the format of LLM Compressor): integers of 4 and 8 bits.

A matrix ``[n, k]`` in ``pack-quantized`` is ``weight_packed`` int32 ``[n, k / c]`` with c codes of
consecutive columns in a word, lowest bits first, and ``weight_shape`` ``[n, k]``; in ``int-quantized`` it is
``weight`` int8 ``[n, k]``. Beside it are ``weight_scale`` (``[n, groups]``, ``[n, 1]`` or ``[1]``), and where
the scheme is not symmetric ``weight_zero_point`` (packed: int32 ``[n / c, groups]``, consecutive rows in a
word), and ``weight_g_idx`` ``[k]``, the group of each column, where columns were reordered by activation.

How activations were meant to be quantised does not matter here: products round them on their own, finer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    read_integers,
    read_words,
    unpack_words,
    warn_of_dense,
)
from streamllm.models.quantized.refusals import unsupported
from streamllm.models.stored_layout import Sources

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

logger = logging.getLogger("streamllm.models")

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mixed-precision",
    "dense",
)
_STRATEGIES = ("tensor", "channel", "group")
_SCALE = ".weight_scale"
_LINEAR = "Linear"


@dataclass(frozen=True)
class Scheme:
    """How the matrices of a config group are quantised.

    Attributes:
        targets: names of modules, patterns of them (``re:...``), or ``Linear`` for all.
        is_float: they are floats, not integers.
        bits, strategy, group_size, symmetric: of integers; ``group_size`` of the strategy "group" only.
    """

    targets: tuple[str, ...]
    is_float: bool = False
    bits: int = 8
    strategy: str = "channel"
    group_size: int | None = None
    symmetric: bool = True


@dataclass(frozen=True)
class CompressedTensors:
    """What a ``quantization_config`` says.

    Attributes:
        path: of the file that says it.
        schemes: of the config groups.
    """

    path: Path
    schemes: tuple[Scheme, ...]

    @classmethod
    def read(cls, fields: ConfigFields) -> CompressedTensors:
        """
        Raises:
            ModelLoadError: what cannot be read, by name.
        """
        _refuse_what_is_more(fields)
        groups = fields.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise fields.wrong("config_groups", "an object with at least one group")
        schemes = tuple(_read_scheme(fields, str(name), group) for name, group in groups.items())
        return cls(fields.path, schemes)

    def sources(self, checkpoint: Checkpoint) -> Sources:
        """Every matrix of integers in the files."""
        sources: Sources = {}
        for stored in sorted(checkpoint.names()):
            if stored.endswith(_SCALE):
                module = stored.removesuffix(_SCALE)
                weight, packed = f"{module}.weight", f"{module}.weight_packed"
                if checkpoint.has(packed):
                    sources[weight] = self._matrix(checkpoint, module, packed)
                elif checkpoint.has(weight) and checkpoint.format(weight) == "i8":
                    sources[weight] = self._matrix(checkpoint, module, weight)
        warn_of_dense(sources)
        return sources

    def _matrix(self, checkpoint: Checkpoint, module: str, stored: str) -> IntegerMatrix:
        scheme = self._scheme_of(module)
        shape = matrix_shape(checkpoint, stored)
        is_packed = stored.endswith("_packed")
        if is_packed:
            shape = _unpacked_shape(checkpoint, module, shape, 32 // scheme.bits)
        index = f"{module}.weight_g_idx"
        has_index = scheme.group_size is not None and checkpoint.has(index)
        layout = _Layout(
            module, shape, scheme, is_packed, _zeros_are_packed(checkpoint, module, scheme), has_index
        )
        groups = groups_of(shape[1], scheme.group_size)
        if has_index:
            groups = read_groups(checkpoint, index, shape[1], num_groups(shape[1], scheme.group_size))
        return IntegerMatrix.of(layout, shape, scheme.bits, groups)

    def _scheme_of(self, module: str) -> Scheme:
        """The scheme of a module that is stored quantised; a name counts more than a pattern, and that more
        than a class.

        Raises:
            ModelLoadError: none has it, or it is of floats.
        """
        if len(self.schemes) == 1 and not self.schemes[0].is_float:
            return self.schemes[0]
        for matches in (_is_named, _fits_pattern, _is_linear):
            for scheme in self.schemes:
                if any(matches(target, module) for target in scheme.targets):
                    if scheme.is_float:
                        raise ModelLoadError(
                            f"{self.path}: by the quantization_config {module} is quantised to floats; it is "
                            "stored as integers."
                        )
                    return scheme
        raise ModelLoadError(
            f"{self.path}: no target in the quantization_config's config_groups covers {module}, which is "
            "stored quantised."
        )


def _is_named(target: str, module: str) -> bool:
    return target == module or module.endswith(f".{target}")


def _fits_pattern(target: str, module: str) -> bool:
    return target.startswith("re:") and re.search(target.removeprefix("re:"), module) is not None


def _is_linear(target: str, module: str) -> bool:
    return target == _LINEAR


def _refuse_what_is_more(fields: ConfigFields) -> None:
    """Refuses what is stored, or must be computed, in another way."""
    if fields.get("kv_cache_scheme"):
        logger.info(
            "%s: its kv_cache_scheme and scales for the KV cache are left aside; --kv-cache-dtype decides",
            fields.path,
        )
    sparsity = fields.get("sparsity_config") or {}
    kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if kind not in (None, "dense"):
        raise unsupported(fields.path, f"sparse weights (sparsity_config {kind!r}) are")
    if fields.get("transform_config"):
        raise unsupported(fields.path, "a transform_config (rotated weights) is")
    _check_format(fields, fields.get("format"))


def _check_format(fields: ConfigFields, kind: Any) -> None:
    if kind is not None and kind not in _FORMATS:
        raise unsupported(fields.path, f"compressed-tensors in the format {kind!r} is")


def _read_scheme(fields: ConfigFields, name: str, group: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise unsupported(fields.path, f"config_groups.{name} without quantised weights is")
    _check_format(fields, group.get("format"))
    targets = _names(fields, f"config_groups.{name}.targets", group.get("targets"))
    own = ConfigFields(fields.path, weights)
    bits, kind = own.integer("num_bits"), own.get("type", "int")
    if (kind, bits) == ("float", 8):
        return Scheme(targets, is_float=True)
    if kind != "int":
        raise unsupported(
            fields.path, f"config_groups.{name} with numbers of the type {kind} and {bits} bits is"
        )
    if bits not in (4, 8):
        raise unsupported(fields.path, f"config_groups.{name} with num_bits {bits} (not 4 or 8) is")
    group_size = None if own.get("group_size") == -1 else own.integer("group_size", None)
    strategy = own.get("strategy") or ("channel" if group_size is None else "group")
    if strategy not in _STRATEGIES:
        raise unsupported(
            fields.path,
            f"config_groups.{name} with the strategy {strategy!r} (not {', '.join(_STRATEGIES)}) is",
        )
    if strategy != "group":
        group_size = None
    elif group_size is None:
        raise ModelLoadError(
            f"{fields.path}: config_groups.{name} has the strategy 'group' and no group_size."
        )
    return Scheme(targets, False, bits, strategy, group_size, own.flag("symmetric", True))


def _unpacked_shape(
    checkpoint: Checkpoint, module: str, packed: tuple[int, int], per_word: int
) -> tuple[int, int]:
    """The shape of a matrix whose codes lie ``per_word`` to a word, the last word of a row maybe not full."""
    name = f"{module}.weight_shape"
    if not checkpoint.has(name):
        return packed[0], packed[1] * per_word
    rows, columns = shape = (
        read_integers(checkpoint, name).tolist() if checkpoint.shape(name) == (2,) else (0, 0)
    )
    if rows != packed[0] or columns < 1 or -(-columns // per_word) != packed[1]:
        raise ModelLoadError(
            f"The tensor {name} says {list(shape)}, which is no shape of {module}.weight_packed "
            f"{list(packed)}."
        )
    return rows, columns


def _names(fields: ConfigFields, name: str, values: Any) -> tuple[str, ...]:
    """A list of modules' names and patterns."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelLoadError(f"{fields.path}: {name} must be a list of names, got {values!r}.")
    for value in values:
        if value.startswith("re:"):
            try:
                re.compile(value.removeprefix("re:"))
            except re.error as error:
                raise ModelLoadError(
                    f"{fields.path}: {name} has the pattern {value!r}, which is none."
                ) from error
    return tuple(values)


def _zeros_are_packed(checkpoint: Checkpoint, module: str, scheme: Scheme) -> bool:
    """Whether the zero points lie in words, as they do but in older files."""
    name = f"{module}.weight_zero_point"
    return not scheme.symmetric and checkpoint.has(name) and checkpoint.format(name) == "i32"


@dataclass(frozen=True)
class _Layout:
    """One matrix (an :class:`~streamllm.models.quantized.integer_matrix.IntegerLayout`)."""

    module: str
    shape: tuple[int, int]
    scheme: Scheme
    is_packed: bool
    zeros_are_packed: bool
    has_index: bool

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        n, k = self.shape
        per_word = 32 // self.scheme.bits
        factors = self._factor_shape
        shapes: dict[str, tuple[int, ...]] = {f"{self.module}.weight_scale": factors}
        if self.is_packed:
            shapes[f"{self.module}.weight_packed"] = (n, -(-k // per_word))
        else:
            shapes[f"{self.module}.weight"] = (n, k)
        if not self.scheme.symmetric:
            packed = (-(-factors[0] // per_word), *factors[1:])
            shapes[f"{self.module}.weight_zero_point"] = packed if self.zeros_are_packed else factors
        return {**shapes, f"{self.module}.weight_g_idx": (k,)} if self.has_index else shapes

    @property
    def _factor_shape(self) -> tuple[int, ...]:
        n, k = self.shape
        if self.scheme.strategy == "tensor":
            return (1,)
        return (n, num_groups(k, self.scheme.group_size))

    def codes(self, checkpoint: Checkpoint) -> Codes:
        columns = self.shape[1]
        if not self.is_packed:
            integers = checkpoint.read_stored(f"{self.module}.weight").data

            def shift(rows: slice) -> npt.NDArray[np.uint8]:
                # From -128 .. 127 (in 4 bits -8 .. 7) to codes from 0 on.
                return integers[rows] + np.uint8(1 << (self.scheme.bits - 1))

            return shift
        words = read_words(checkpoint, f"{self.module}.weight_packed")

        def unpack(rows: slice) -> npt.NDArray[np.uint8]:
            return np.ascontiguousarray(unpack_words(words[rows], self.scheme.bits)[:, :columns])

        return unpack

    def factors(self, checkpoint: Checkpoint) -> GroupFactors:
        shape = self._factor_shape
        scales = checkpoint.read(f"{self.module}.weight_scale")
        name = f"{self.module}.weight_zero_point"
        zeros: npt.NDArray[np.integer] | None = None
        if self.scheme.symmetric:
            pass
        elif self.zeros_are_packed:
            words = read_words(checkpoint, name).reshape(-(-shape[0] * self.scheme.bits // 32), -1)
            zeros = unpack_words(words.T, self.scheme.bits).T[: shape[0]]
        else:
            zeros = read_integers(checkpoint, name).astype(np.int32) + (1 << (self.scheme.bits - 1))
        two = (shape[0], -1)
        return GroupFactors(scales.reshape(two), None if zeros is None else zeros.reshape(two))
