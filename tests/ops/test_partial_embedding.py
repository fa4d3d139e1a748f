"""Embeddings with the rows of some tokens, by all backends: what a rank has of a vocabulary."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from helpers.token_inputs import MAX_ROWS, token_inputs

from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.gpu.gpu_ops import GpuOps
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.stored_rows import StoredRows
from streamllm.ops.torch_ops import TorchOps

VOCABULARY, WIDTH = 50, 32
TABLE = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
STORED = gguf.quants.quantize(TABLE, gguf.GGMLQuantizationType.Q8_0)
DEQUANTISED = gguf.quants.dequantize(STORED, gguf.GGMLQuantizationType.Q8_0)
IDS = [0, 16, 17, 29, 30, 49, 17, 3]


def by_plan(parts, ids, first_row: int | None) -> np.ndarray:
    ops = CpuOps(threads=2, max_tokens=MAX_ROWS, max_outputs=1)
    rows = sum(part.shape[0] for part in parts)
    out = ops.embedding(token_inputs(ids), ops.matrix(rows, WIDTH, parts), first_row)
    plan = ops.compile(keep=[out])
    plan.native.run(len(ids), 1, 0)
    return plan.read(out, len(ids)).copy()


def by_torch(parts, ids, first_row: int | None) -> np.ndarray:
    ops = TorchOps()
    rows = sum(part.shape[0] for part in parts)
    return ops.embedding(token_inputs(ids), ops.matrix(rows, WIDTH, parts), first_row).numpy()


def on_device(parts, ids, first_row: int | None) -> np.ndarray:
    ops = GpuOps(ReferenceKernels(), torch.device("cpu"), torch.float32)
    rows = sum(part.shape[0] for part in parts)
    batch = SimpleNamespace(token_ids=torch.tensor(ids, dtype=torch.int32), num_tokens=len(ids))
    return ops.embedding(batch, ops.matrix(rows, WIDTH, parts), first_row).numpy()  # type: ignore[arg-type]


def expected_of(table: np.ndarray, first: int, end: int) -> np.ndarray:
    return np.stack([table[i] if first <= i < end else np.zeros(WIDTH, np.float32) for i in IDS])


BACKENDS = [by_plan, by_torch, on_device]


@pytest.mark.parametrize("embed", BACKENDS)
@pytest.mark.parametrize(("first", "end"), [(0, 17), (17, 30), (18, 29), (30, 50), (0, 50)])
def test_tokens_without_a_row_have_zeros(embed, first, end):
    """Of a weight in two parts; not even what is not finite comes from other tokens' rows."""
    rows = TABLE[first:end].copy()
    parts = [rows[:5], rows[5:]]
    np.testing.assert_array_equal(embed(parts, IDS, first), expected_of(TABLE, first, end))
    rows[np.setdiff1d(np.arange(end - first), np.array(IDS) - first)] = np.nan
    np.testing.assert_array_equal(embed(parts, IDS, first), expected_of(TABLE, first, end))


@pytest.mark.parametrize("embed", [by_plan, on_device])
@pytest.mark.parametrize(("first", "end"), [(0, 17), (17, 30), (30, 50)])
def test_rows_stay_as_they_are_stored(embed, first, end):
    parts = [StoredRows("q8_0", STORED[first:end])]
    np.testing.assert_allclose(
        embed(parts, IDS, first), expected_of(DEQUANTISED, first, end), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("embed", BACKENDS)
def test_the_ranks_sum_is_the_whole(embed):
    """Bit for bit, so that a sharded model starts from the same numbers."""
    bounds = [0, 17, 30, VOCABULARY]
    total = sum(embed([TABLE[a:b]], IDS, a) for a, b in itertools.pairwise(bounds))
    np.testing.assert_array_equal(total, embed([TABLE], IDS, None))
    np.testing.assert_array_equal(total, TABLE[IDS])
