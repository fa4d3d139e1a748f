"""Weights in a GGUF file, under Hugging Face's names and in Hugging Face's layout.

Two things differ from a safetensors checkpoint. Matrices may be quantised; they are given as stored, or as
the ``gguf`` package dequantises them. And for some architectures the rows of the query and key projections
are interleaved, because llama.cpp rotates neighbouring dimensions where Hugging Face rotates the two halves
of a head.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import to_float32
from streamllm.models.mapped_tensor import advise
from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import GGUF_ARCHITECTURES, family_of
from streamllm.ops.stored_rows import StoredRows
from streamllm.sources.gguf_file import GGUFTensor, open_gguf

T = TypeVar("T", bound=np.generic)

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOAT_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hugging_face_name(name: str, names: Mapping[str, str] | None = None) -> str | None:
    """``"blk.0.attn_q.weight"`` becomes ``"model.layers.0.self_attn.q_proj.weight"``; others ``None``.

    Args:
        names: a family's own names, those of a layer's tensors without the layer:
            ``{"attn_q": "self_attn.q_proj"}``; ``"blk"`` stands for what comes before a layer's number.
    """
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    names, (layer, part, kind) = names or {}, match.group("layer", "part", "kind")
    known = _MODEL_NAMES if layer is None else _LAYER_NAMES
    part_name = names.get(part) or known.get(part)
    if part_name is None:
        return None
    prefix = "" if layer is None else f"{names.get('blk', 'model.layers')}.{layer}."
    return f"{prefix}{part_name}.{kind}"


class GGUFCheckpoint:
    """The tensors of a GGUF file, or of all files of a split one, whose first is ``path``.

    Raises:
        ModelLoadError: not a GGUF, damaged or cut short, or a storage type that is not known.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._path = path
        file = open_gguf(path)
        self._files = map_data(file.tensors.values())
        names = family_of(config.architecture).GGUF_NAMES
        self._tensors = {
            hf_name: tensor
            for name, tensor in file.tensors.items()
            if (hf_name := hugging_face_name(name, names)) is not None
        }
        is_interleaved = GGUF_ARCHITECTURES[file.metadata["general.architecture"]].interleaved
        self._interleaved = ("q_proj", "k_proj") if is_interleaved else ()
        self._head_dim = config.head_dim

    def names(self) -> set[str]:
        return set(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        tensor = self._tensor(name)
        if len(tensor.shape) == 2:
            return to_float32(self.read_stored(name, rows), f"{tensor.name} in {tensor.path}")
        self._advise(tensor, mmap.MADV_WILLNEED)
        values = self._in_order(name, read_values(stored_rows(self._files, tensor), tensor), rows)
        return np.require(values, dtype=np.float32, requirements=["C", "A"])

    def format(self, name: str) -> str:
        return format_of(self._tensor(name))

    def num_bytes(self, name: str) -> int:
        return num_bytes(self._tensor(name))

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        tensor = self._tensor(name)
        self._advise(tensor, mmap.MADV_WILLNEED, rows)
        stored = stored_rows(self._files, tensor)
        return StoredRows(stored.format, self._in_order(name, stored.data, rows))

    def release(self, name: str) -> None:
        self._advise(self._tensor(name), mmap.MADV_DONTNEED)

    def _advise(self, tensor: GGUFTensor, advice: int, rows: slice | None = None) -> None:
        offset, size = tensor.offset, num_bytes(tensor)
        if rows is not None:
            row_bytes = size // max(tensor.shape[0], 1)
            offset, size = offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
        advise(self._files[tensor.path], advice, offset, size)

    def _in_order(self, name: str, values: npt.NDArray[T], rows: slice | None) -> npt.NDArray[T]:
        """Rows of a tensor in Hugging Face's order."""
        rows = rows or slice(0, len(values))
        if name.split(".")[-2] not in self._interleaved:
            return values[rows]
        first, last = rows.start // self._head_dim, -(-rows.stop // self._head_dim)
        heads = values[first * self._head_dim : last * self._head_dim]
        start = rows.start - first * self._head_dim
        return _uninterleave(heads, last - first)[start : start + rows.stop - rows.start]

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"The weights in {self._path} lack the tensor {name}.")
        return self._tensors[name]


def map_data(tensors: Iterable[GGUFTensor]) -> dict[Path, mmap.mmap]:
    """Maps the files of some tensors, and checks that each lies inside and is of a known type.

    Raises:
        ModelLoadError: one does not or is not, or a file cannot be read.
    """
    files: dict[Path, mmap.mmap] = {}
    for tensor in tensors:
        path = tensor.path
        try:
            if path not in files:
                with open(path, "rb") as file:
                    files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
        size = len(files[path])
        if tensor.offset + num_bytes(tensor) > size:
            raise ModelLoadError(
                f"{path} is cut short: it ends after {size} bytes, before the tensor {tensor.name} is "
                "complete. Fetch the file again."
            )
    return files


def stored_rows(files: Mapping[Path, mmap.mmap], tensor: GGUFTensor) -> StoredRows:
    """A tensor of mapped files as stored, its bytes uint8 [*rows, bytes of a row]: a view."""
    data = np.frombuffer(files[tensor.path], np.uint8, count=num_bytes(tensor), offset=tensor.offset)
    return StoredRows(format_of(tensor), data.reshape(*tensor.shape[:-1], -1) if tensor.shape else data)


def format_of(tensor: GGUFTensor) -> str:
    """How a tensor is stored: ``"float32"``, ``"q4_1"``, ..."""
    from gguf.constants import GGMLQuantizationType

    stored_as = GGMLQuantizationType(tensor.type_id).name.lower()
    return _FLOAT_NAMES.get(stored_as, stored_as)


def read_values(rows: StoredRows, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """A tensor's values from its stored rows; a view of the file if that holds them as float32.

    Raises:
        ModelLoadError: the type cannot be dequantised.
    """
    flat = StoredRows(rows.format, rows.data.reshape(-1, rows.data.shape[-1]))
    return to_float32(flat, f"{tensor.name} in {tensor.path}").reshape(tensor.shape)


def num_bytes(tensor: GGUFTensor) -> int:
    """Bytes that a tensor takes in its file.

    Raises:
        ModelLoadError: a type that is not known, or rows that it cannot have.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{tensor.path}: the tensor {tensor.name} has GGML type number {tensor.type_id}, which is not "
            "supported."
        ) from error
    if tensor.shape and tensor.shape[-1] % block_size:
        raise ModelLoadError(
            f"{tensor.path}: the tensor {tensor.name} has rows of {tensor.shape[-1]} elements, not a "
            f"multiple of its block of {block_size}."
        )
    return tensor.num_elements // block_size * block_bytes


def _uninterleave(values: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    """Undoes ``permute`` of llama.cpp's converter: within each head, even rows first, then odd ones."""
    head_dim = values.shape[0] // num_heads
    by_pair = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)
