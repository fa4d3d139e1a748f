from __future__ import annotations

import numpy as np
import pytest
from native_reference import address, padded_rows, run, stride

from streamllm import _native

INSTRUCTION_SETS = _native.instruction_sets()
PARTS = (40, 16, 17)
ROWS = sum(PARTS)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


class Adapters:
    """Random adapters in the slots of one matrix; some leave parts out, and each has ranks of its own.

    Attributes:
        products: by slot the matrix ``b @ a`` of the whole matrix, float64, with the values that are stored.
    """

    def __init__(self, k: int, *, max_loras: int = 3, max_rank: int = 40, format: str = "float32"):
        rng = np.random.default_rng(k)
        self.k, self.max_loras = k, max_loras
        self.slots = _native.LoraSlots(list(PARTS), k, max_loras, max_rank)
        self.products = np.zeros((max_loras, ROWS, k))
        for slot in range(max_loras):
            first_row = 0
            for part, rows in enumerate(PARTS):
                if (slot, part) != (1, 1):
                    rank = int(rng.integers(1, max_rank + 1))
                    a, b = (
                        rng.standard_normal(shape).astype(np.float32) for shape in ((rank, k), (rows, rank))
                    )
                    update = _native.LoraUpdate(address(a), address(b), rows, rank, k, format)
                    self.slots.set(slot, part, update)
                    a, b = (rounded(each, format).astype(np.float64) for each in (a, b))
                    self.products[slot, first_row : first_row + rows] = b @ a
                first_row += rows

    def add(self, out: np.ndarray, x: np.ndarray, row_slots: np.ndarray, *, threads: int = 2) -> None:
        rows = _native.LoraRows(self.max_loras, threads)
        rows.assign(address(row_slots), len(row_slots))
        run(
            lambda plan: plan.lora_add(
                address(x), stride(x), False, self.slots, rows, address(out), stride(out)
            ),
            tokens=len(x),
            threads=threads,
        )


def rounded(values: np.ndarray, format: str) -> np.ndarray:
    """The nearest values that a format has, ties to even."""
    if format == "float32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def random_rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    rows = padded_rows(count, width)
    rows[:] = np.random.default_rng(seed).standard_normal((count, width))
    return rows


def random_slots(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 3, count).astype(np.int32)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 7, 64, 129])
def test_sums_match_float64(instruction_set, k, format):
    adapters = Adapters(k, format=format)
    for count in [*range(1, 12), 40, 150]:
        x, out = random_rows(count, k), random_rows(count, ROWS, seed=1)
        slots = random_slots(count)
        expected, before = out.astype(np.float64), out.copy()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[row] += adapters.products[slot] @ x[row].astype(np.float64)
        adapters.add(out, x, slots)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.sqrt(k * 40))
        np.testing.assert_array_equal(out[slots < 0], before[slots < 0])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_row_is_the_same_in_every_batch(instruction_set, threads):
    rng = np.random.default_rng(2)
    adapters = Adapters(190, format="bfloat16")
    x, base, slots = random_rows(70, 190), random_rows(70, ROWS, seed=1), random_slots(70)
    alone = base.copy()
    for row in range(70):
        adapters.add(alone[row : row + 1], x[row : row + 1], slots[row : row + 1], threads=1)
    for _ in range(12):
        rows = rng.permutation(70)[: rng.integers(1, 71)]
        batch, out = padded_rows(len(rows), 190, pad=1), padded_rows(len(rows), ROWS, pad=5)
        batch[:], out[:] = x[rows], base[rows]
        adapters.add(out, batch, slots[rows], threads=threads)
        np.testing.assert_array_equal(out, alone[rows])


def test_instruction_sets_with_fused_multiply_adds_agree_to_the_bit():
    adapters = Adapters(130)
    x, base, slots = random_rows(20, 130), random_rows(20, ROWS, seed=1), random_slots(20)
    before, results = _native.instruction_set(), []
    for name in (name for name in INSTRUCTION_SETS if name != "portable"):
        _native.set_instruction_set(name)
        results.append(base.copy())
        adapters.add(results[-1], x, slots)
    _native.set_instruction_set(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_slot_that_was_emptied_adds_nothing():
    adapters = Adapters(64)
    adapters.slots.clear(1)
    x, out = random_rows(6, 64), random_rows(6, ROWS, seed=1)
    before = out.copy()
    adapters.add(out, x, np.array([1, 0, 1, -1, 2, 1], np.int32))
    np.testing.assert_array_equal(out[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert (out[[1, 4]] != before[[1, 4]]).all()


def test_what_does_not_fit_is_refused():
    slots, rows = _native.LoraSlots([8, 8], 32, 2, 4), _native.LoraRows(2, 1)
    a, b = np.ones((5, 32), np.float32), np.ones((8, 5), np.float32)

    def update(rank: int = 4, k: int = 32, count: int = 8) -> _native.LoraUpdate:
        return _native.LoraUpdate(address(a), address(b), count, rank, k, "float32")

    for wrong in ((2, 0, update()), (0, 2, update()), (-1, 0, update()), (0, 0, update(rank=5)),
                  (0, 0, update(k=31)), (0, 1, update(count=7))):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be between|does not fit"):
            slots.set(*wrong)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        _native.LoraUpdate(address(a), address(b), 8, 4, 32, "q4_0")
    for unknown in ([0, 2], [-2]):
        row_slots = np.array(unknown, np.int32)
        with pytest.raises(ValueError, match="slot must be -1 or below 2"):
            rows.assign(address(row_slots), len(row_slots))
    x, out = random_rows(4, 32), random_rows(4, 16)
    row_slots = np.zeros(3, np.int32)
    rows.assign(address(row_slots), 3)
    with pytest.raises(ValueError, match="for 3 tokens, not 4"):
        run(
            lambda plan: plan.lora_add(address(x), stride(x), False, slots, rows, address(out), stride(out)),
            tokens=4,
        )
