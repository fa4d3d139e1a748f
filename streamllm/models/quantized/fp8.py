"""Checkpoints whose matrices are 8-bit floats.

A matrix ``[n, k]`` is ``weight``, F8_E4M3 ``[n, k]`` (or F8_E5M2), times a scale that lies beside it:

- ``quant_method`` "fp8": ``weight_scale_inv`` or ``weight_scale``, one for each block of
  ``weight_block_size`` rows and columns, ``[ceil(n / 128), ceil(k / 128)]`` (DeepSeek, Qwen), or one for all
  of it (Mistral).
- "fbgemm_fp8": ``weight_scale [n, 1]``.
- "compressed-tensors" with weights of the type "float" and 8 bits: ``weight_scale``, ``[1]``, ``[n, 1]``,
  ``[n, groups]`` or one for each block of ``block_structure``, by the scheme's ``strategy``.
- none, in a folder whose files hold such tensors nevertheless: 1.

All of them multiply, also ``weight_scale_inv``. How activations were meant to be quantised (``input_scale``,
``activation_scale``) does not matter here: products take them as float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import ConfigFields
from streamllm.models.dequantize import FLOAT_DTYPES
from streamllm.models.parallel import rows_in_parallel
from streamllm.models.quantized.refusals import UNQUANTISED_INSTEAD
from streamllm.models.stored_layout import Sources
from streamllm.ops import float8_rows
from streamllm.ops.stored_rows import StoredRows

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

logger = logging.getLogger("streamllm.models")

_E5M2_VALUES = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
_VALUES = {"f8_e4m3": float8_rows.E4M3_VALUES, "f8_e5m2": _E5M2_VALUES}
_METHODS = ("fp8", "fbgemm_fp8")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_CONVERTED_AT_ONCE = 1 << 17

Block = tuple[int, int]
"""Rows and columns that share a scale."""


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix.

    Attributes:
        name: of the tensor.
        shape: of it, as stored.
        block: what one of them is for.
    """

    name: str
    shape: tuple[int, ...]
    block: Block


