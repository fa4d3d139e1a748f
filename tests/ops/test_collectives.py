"""Sums, gathers and messages between ranks, over the buffers of all backends and over real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gloo_processes import run_processes
from helpers.thread_collectives import ThreadCollectives, run_ranks
from helpers.token_inputs import MAX_ROWS, token_inputs

from streamllm.ops.collectives import Collectives, buffer_collectives
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.gpu.gpu_ops import GpuOps
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.torch_ops import TorchOps

IDS = [3, 1, 4, 1, 5]
WIDTHS = [5, 32, 17]
"""Of what each rank gives to a gather."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Side:
    """A rank's operations, and what it computes with them."""

    def __init__(self, kind: str, collectives: Collectives, ids: Sequence[int] = IDS):
        self.rank, self._count = collectives.rank, len(ids)
        self.ops: Any
        if kind == "plan":
            self.ops = CpuOps(threads=2, max_tokens=MAX_ROWS, max_outputs=MAX_ROWS)
        elif kind == "torch":
            self.ops = TorchOps()
        else:
            self.ops = GpuOps(ReferenceKernels(), torch.device("cpu"), torch.float32)
        self.batch = _DeviceTokens(ids) if kind == "device" else token_inputs(ids)
        self.collectives = buffer_collectives(self.ops, collectives)

    def rows(self, width: int) -> Any:
        """A buffer whose rows differ from rank to rank and from token to token."""
        return self.ops.embedding(self.batch, self.ops.matrix(8, width, [random(8, width, seed=self.rank)]))

    def values(self, buffer: Any) -> np.ndarray:
        if not isinstance(self.ops, CpuOps):
            return buffer.numpy()
        plan = self.ops.compile(keep=[buffer])
        for _ in range(2):  # as often as one likes
            plan.native.run(self._count, 1, 0)
        return plan.read(buffer, self._count).copy()


class _DeviceTokens:
    def __init__(self, ids: Sequence[int]):
        self.token_ids, self.num_tokens = torch.tensor(ids, dtype=torch.int32), len(ids)


def rows_of(rank: int, width: int) -> np.ndarray:
    return random(8, width, seed=rank)[IDS]


KINDS = ["plan", "torch", "device"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [5, 32, 256])
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce(kind, width, size):
    def compute(collectives: ThreadCollectives) -> np.ndarray:
        side = Side(kind, collectives)
        total = side.collectives.all_reduce(side.rows(width))
        return side.values(side.ops.scale(total, 2.0))

    expected = 2 * sum(rows_of(rank, width) for rank in range(size))
    for result in run_ranks(size, compute):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_columns_of_unequal_widths(kind):
    def compute(collectives: ThreadCollectives) -> np.ndarray:
        side = Side(kind, collectives)
        return side.values(side.collectives.gather_columns(side.rows(WIDTHS[side.rank]), WIDTHS))

    expected = np.concatenate([rows_of(rank, width) for rank, width in enumerate(WIDTHS)], axis=1)
    for result in run_ranks(3, compute):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [16, 256])
def test_send_and_receive(kind, width):
    """From rank 0 over 1 to 2, each doing something to it."""

    def compute(collectives: ThreadCollectives) -> np.ndarray:
        side, rank = Side(kind, collectives), collectives.rank
        x = side.rows(width) if rank == 0 else side.collectives.receive(width, rank - 1, side.batch)
        x = side.ops.scale(x, 2.0)
        if rank < 2:
            side.collectives.send(x, rank + 1)
        return side.values(x)

    for rank, result in enumerate(run_ranks(3, compute)):
        np.testing.assert_array_equal(result, rows_of(0, width) * 2 ** (rank + 1))


def test_operations_of_a_device_are_launched_like_its_others():
    """So that graphs have them: nothing happens before the launch, and a replay does it again."""

    def compute(collectives: ThreadCollectives) -> list[list[tuple[str, tuple[int, ...]]]]:
        side, launched = Side("device", collectives), []
        side.ops.launch = launched.append
        other = collectives.rank ^ 1
        x = torch.ones(3, 4)
        side.collectives.all_reduce(x)
        side.collectives.gather_columns(x, [4, 4])
        side.collectives.send(x, other)
        side.collectives.receive(4, other, side.batch)
        calls = [list(collectives.calls)]
        for _ in range(2):
            for operation in launched[:3]:
                operation()
        return [*calls, list(collectives.calls), x.tolist()]

    for before, after, x in run_ranks(2, compute):
        assert before == []
        assert after == [("all_reduce", (3, 4)), ("gather_columns", (3, 4)), ("send", (3, 4))] * 2
        assert x == [[4.0] * 4] * 3


