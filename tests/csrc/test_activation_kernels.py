from __future__ import annotations

import math

import numpy as np
import pytest
from native_reference import address, padded_rows, run, stride

from streamllm import _native

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
DIMS = [1, 8, 15, 16, 17, 100]


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def reference(activation: str, x: np.ndarray) -> np.ndarray:
    """Of float32 values, in float64."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        match activation:
            case "silu":
                return x / (1 + np.exp(-x))
            case "gelu":
                return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2
            case "gelu_tanh":
                return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0)


def activate(x: np.ndarray, activation: str, threads: int = 2) -> np.ndarray:
    out = padded_rows(*x.shape)
    run(
        lambda plan: plan.activate(address(x), stride(x), x.shape[1], activation, address(out), stride(out)),
        tokens=len(x),
        threads=threads,
    )
    return out


def gate_and_mul(x: np.ndarray, activation: str, limit: float = 0.0, threads: int = 2) -> np.ndarray:
    out = padded_rows(len(x), x.shape[1] // 2)
    run(
        lambda plan: plan.gate_and_mul(
            address(x), stride(x), out.shape[1], activation, limit, address(out), stride(out)
        ),
        tokens=len(x),
        threads=threads,
    )
    return out


def random_rows(rows: int, columns: int) -> np.ndarray:
    """Rows that lie apart, NaN in between; the first ones far out."""
    x = padded_rows(rows, columns)
    x[:] = np.random.default_rng(columns).standard_normal((rows, columns)) * 5
    x[0], x[1, 0] = 100.0, -1000.0
    return x


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(instruction_set, activation):
    for dim in DIMS:
        x = random_rows(11, dim)
        np.testing.assert_allclose(activate(x, activation), reference(activation, x), rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_values_and_tails_are_precise(instruction_set, activation):
    """All of the range in which a result is neither 0 nor x; of the tail below -3 what counts in a sum."""
    x = np.concatenate([np.linspace(-13, 13, 39901), np.geomspace(1e-30, 1, 99)])
    x = x.astype(np.float32).reshape(-1, 100)
    got, expected = activate(x, activation), reference(activation, x)
    near = x > -3
    np.testing.assert_allclose(got[near], expected[near], rtol=1e-6, atol=1e-36)
    np.testing.assert_allclose(got[~near], expected[~near], rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_mul(instruction_set, activation):
    for dim in DIMS:
        x = random_rows(11, 2 * dim)
        expected = reference(activation, x[:, :dim]) * x[:, dim:].astype(np.float64)
        np.testing.assert_allclose(gate_and_mul(x, activation), expected, rtol=1e-6, atol=4e-6)


def test_silu_is_precise_whatever_its_size(instruction_set):
    x = random_rows(11, 200)
    expected = reference("silu", x[:, :100]) * x[:, 100:].astype(np.float64)
    np.testing.assert_allclose(gate_and_mul(x, "silu"), expected, rtol=1e-6, atol=1e-30)


def test_clamped_gate(instruction_set):
    """gpt-oss's join: its limit holds for the gate from above, for the other half from both sides."""
    for dim in DIMS:
        x = random_rows(9, 2 * dim)
        gate = np.minimum(x[:, :dim].astype(np.float64), 7)
        up = np.clip(x[:, dim:].astype(np.float64), -7, 7)
        with np.errstate(over="ignore"):
            expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        for activation in ("silu", "relu"):
            got = gate_and_mul(x, activation, limit=7.0)
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


def test_nan_stays_where_it_is(instruction_set):
    for activation in ACTIVATIONS:
        x = np.ones((1, 40), np.float32)
        x[0, [3, 17, 36]] = np.nan
        assert np.flatnonzero(np.isnan(activate(x, activation)[0])).tolist() == [3, 17, 36]
        for limit in (0.0, 7.0):
            joined = gate_and_mul(x, activation, limit)[0]
            assert np.flatnonzero(np.isnan(joined)).tolist() == [3, 16, 17]


def test_results_depend_on_nothing_but_the_element(instruction_set):
    """The same bits in a tail as in a whole vector, in any batch, on any number of threads."""
    x = random_rows(70, 116)
    for activation in ACTIVATIONS:
        whole, gated = activate(x, activation, threads=4), gate_and_mul(x, activation, threads=4)
        for first, last in ((0, 1), (3, 12), (100, 116)):
            part = np.ascontiguousarray(x[7:9, first:last])
            np.testing.assert_array_equal(activate(part, activation, threads=1), whole[7:9, first:last])
        for first in (1, 50):
            part = np.ascontiguousarray(x[30:32, [*range(first, 58), *range(58 + first, 116)]])
            np.testing.assert_array_equal(gate_and_mul(part, activation, threads=1), gated[30:32, first:])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda plan, x: plan.activate(x, 8, 8, "tanh", x, 8), "activation must be silu, gelu.* not 'tanh'"),
        (lambda plan, x: plan.gate_and_mul(x, 16, 8, "swish", 0.0, x, 8), "not 'swish'"),
        (lambda plan, x: plan.gate_and_mul(x, 15, 8, "silu", 0.0, x, 8), "x_stride must be at least 16"),
        (lambda plan, x: plan.gate_and_mul(x, 16, 8, "silu", -1.0, x, 8), "limit must not be negative"),
        (lambda plan, x: plan.activate(x, 8, 8, "silu", 0, 8), "out must be an address"),
    ],
)
def test_bad_arguments_are_named(record, message):
    memory = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=message):
        record(_native.Plan(_native.ThreadPool(1)), address(memory))
