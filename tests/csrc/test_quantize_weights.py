"""Floats as Q8_0 and Q4_1: the former against the ``gguf`` package, the search for the latter's scales and
minima against a far finer one in float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from streamllm import _native

GROUP, LARGEST = 32, 15
BLOCK_BYTES = {"q4_1": 20, "q8_0": 34}


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def quantise(values: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """uint8 [rows, bytes of a row]."""
    rows, columns = values.shape
    values = np.ascontiguousarray(values, np.float32)
    importance = np.ones(columns, np.float32) if importance is None else importance.astype(np.float32)
    out = np.full((rows, columns // GROUP * BLOCK_BYTES["q4_1"]), 0xAA, np.uint8)
    _native.quantize_q4_1(values.ctypes.data, importance.ctypes.data, rows, columns, out.ctypes.data)
    return out


def quantise_to_bytes(values: np.ndarray) -> np.ndarray:
    """The same in Q8_0."""
    rows, columns = values.shape
    values = np.ascontiguousarray(values, np.float32)
    out = np.full((rows, columns // GROUP * BLOCK_BYTES["q8_0"]), 0xAA, np.uint8)
    _native.quantize_q8_0(values.ctypes.data, rows, columns, out.ctypes.data)
    return out


def dequantise(stored: np.ndarray, format: str = "Q4_1") -> np.ndarray:
    return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[format])


def errors(stored: np.ndarray, values: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """The weighted squared error of each group, float64 [groups]."""
    return (np.square(dequantise(stored).astype(np.float64) - values) * importance).reshape(-1, GROUP).sum(1)


def finest_errors(values: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """The least error of each group over a grid of 60 scales and 21 offsets, each with its best line."""
    groups = values.astype(np.float64).reshape(-1, GROUP)
    weights = np.broadcast_to(importance, values.shape).reshape(-1, GROUP)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    best = np.full(len(groups), np.inf)
    total = weights.sum(1)
    for stretch in np.linspace(0.4, 1.1, 60):
        d = (high - low) * stretch / LARGEST
        for shift in np.linspace(-2, 2, 21):
            m = (low + high) / 2 - d * (LARGEST / 2 + shift)
            u = np.clip(np.rint((groups - m) / d), 0, LARGEST)
            mean_u, mean_v = (weights * u).sum(1) / total, (weights * groups).sum(1) / total
            du, dv = u - mean_u[:, None], groups - mean_v[:, None]
            slope = (weights * du * dv).sum(1) / np.maximum((weights * du * du).sum(1), 1e-30)
            best = np.minimum(best, (weights * np.square(dv - slope[:, None] * du)).sum(1))
    return best


@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["alike", "weighed"])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "heavy"])
def test_error_is_close_to_that_of_a_far_finer_search(distribution, spread):
    random = np.random.default_rng(1)
    draw = {
        "normal": random.standard_normal,
        "uniform": lambda shape: random.uniform(-1, 1, shape),
        "heavy": lambda shape: random.standard_t(3, shape),
    }[distribution]
    values = (0.05 * draw((37, 96))).astype(np.float32)
    importance = np.exp(spread * random.standard_normal(96)).astype(np.float32)
    found, finest = (
        errors(quantise(values, importance), values, importance),
        finest_errors(values, importance),
    )
    assert found.sum() < 1.2 * finest.sum()
    assert (found < 3 * finest).all()
    rounded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    assert found.sum() < (0.95 if spread else 1.0) * errors(rounded, values, importance).sum()


def test_important_columns_are_kept():
    random = np.random.default_rng(2)
    values = random.standard_normal((64, 64)).astype(np.float32)
    importance = np.ones(64, np.float32)
    importance[[5, 40]] = 1000
    error = np.square(dequantise(quantise(values, importance)) - values).mean(0)
    assert error[[5, 40]].max() < error.mean() / 10


def test_all_instruction_sets_give_the_same_bytes(instruction_set):
    random = np.random.default_rng(3)
    values, importance = random.standard_normal((33, 64)), random.uniform(0, 2, 64)
    stored = quantise(values, importance)
    _native.set_instruction_set(_native.instruction_sets()[-1])
    assert (stored == quantise(values, importance)).all()


def test_a_row_does_not_depend_on_the_others():
    values = np.random.default_rng(4).standard_normal((21, 64))
    stored = quantise(values)
    for first in range(20):
        assert (quantise(values[first : first + 2]) == stored[first : first + 2]).all()


def test_what_four_bits_hold_is_kept(instruction_set):
    """Sixteen values at equal distances, and groups of one value."""
    random = np.random.default_rng(5)
    values = (random.integers(0, 16, (16, 96)) * 0.125 - 1).astype(np.float32)
    values[:, :2], values[:, 32:64], values[:, 64:] = (-1, 0.875), 0.0, 3.0
    assert np.abs(dequantise(quantise(values)) - values).max() < 1e-6


def test_extremes(instruction_set):
    values = np.random.default_rng(6).standard_normal((6, 32)).astype(np.float32)
    values[0, 3], values[1, 4], values[2, 5] = np.nan, np.inf, -np.inf
    values[3] *= 1e-12
    values[4] *= 1e9
    read = dequantise(quantise(values))
    assert np.isnan(read[:3]).all()
    assert np.abs(read[3]).max() <= 2.0**-24
    assert np.isfinite(read[4]).all()
    assert np.abs(read[5] - values[5]).max() < 0.3


def test_importance_of_nothing_is_that_of_all_alike():
    values = np.random.default_rng(7).standard_normal((16, 64))
    assert (quantise(values, np.zeros(64)) == quantise(values)).all()


def test_rows_that_are_no_whole_groups_are_refused():
    values = np.zeros((2, 48), np.float32)
    with pytest.raises(ValueError, match=r"weights \[2, 48\] have no whole groups of 32"):
        quantise(values)

    with pytest.raises(ValueError, match="no whole groups"):
        quantise_to_bytes(values)


def test_bytes_are_the_nearest(instruction_set):
    random = np.random.default_rng(8)
    values = (random.standard_normal((9, 96)) * np.exp(3 * random.standard_normal((9, 1)))).astype(np.float32)
    values[3, 32:64] = 0
    stored = quantise_to_bytes(values)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    blocks, expected_blocks = (rows.reshape(-1, BLOCK_BYTES["q8_0"]) for rows in (stored, expected))
    assert (blocks[:, :2] == expected_blocks[:, :2]).all()
    # What lies halfway between two integers goes up in one and to the even one in the other.
    apart = np.abs(blocks[:, 2:].view(np.int8).astype(int) - expected_blocks[:, 2:].view(np.int8))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01


def test_extremes_as_bytes(instruction_set):
    values = np.random.default_rng(9).standard_normal((6, 32)).astype(np.float32)
    values[0, 3], values[1, 4], values[2, 5] = np.nan, np.inf, -np.inf
    values[3] *= 1e-35
    values[4] *= 1e9
    read = dequantise(quantise_to_bytes(values), "Q8_0")
    assert np.isnan(read[:3]).all()
    assert not read[3].any()
    assert np.isfinite(read[4]).all()
    assert np.abs(read[5] - values[5]).max() < 0.02