@dataclass(frozen=True)
class Float8Tensor:
    """A matrix or vector of 8-bit floats (a :class:`~streamllm.models.tensor_source.TensorSource`).

    Attributes:
        name: of the tensor that holds the numbers.
        shape: its own.
        kind: ``"f8_e4m3"`` or ``"f8_e5m2"``.
        scales: ``None``: they are 1.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    scales: Scales | None

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: self.shape} | ({self.scales.name: self.scales.shape} if self.scales else {})

    @property
    def stays_packed(self) -> bool:
        """Whether the numbers of a row share scales in runs that the packed format has."""
        if self.kind != "f8_e4m3" or len(self.shape) != 2:
            return False
        columns = self._block[1]
        return columns % float8_rows.BLOCK == 0 or columns >= self.shape[1]

    def format(self, checkpoint: Checkpoint) -> str:
        return float8_rows.FORMAT if self.stays_packed else "float32"

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        rows, columns = self._rows_and_columns
        return rows * (float8_rows.float8_row_bytes(columns) if self.stays_packed else 4 * columns)

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> npt.NDArray[np.float32]:
        count, columns = self._rows_and_columns
        rows = rows or slice(0, count)
        codes, numbers = checkpoint.read_stored(self.name, rows).data, _VALUES[self.kind]
        scales = self._read_scales(checkpoint)
        step = self._block[1]
        block_of_column = np.arange(columns) // step if step < columns else np.zeros(1, np.intp)
        block_of_row = self._blocks_of_rows(rows)
        values = np.empty((len(codes), columns), np.float32)

        def convert(part: slice) -> None:
            numbers.take(codes[part], out=values[part], mode="clip")
            values[part] *= scales[block_of_row[part]][:, block_of_column]

        rows_in_parallel(convert, len(codes), columns, elements=_CONVERTED_AT_ONCE)
        return values.reshape(-1, *self.shape[1:])

    def read_stored(self, checkpoint: Checkpoint, rows: slice | None = None) -> StoredRows:
        if not self.stays_packed:
            values = self.read(checkpoint, rows)
            return StoredRows("float32", values.view(np.uint8).reshape(len(values), -1))
        count, columns = self._rows_and_columns
        rows = rows or slice(0, count)
        scales = self._read_scales(checkpoint)[self._blocks_of_rows(rows)]
        starts = np.arange(0, columns, float8_rows.BLOCK)
        codes = checkpoint.read_stored(self.name, rows).data
        return float8_rows.pack_float8(codes, scales[:, starts // self._block[1]])

    @property
    def _rows_and_columns(self) -> tuple[int, int]:
        """A vector as a matrix of one column."""
        return self.shape[0], self.shape[1] if len(self.shape) > 1 else 1

    @property
    def _block(self) -> Block:
        return self.scales.block if self.scales else self._rows_and_columns

    def _blocks_of_rows(self, part: slice) -> npt.NDArray[np.intp]:
        return np.arange(part.start, part.stop) // self._block[0]

    def _read_scales(self, checkpoint: Checkpoint) -> npt.NDArray[np.float32]:
        """One for each block, ``[blocks of rows, blocks of columns]``."""
        (rows, columns), (block_rows, block_columns) = self._rows_and_columns, self._block
        shape = (-(-rows // block_rows), -(-columns // block_columns))
        if self.scales is None:
            return np.ones(shape, np.float32)
        return checkpoint.read(self.scales.name).reshape(shape)


def handles(quantization: Mapping[str, Any]) -> bool:
    """Whether :func:`sources` reads what a ``quantization_config`` describes, or some of it."""
    method = str(quantization.get("quant_method")).lower()
    return method in _METHODS or (method == "compressed-tensors" and bool(_float8_groups(quantization)))


def sources(quantization: Mapping[str, Any] | None, checkpoint: Checkpoint, folder: Path) -> Sources:
    """Every tensor of 8-bit floats in the files, under its name; none where there are none.

    Args:
        quantization: the ``quantization_config``; ``None``: there is none.
        folder: of the files, for messages.

    Raises:
        ModelLoadError: a scale is missing, or of a shape or type that the config does not explain.
    """
    blocks = _blocks(quantization, folder / "config.json") if quantization else []
    found: dict[str, Float8Tensor] = {}
    for name in sorted(checkpoint.names()):
        kind, shape = checkpoint.format(name), checkpoint.shape(name)
        if kind in _VALUES and len(shape) in (1, 2) and 0 not in shape:
            scales = _find_scales(checkpoint, name, shape, blocks)
            if scales is None and quantization:
                raise ModelLoadError(
                    f"The weights in {folder} lack the scale of the tensor {name}, which is {kind.upper()}: "
                    f"neither {' nor '.join(name + suffix for suffix in _SCALE_SUFFIXES)} is there."
                )
            found[name] = Float8Tensor(name, shape, kind, scales)
    _warn_of_dense(found)
    return dict(found)


def _warn_of_dense(found: Mapping[str, Float8Tensor]) -> None:
    dense = [name for name, source in found.items() if len(source.shape) == 2 and not source.stays_packed]
    if dense:
        logger.warning(
            "%d matrices such as %s are F8_E5M2, or have scales of no whole blocks of %d columns: they "
            "become float32; --quantization int8 makes them smaller again",
            len(dense), dense[0], float8_rows.BLOCK,
        )  # fmt: skip


def _find_scales(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], blocks: list[Block]
) -> Scales | None:
    suffix = next((suffix for suffix in _SCALE_SUFFIXES if checkpoint.has(name + suffix)), None)
    if suffix is None:
        return None
    scale = name + suffix
    if (kind := checkpoint.format(scale)) not in FLOAT_DTYPES:
        raise ModelLoadError(
            f"The tensor {scale} has the type {kind.upper()}; scales of 8-bit floats are F32, F16 or BF16. "
            f"{UNQUANTISED_INSTEAD}"
        )
    actual = checkpoint.shape(scale)
    rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
    known = {(): (rows, columns), (1,): (rows, columns), (1, 1): (rows, columns)}
    known |= {(rows,): (1, columns), (rows, 1): (1, columns)} if rows > 1 else {}
    known |= {(-(-rows // high), -(-columns // wide)): (high, wide) for high, wide in blocks}
    if actual not in known:
        raise ModelLoadError(
            f"The tensor {scale} has shape {list(actual)}; for {name} of shape {list(shape)} it must be one "
            f"of {', '.join(str(list(shape)) for shape in known)} by the quantization_config."
        )
    return Scales(scale, actual, known[actual])


def _blocks(quantization: Mapping[str, Any], path: Path) -> list[Block]:
    """The sizes of blocks smaller than a row that a ``quantization_config`` names."""
    if quantization.get("expert_dtype", "fp8") != "fp8":
        raise ModelLoadError(
            f"{path}: experts quantised to {quantization['expert_dtype']!r} are not supported. "
            f"{UNQUANTISED_INSTEAD}"
        )
    found = [_block(path, "weight_block_size", quantization.get("weight_block_size"))]
    for name, weights in _float8_groups(quantization).items():
        field = f"config_groups.{name}.weights"
        if weights.get("symmetric") is False:
            raise ModelLoadError(
                f"{path}: {field} of 8-bit floats with zero points are not supported. {UNQUANTISED_INSTEAD}"
            )
        found.append(_block(path, f"{field}.block_structure", weights.get("block_structure")))
        if weights.get("strategy") == "group":
            found.append((1, ConfigFields(path, weights).integer("group_size")))
    return [block for block in found if block is not None]


def _block(path: Path, field: str, value: Any) -> Block | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelLoadError(f"{path}: {field} must be two positive integers, got {value!r}.")
    return sizes[0], sizes[1]


def _float8_groups(quantization: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of compressed-tensors: by its name, how a config group of 8-bit floats quantises its weights."""
    groups = quantization.get("config_groups")
    found = {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            found[str(name)] = weights
    return found
