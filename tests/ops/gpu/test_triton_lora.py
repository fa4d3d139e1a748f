"""What adapters add to products, by Triton's kernels (in the interpreter where there is no GPU) and by the
reference, against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.adapters import DeviceAdapters, padded_rank  # noqa: E402
from streamllm.ops.gpu.kernels import AdapterStack  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels  # noqa: E402
from streamllm.ops.lora import LoraAdapter, LoraLimits, LoraUpdate  # noqa: E402

pytestmark = pytest.mark.slow

F32, F16 = torch.float32, torch.float16
TOLERANCE = {F32: 1e-5, F16: 2e-3}
KERNELS = pytest.mark.parametrize("kernels", [TritonKernels(), ReferenceKernels()], ids=lambda one: one.name)


class _Base:
    def __init__(self, rows: int, columns: int):
        self.shape = rows, columns


class Case:
    """A matrix of parts and adapters in some slots, each of a rank of its own.

    Args:
        ranks: of the adapters, by slot; 0: nothing was ever loaded there.
    """

    def __init__(
        self,
        parts: Sequence[int] = (64, 32, 32),
        columns: int = 96,
        ranks: Sequence[int] = (8, 0, 16, 3),
        max_rank: int = 16,
        dtype: torch.dtype = F32,
    ):
        self.dtype, self.parts, self.columns = dtype, parts, columns
        self.adapters = DeviceAdapters(LoraLimits(len(ranks), max_rank), torch.device(DEVICE), dtype)
        self.matrix = self.adapters.add_matrix("qkv", _Base(sum(parts), columns), parts)
        self.deltas = np.zeros((len(ranks), sum(parts), columns))
        for slot, rank in enumerate(ranks):
            if rank:
                self.load(slot, rank)

    @property
    def stack(self) -> AdapterStack:
        return self.matrix.stack

    def load(self, slot: int, rank: int, *, seed: int = 0, without: int | None = None) -> None:
        """Another adapter in a slot, which leaves the part ``without`` as it is."""
        random = np.random.default_rng([slot, rank, seed])
        updates, first = [], 0
        self.deltas[slot] = 0
        for part, rows in enumerate(self.parts):
            a, b = (
                torch.from_numpy(random.standard_normal(shape) / math.sqrt(shape[1])).to(self.dtype)
                for shape in ((rank, self.columns), (rows, rank))
            )
            if part != without:
                self.deltas[slot, first : first + rows] = b.double().numpy() @ a.double().numpy()
                updates.append(LoraUpdate(first, a.float().numpy(), b.float().numpy()))
            first += rows
        self.adapters.load(slot, LoraAdapter("any", b"", rank, {"qkv": tuple(updates)}))
        self.adapters.send_loads()

    def rows(self, seed: int, *shape: int) -> torch.Tensor:
        """In wider rows of NaN."""
        values = np.random.default_rng(seed).standard_normal(shape)
        wide = torch.full((shape[0], shape[1] + 8), math.nan, dtype=self.dtype, device=DEVICE)
        wide[:, : shape[1]] = torch.from_numpy(values).to(self.dtype)
        return wide[:, : shape[1]]

    def run(self, kernels, slots: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
        """What rows with these slots come to, and should."""
        out, x = self.rows(seed, len(slots), sum(self.parts)), self.rows(seed + 1, len(slots), self.columns)
        added = np.stack(
            [
                self.deltas[slot] @ row if slot >= 0 else np.zeros(sum(self.parts))
                for slot, row in zip(slots, x.double().cpu().numpy(), strict=True)
            ]
        )
        expected = out.double().cpu().numpy() + added
        kernels.lora_add(out, x, torch.tensor(slots, dtype=torch.int32, device=DEVICE), self.stack)
        return out, expected

    def check(self, kernels, slots: Sequence[int]) -> None:
        out, expected = self.run(kernels, slots)
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


MIXED = [0, -1, 2, 2, 3, -1, 0, 3]


@KERNELS
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(
    "slots",
    [[2], [-1], MIXED, [2] * 40, [-1] * 20 + [3, 1, 0], list(np.random.default_rng(0).integers(-1, 4, 70))],
    ids=["one", "none", "mixed", "a prompt", "late", "many"],
)
def test_rows_of_any_slots(kernels, dtype, slots):
    Case(dtype=dtype).check(kernels, [int(slot) for slot in slots])


@KERNELS
@pytest.mark.parametrize(
    ("parts", "columns", "max_rank", "ranks"),
    [
        ([130], 40, 16, [16, 1]),
        ([200, 72], 700, 8, [8, 5]),
        ([16, 8, 8], 4100, 16, [16, 16]),
        ([33], 64, 100, [100, 20]),
        ([300], 130, 64, [64, 33]),
    ],
    ids=str,
)
def test_shapes_and_ranks(kernels, parts, columns, max_rank, ranks):
    Case(parts, columns, ranks, max_rank).check(kernels, [0, 1, -1, 1, 1, 0])


@KERNELS
def test_rows_without_an_adapter_keep_their_bits(kernels):
    case = Case()
    out, _ = case.run(kernels, MIXED)
    untouched = [row for row, slot in enumerate(MIXED) if slot < 0]
    assert torch.equal(out[untouched], case.rows(0, len(MIXED), 128)[untouched])


@KERNELS
def test_a_slot_is_loaded_anew_and_emptied(kernels):
    case = Case()
    case.load(2, 5, seed=1)  # of a smaller rank than before
    case.check(kernels, MIXED)
    case.load(2, 16, seed=2, without=1)
    case.check(kernels, MIXED)
    case.adapters.load(2, None)
    case.adapters.send_loads()
    case.deltas[2] = 0
    case.check(kernels, MIXED)


def test_what_an_empty_slot_holds_reaches_no_row():
    case = Case()
    case.stack.a[1], case.stack.b[1] = math.nan, math.nan
    case.check(TritonKernels(), [1, 0, 1, 2])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_bits_of_a_row_do_not_depend_on_the_batch(dtype, ordered_products):
    case = Case((40, 24), 600, dtype=dtype)
    slots = [int(slot) for slot in np.random.default_rng(1).integers(-1, 4, 37)]
    out, x = case.rows(0, 37, 64), case.rows(1, 37, 600)
    together = out.clone()
    table = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    TritonKernels().lora_add(together, x, table, case.stack)
    for start, end in ((0, 1), (1, 18), (18, 37), (36, 37)):
        part = out[start:end].clone()
        TritonKernels().lora_add(part, x[start:end], table[start:end].clone(), case.stack)
        assert torch.equal(part, together[start:end])


@pytest.mark.parametrize(("rank", "padded"), [(1, 16), (16, 16), (17, 32), (40, 64), (64, 64), (65, 128)])
def test_ranks_fill_whole_tiles(rank, padded):
    assert padded_rank(rank) == padded
