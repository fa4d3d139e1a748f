"""Quantised tensors of real files in the kernels' panels: the values that the ``gguf`` package gives them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from native_reference import address, pack_parts, padded_rows, run, stride
from quantized_reference import FACTORS, dequantise

from streamllm import _native
from streamllm.models.gguf_checkpoint import map_data, stored_rows
from streamllm.sources.gguf_file import GGUFFile


def panels_values(matrix: _native.PackedMatrix) -> np.ndarray:
    ids = np.arange(matrix.n, dtype=np.int32)
    out = padded_rows(matrix.n, matrix.k)
    run(lambda plan: plan.embedding(address(ids), matrix, address(out), stride(out)), tokens=matrix.n)
    return out


def types_with_the_right_values(path: Path, *, rows: int, tensors: int) -> set[str]:
    """The file's quantised types, after a look at ``rows`` rows of ``tensors`` tensors of each."""
    file = GGUFFile(path, arrays=False)
    data, seen = map_data(file.tensors.values()), Counter[str]()
    for tensor in file.tensors.values():
        name = GGMLQuantizationType(tensor.type_id).name.lower()
        seen[name] += 1
        if name in FACTORS and seen[name] <= tensors:
            stored = np.array(stored_rows(data, tensor).data[:rows])
            actual = panels_values(pack_parts(tensor.shape[1], [(name, stored)]))
            expected = dequantise(name, stored)
            np.testing.assert_array_equal(
                actual.view(np.uint32), expected.view(np.uint32), err_msg=tensor.name
            )
    return seen.keys() & FACTORS.keys()


def test_tensors_of_the_default_model(default_model_path):
    assert types_with_the_right_values(default_model_path, rows=160, tensors=2) == {"q4_1", "q8_0"}


@pytest.mark.slow
def test_every_tensor_of_both_models(default_model_path, gemma_model_path):
    types_with_the_right_values(default_model_path, rows=1 << 20, tensors=1000)
    types = types_with_the_right_values(gemma_model_path, rows=1 << 20, tensors=1000)
    assert types == {"q4_k", "q5_0", "q6_k", "q8_0"}
