"""Parts of stored tensors: entries of stacks, rows, transposes, in every kind of storage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import to_float32
from streamllm.models.folder_checkpoint import FolderCheckpoint
from streamllm.models.stored_layout import ArrangedCheckpoint, StoredLayout
from streamllm.models.tensor_source import TensorPart
from streamllm.ops.stored_rows import StoredRows

STACK = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
PARTS = {
    "entry": (TensorPart("stack", (3, 6, 10), entry=1), STACK[1]),
    "even rows": (TensorPart("stack", (3, 6, 10), entry=2, rows=slice(0, None, 2)), STACK[2, ::2]),
    "upper half": (TensorPart("stack", (3, 6, 10), entry=0, rows=slice(3, 6)), STACK[0, 3:]),
    "transposed": (TensorPart("stack", (3, 6, 10), entry=1, transposed=True), STACK[1].T),
    "odd rows of the transposed": (
        TensorPart("stack", (3, 6, 10), entry=1, transposed=True, rows=slice(1, None, 2)),
        STACK[1].T[1::2],
    ),
    "a vector's elements": (
        TensorPart("matrix", (6, 10), entry=4, rows=slice(1, None, 2)),
        STACK[0, 4, 1::2],
    ),
    "all but two rows": (TensorPart("matrix", (6, 10), rows=slice(2, None)), STACK[0, 2:]),
    "a vector as a row": (TensorPart("matrix", (6, 10), entry=3, is_row=True), STACK[0, 3:4]),
    "all of it": (TensorPart("matrix", (6, 10)), STACK[0]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_parts_of_plain_numbers(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = {"stack": STACK.to(kind), "matrix": STACK[0].to(kind).clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = FolderCheckpoint(tmp_path, StoredLayout(), tied=False)
    checkpoint = ArrangedCheckpoint(files, {name: part for name, (part, _) in PARTS.items()}, PARTS)
    for name, (_, expected) in PARTS.items():
        values = checkpoint.read(name)
        assert values.dtype == np.float32 and values.flags.c_contiguous
        assert checkpoint.shape(name) == values.shape == expected.shape
        assert np.array_equal(values, expected.to(kind).float().numpy())
        stored = checkpoint.read_stored(name)
        assert stored.format == checkpoint.format(name) == dtype
        assert np.array_equal(to_float32(stored, name).reshape(expected.shape), values)
        assert checkpoint.num_bytes(name) == stored.data.nbytes
    assert checkpoint.names() == set(PARTS)


class OneTensor:
    """A checkpoint's only tensor, in blocks."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    def read_stored(self, name: str) -> StoredRows:
        return self._rows


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4"])
def test_parts_of_blocks(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((2, 4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    checkpoint = OneTensor(StoredRows(kind.lower(), stored))
    part = TensorPart("stack", (2, 4, 64), entry=1, rows=slice(2, None))
    assert np.array_equal(part.read(checkpoint), expected[1, 2:])
    assert np.array_equal(part.read_stored(checkpoint).data, stored[1, 2:])


def test_blocks_cannot_be_transposed() -> None:
    stored = np.zeros((64, 68), np.uint8)
    part = TensorPart("transformer.h.0.attn.c_attn.weight", (64, 64), transposed=True)
    with pytest.raises(
        ModelLoadError, match=r"c_attn\.weight has the type q8_0, which cannot be taken apart"
    ):
        part.read(OneTensor(StoredRows("q8_0", stored)))


def test_a_type_that_cannot_be_read_is_named() -> None:
    stored = StoredRows("i64", np.zeros((2, 16), np.uint8))
    with pytest.raises(ModelLoadError, match="The tensor x has the type i64, which is not supported"):
        to_float32(stored, "x")
