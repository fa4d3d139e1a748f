"""Weights in a GGUF file, under Hugging Face's names and in Hugging Face's layout.

Two things differ from a safetensors checkpoint. Matrices may be quantised; they are given as stored, or as
the ``gguf`` package dequantises them. And for the architecture ``llama`` the rows of the query and key
projections are interleaved, because llama.cpp rotates neighbouring dimensions where Hugging Face rotates the
two halves of a head.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.model_config import ModelConfig
from streamllm.ops.stored_rows import StoredRows
from streamllm.sources.gguf_file import GGUFFile, GGUFTensor

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


def hugging_face_name(name: str) -> str | None:
    """``"blk.0.attn_q.weight"`` becomes ``"model.layers.0.self_attn.q_proj.weight"``; others ``None``."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_MODEL_NAMES[part]}.{kind}" if part in _MODEL_NAMES else None
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None


class GGUFCheckpoint:
    """The tensors of one GGUF file.

    Raises:
        ModelLoadError: not a GGUF, damaged or cut short, or a storage type that cannot be read.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path, arrays=False)
        self._data = map_data(self._file)
        self._tensors = {
            hf_name: tensor
            for name, tensor in self._file.tensors.items()
            if (hf_name := hugging_face_name(name)) is not None
        }
        self._interleaved_heads: dict[str, int] = {}
        if self._file.metadata.get("general.architecture") == "llama":
            self._interleaved_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def names(self) -> set[str]:
        return set(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> npt.NDArray[np.float32]:
        values = self._in_order(name, read_tensor(self._data, self._file, self._tensor(name)))
        return np.require(values, dtype=np.float32, requirements=["C", "A"])

    def format(self, name: str) -> str:
        from gguf.constants import GGMLQuantizationType

        stored_as = GGMLQuantizationType(self._tensor(name).type_id).name.lower()
        return _FLOAT_NAMES.get(stored_as, stored_as)

    def num_bytes(self, name: str) -> int:
        return _num_bytes(self._file, self._tensor(name))

    def read_stored(self, name: str) -> StoredRows:
        rows = stored_bytes(self._data, self._file, self._tensor(name))
        return StoredRows(self.format(name), self._in_order(name, rows))

    def _in_order(self, name: str, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        """Hugging Face's order of a tensor's rows."""
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        return rows if num_heads is None else _uninterleave(rows, num_heads)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"The weights in {self._file.path} lack the tensor {name}.")
        return self._tensors[name]


def map_data(file: GGUFFile) -> npt.NDArray[np.uint8]:
    """Maps a file's bytes, uint8 [size], and checks that every tensor lies inside and can be read."""
    for tensor in file.tensors.values():
        if tensor.offset + _num_bytes(file, tensor) > file.size:
            raise ModelLoadError(
                f"{file.path} is cut short: it ends after {file.size} bytes, before the tensor "
                f"{tensor.name} is complete. Fetch the file again."
            )
    return np.memmap(file.path, dtype=np.uint8, mode="r")


def stored_bytes(data: npt.NDArray[np.uint8], file: GGUFFile, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
    """A tensor of a mapped file as stored, uint8 [*rows, bytes of a row]: a view."""
    stored = data[tensor.offset : tensor.offset + _num_bytes(file, tensor)]
    return stored.reshape(*tensor.shape[:-1], -1) if tensor.shape else stored


def read_tensor(data: npt.NDArray[np.uint8], file: GGUFFile, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """A tensor of a mapped file as float32, in the file's own row order."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(stored_bytes(data, file, tensor), GGMLQuantizationType(tensor.type_id))
    except NotImplementedError as error:
        raise _unsupported(file, tensor) from error
    return values.reshape(tensor.shape)


def _num_bytes(file: GGUFFile, tensor: GGUFTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError) as error:
        raise _unsupported(file, tensor) from error
    if tensor.shape and tensor.shape[-1] % block_size:
        raise ModelLoadError(
            f"{file.path}: the tensor {tensor.name} has rows of {tensor.shape[-1]} elements, not a multiple "
            f"of its block of {block_size}."
        )
    return tensor.num_elements // block_size * block_bytes


def _unsupported(file: GGUFFile, tensor: GGUFTensor) -> ModelLoadError:
    from gguf.constants import GGMLQuantizationType

    try:
        type_name = GGMLQuantizationType(tensor.type_id).name
    except ValueError:
        type_name = f"number {tensor.type_id}"
    return ModelLoadError(
        f"{file.path}: the tensor {tensor.name} has GGML type {type_name}, which is not supported."
    )


def _uninterleave(values: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    """Undoes ``permute`` of llama.cpp's converter: within each head, even rows first, then odd ones."""
    head_dim = values.shape[0] // num_heads
    by_pair = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)
