"""Mixture-of-experts layers against float64, for every format of weights and instruction set.

The reference rounds activations where products with quantised weights are documented to. A joined value that
lies within rounding of the middle between two steps may go to either: tolerances leave room for a few.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from native_reference import address, pack_parts, padded_rows, run, stride
from quantized_reference import TYPES, dequantise, quantise, round_activations

from streamllm import _native

INSTRUCTION_SETS = _native.instruction_sets()
FORMATS = ["float32", "float16", *TYPES]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


def stored(name: str, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight's rows as a file holds them, and their values in float64."""
    if name in TYPES:
        rows = quantise(name, weight)
        return rows, dequantise(name, rows).astype(np.float64)
    rows = weight.astype(name)
    return rows, rows.astype(np.float64)


@dataclass
class Layer:
    """Random experts; every part of ``gate_up_formats`` and ``down_formats`` holds an equal share of rows."""

    num_experts: int
    top_k: int
    hidden: int = 96
    width: int = 160
    gate_up_formats: tuple[str, ...] = ("float32", "float32")
    down_formats: tuple[str, ...] = ("float32",)
    normalize: bool = True
    biases: bool = False
    activation: str = "silu"
    limit: float = 0.0
    gate_up: list[_native.PackedMatrix] = field(default_factory=list)
    down: list[_native.PackedMatrix] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.num_experts * 10 + self.top_k)
        shape = (self.num_experts, 2 * self.width, self.hidden)
        self.gate_up_values = self._pack(self.gate_up, self.gate_up_formats, rng.standard_normal(shape) / 8)
        shape = (self.num_experts, self.hidden, self.width)
        self.down_values = self._pack(self.down, self.down_formats, rng.standard_normal(shape) / 8)
        self.gate_up_bias = self.down_bias = None
        if self.biases:
            self.gate_up_bias = rng.standard_normal((self.num_experts, 2 * self.width)).astype(np.float32)
            self.down_bias = rng.standard_normal((self.num_experts, self.hidden)).astype(np.float32)

    @staticmethod
    def _pack(
        matrices: list[_native.PackedMatrix], formats: tuple[str, ...], weights: np.ndarray
    ) -> np.ndarray:
        """[num_experts, n, k]: the values that products with the packed matrices see."""
        values = []
        for weight in weights.astype(np.float32):
            parts = [
                stored(name, rows) for name, rows in zip(formats, np.split(weight, len(formats)), strict=True)
            ]
            named = zip(formats, parts, strict=True)
            matrices.append(pack_parts(weight.shape[1], [(name, rows) for name, (rows, _) in named]))
            values.append(np.concatenate([value for _, value in parts]))
        return np.stack(values)

    def run(self, x: np.ndarray, logits: np.ndarray, *, threads: int = 2) -> np.ndarray:
        out, rows = padded_rows(len(x), self.hidden), len(x) * self.top_k
        quantized = all(matrix.is_quantized for matrix in self.down)
        active = padded_rows(rows, self.width)
        if quantized:
            active = np.full(_native.quantized_bytes(rows, self.width), 0xAA, np.uint8)
        run(
            lambda plan: plan.experts(
                address(x), stride(x), False, address(logits), stride(logits), self.gate_up,
                address(self.gate_up_bias), self.down, address(self.down_bias), self.top_k, self.normalize,
                self.activation, self.limit, address(active), self.width + 3, quantized, address(out),
                stride(out),
            ),
            tokens=len(x),
            threads=threads,
        )  # fmt: skip
        return out

    def reference(self, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """float64"""
        out = np.zeros((len(x), self.hidden))
        for token, row in enumerate(logits.astype(np.float64)):
            if not np.isfinite(row.max()):
                out[token] = np.nan
                continue
            chosen = np.sort(np.argsort(-row, kind="stable")[: self.top_k])
            weights = np.exp(row - row.max())
            weights /= weights[chosen].sum() if self.normalize else weights.sum()
            for expert in chosen:
                out[token] += weights[expert] * self._expert(x[token : token + 1], expert)[0]
        return out

    def _expert(self, x: np.ndarray, expert: int) -> np.ndarray:
        pairs = _product(x, self.gate_up_values[expert], self.gate_up_formats)
        if self.gate_up_bias is not None:
            pairs = pairs + self.gate_up_bias[expert]
        gate, up = np.split(pairs, 2, axis=1)
        if self.limit:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            joined = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        elif self.activation == "relu":
            joined = np.maximum(gate, 0) * up
        else:
            joined = gate / (1 + np.exp(-gate)) * up
        out = _product(joined, self.down_values[expert], self.down_formats)
        return out if self.down_bias is None else out + self.down_bias[expert]


def _product(x: np.ndarray, weight: np.ndarray, formats: tuple[str, ...]) -> np.ndarray:
    """float64; a part's columns from ``x`` as its format takes it."""
    parts = np.split(weight, len(formats))
    rounded = round_activations(x.astype(np.float32)) if set(formats) & set(TYPES) else x
    return np.concatenate(
        [
            (rounded if name in TYPES else x).astype(np.float64) @ part.T
            for name, part in zip(formats, parts, strict=True)
        ],
        axis=1,
    )


def inputs(layer: Layer, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, logits = padded_rows(rows, layer.hidden), padded_rows(rows, layer.num_experts, pad=5)
    x[:] = rng.standard_normal((rows, layer.hidden))
    logits[:] = 2 * rng.standard_normal((rows, layer.num_experts))
    return x, logits


def assert_close(actual: np.ndarray, expected: np.ndarray, formats: tuple[str, ...]) -> None:
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    size = np.nanmax(np.abs(expected), initial=1e-3)
    error = np.nan_to_num(np.abs(actual - expected)) / size
    if set(formats) & set(TYPES):
        assert (error < 5e-3).all() and (error < 2e-6).sum() >= 0.8 * error.size
    else:
        assert (error < 2e-6).all()


@pytest.mark.parametrize("name", FORMATS)
def test_layer_matches_float64(instruction_set, name):
    formats = {"gate_up_formats": (name, name), "down_formats": (name,)}
    for layer in [
        Layer(4, 2, **formats),
        Layer(4, 1, normalize=False, biases=True, **formats),
        Layer(128, 8, hidden=64, width=32, **formats),
        Layer(5, 4, biases=True, limit=1.5, **formats),
        Layer(3, 3, activation="relu", normalize=False, hidden=32, width=96, **formats),
    ]:
        for rows in (0, 1, 33):
            x, logits = inputs(layer, rows)
            assert_close(layer.run(x, logits), layer.reference(x, logits), layer.down_formats)


@pytest.mark.parametrize("name", ["float32", "q4_1"])
def test_all_tokens_may_want_the_same_experts(instruction_set, name):
    """More rows than a block of one expert holds; the others have none."""
    layer = Layer(6, 2, hidden=32, width=512, gate_up_formats=(name, name), down_formats=(name,))
    x, logits = inputs(layer, 600)
    logits[:, [1, 4]] += 100
    assert_close(layer.run(x, logits), layer.reference(x, logits), layer.down_formats)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_lower_number_among_equals(normalize):
    layer = Layer(16, 3, hidden=32, width=32, normalize=normalize)
    x, logits = inputs(layer, 40)
    logits[:] = np.rint(logits)
    logits[0], logits[1, 2:] = 0, -np.inf
    assert_close(layer.run(x, logits), layer.reference(x, logits), layer.down_formats)


def test_experts_are_added_in_order_of_their_numbers(instruction_set):
    """Four experts with a weight of a quarter each: only the order of the sums is left to choose."""
    layer, chosen = Layer(8, 4, biases=True), [6, 1, 4, 3]
    x, logits = inputs(layer, 9)
    logits[:] = -100
    logits[:, chosen] = 0
    actual = layer.run(x, logits)
    layer.top_k, alone = 1, []
    for expert in sorted(chosen):
        logits[:] = -100
        logits[:, expert] = 0
        alone.append(np.float32(0.25) * layer.run(x, logits))
    np.testing.assert_array_equal(actual, alone[0] + alone[1] + alone[2] + alone[3])
    assert (actual != alone[3] + alone[2] + alone[1] + alone[0]).any()


@pytest.mark.parametrize("name", ["float32", "q8_0"])
def test_what_is_not_finite_stays_in_its_row(instruction_set, name):
    layer = Layer(8, 3, gate_up_formats=(name, name), down_formats=(name,))
    x, logits = inputs(layer, 12)
    clean = layer.run(x, logits)
    x[2, 5] = np.nan
    logits[4, 7], logits[6, 0], logits[8], logits[9] = np.nan, np.inf, -np.inf, np.nan
    actual, bad = layer.run(x, logits), [2, 4, 6, 8, 9]
    assert np.isnan(actual[bad]).all()
    np.testing.assert_array_equal(np.delete(actual, bad, axis=0), np.delete(clean, bad, axis=0))


@pytest.mark.parametrize("name", ["float32", "float16", "q4_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_row_is_the_same_in_every_batch(instruction_set, name, threads):
    """Alone, with others, and with so many that an expert's rows are cut into blocks."""
    layer = Layer(9, 3, gate_up_formats=(name, name), down_formats=(name,), biases=True)
    x, logits = inputs(layer, 160)
    alone = np.concatenate([layer.run(x[i : i + 1], logits[i : i + 1], threads=1) for i in range(40)])
    rng = np.random.default_rng(1)
    np.testing.assert_array_equal(layer.run(x, logits, threads=threads)[:40], alone)
    for _ in range(3):
        rows = rng.permutation(40)[: rng.integers(1, 41)]
        actual = layer.run(x[rows], np.ascontiguousarray(logits[rows]), threads=threads)
        np.testing.assert_array_equal(actual, alone[rows])


def test_columns_and_tokens_may_be_cut_for_many_threads():
    """Few columns and many threads: tiles of the down products then take some of the tokens."""
    layer = Layer(7, 2, hidden=32, width=64)
    x, logits = inputs(layer, 700)
    np.testing.assert_array_equal(layer.run(x, logits, threads=8), layer.run(x, logits, threads=1))


@pytest.mark.parametrize("name", FORMATS)
def test_all_instruction_sets_that_fuse_multiply_and_add_give_the_same_bits(name):
    layer = Layer(6, 2, gate_up_formats=(name, name), down_formats=(name,))
    x, logits = inputs(layer, 29)
    before, results = _native.instruction_set(), []
    for instruction_set in INSTRUCTION_SETS:
        if instruction_set != "portable":
            _native.set_instruction_set(instruction_set)
            results.append(layer.run(x, logits))
    _native.set_instruction_set(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("gate_up", "down", "width"),
    [
        (("q4_0", "q8_0"), ("q4_1", "q8_0"), 64),
        (("q4_0", "float32"), ("float16", "q8_0"), 64),
        (("float32",), ("float32",), 64),  # gate and up in one part
        (("float32",), ("float32",), 20),  # whose halves do not begin with a panel
        (("float32", "float16"), ("float32",), 44),
        (("float32",) * 4, ("float32",) * 4, 40),  # parts that end within a panel
    ],
)
def test_parts_of_several_formats_and_widths(gate_up, down, width):
    layer = Layer(5, 2, hidden=96, width=width, gate_up_formats=gate_up, down_formats=down, biases=True)
    x, logits = inputs(layer, 50)
    assert_close(layer.run(x, logits), layer.reference(x, logits), (*gate_up, *down))


def test_bad_arguments_are_named():
    layer, plan = Layer(4, 2, hidden=32, width=32), _native.Plan(_native.ThreadPool(1))
    x, logits = inputs(layer, 2)
    active, quantised = padded_rows(4, 32), Layer(4, 2, 32, 32, ("q4_0",), ("q4_0",))

    def record(gate_up=layer.gate_up, down=layer.down, top_k=2, x_quantized=False, quantized=False) -> None:
        plan.experts(
            address(x), stride(x), x_quantized, address(logits), stride(logits), gate_up, 0, down, 0, top_k,
            True, "silu", 0.0, address(active), stride(active), quantized, address(x), stride(x),
        )  # fmt: skip

    with pytest.raises(ValueError, match="number of experts must be at least 1, not 0"):
        record(gate_up=[])
    with pytest.raises(ValueError, match="number of experts must be at least 5, not 4"):
        record(top_k=5)
    with pytest.raises(ValueError, match="top_k must be at least 1, not 0"):
        record(top_k=0)
    with pytest.raises(ValueError, match="down must have a matrix for each of 4 experts, not 3"):
        record(down=layer.down[:3])
    with pytest.raises(ValueError, match=r"down must be \[32, 32\] for every expert, not \[64, 32\]"):
        record(down=layer.gate_up)
    with pytest.raises(ValueError, match="quantised weights only"):
        record(x_quantized=True)
    with pytest.raises(ValueError, match="quantised weights only"):
        record(gate_up=quantised.gate_up, quantized=True)
    assert plan.num_ops == 0