def test_a_rank_that_fails_fails_the_others_plans():
    def compute(collectives: ThreadCollectives) -> np.ndarray:
        side = Side("plan", collectives)
        if collectives.rank == 1:
            raise LookupError("rank 1 is gone")
        return side.values(side.collectives.all_reduce(side.rows(8)))

    with pytest.raises(LookupError, match="rank 1"):
        run_ranks(2, compute)


def exchange(collectives: Collectives) -> dict[str, Any]:
    """What a rank of a group of three gets, in a process of its own."""
    rank = collectives.rank
    results: dict[str, Any] = {}
    for width in (16, 256):
        side = Side("plan", collectives)
        results[f"sum {width}"] = side.values(side.collectives.all_reduce(side.rows(width)))
    side = Side("plan", collectives)
    results["gathered"] = side.values(side.collectives.gather_columns(side.rows(WIDTHS[rank]), WIDTHS))
    side = Side("plan", collectives)
    passed = side.rows(256) if rank == 0 else side.collectives.receive(256, rank - 1, side.batch)
    passed = side.ops.scale(passed, 2.0)
    if rank < 2:
        side.collectives.send(passed, rank + 1)
    results["passed"] = side.values(passed)
    results["sent ahead"] = _sent_ahead(collectives)
    apart = torch.from_numpy(random(5, 8, seed=rank))[:, :3]
    collectives.all_reduce(apart)
    results["rows apart"] = apart.numpy()
    large = torch.from_numpy(random(301, 7, seed=rank))
    collectives.all_reduce(large)
    alone = torch.from_numpy(random(301, 7, seed=rank)[200:201].copy())
    collectives.all_reduce(alone)
    results["batch invariant"] = bool((large[200:201] == alone).all())
    half = torch.full((2, 3), 1.5 + rank, dtype=torch.bfloat16)
    collectives.all_reduce(half)
    results["bfloat16"] = half.float().numpy()
    results["after rank 2 has gone"] = _sum_without_rank_2(collectives)
    return results


def _sent_ahead(collectives: Collectives) -> list[float]:
    """What rank 1 receives only when rank 0 has long gone on: more than fits into buffers of the network."""
    if collectives.rank == 0:
        sent = torch.empty(1024, 1024)
        for number in range(5):
            collectives.send(sent.fill_(number), 1)
    collectives.all_reduce(torch.zeros(1))
    received = []
    if collectives.rank == 1:
        for _ in range(5):
            collectives.receive(into := torch.empty(1024, 1024), 0)
            received += into.unique().tolist()
    return received


def _sum_without_rank_2(collectives: Collectives) -> str:
    """The error of a plan whose run the others wait in vain for."""
    if collectives.rank == 2:
        torch.distributed.destroy_process_group()
        return ""
    side = Side("plan", collectives)
    with pytest.raises(RuntimeError) as error:
        side.values(side.collectives.all_reduce(side.rows(8)))
    return str(error.value)


@pytest.mark.slow
def test_real_processes_over_gloo():
    results = run_processes(3, exchange)
    for rank, result in enumerate(results):
        for width in (16, 256):
            expected = sum(rows_of(other, width) for other in range(3))
            np.testing.assert_array_equal(result[f"sum {width}"], expected)
        gathered = np.concatenate([rows_of(other, width) for other, width in enumerate(WIDTHS)], axis=1)
        np.testing.assert_array_equal(result["gathered"], gathered)
        np.testing.assert_array_equal(result["passed"], rows_of(0, 256) * 2 ** (rank + 1))
        assert result["sent ahead"] == ([0.0, 1.0, 2.0, 3.0, 4.0] if rank == 1 else [])
        expected = sum(random(5, 8, seed=other)[:, :3] for other in range(3))
        np.testing.assert_array_equal(result["rows apart"], expected)
        assert result["batch invariant"]
        np.testing.assert_array_equal(result["bfloat16"], np.full((2, 3), 7.5))
        assert rank == 2 or "onnection" in result["after rank 2 has gone"]


def test_without_parallelism_torch_is_not_imported():
    modules = "streamllm.ops.collectives, streamllm.ops.cpu_plan"
    script = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
