"""Triton's mixtures of experts against float64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.quantized_weights import FORMATS, random_rows  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops import Experts, Gate  # noqa: E402
from streamllm.ops.gpu.expert_weights import ExpertWeights  # noqa: E402
from streamllm.ops.gpu.triton_kernels import expert_routing  # noqa: E402
from streamllm.ops.gpu.triton_kernels.expert_routing import most_blocks, route, route_kernel  # noqa: E402
from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels  # noqa: E402

KERNELS = TritonKernels()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(DEVICE, dtype)


def float64(x: torch.Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


def routed64(logits: np.ndarray, top_k: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each row, ascending, and their weights: ``[rows, top_k]``."""
    order = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :top_k], axis=1)
    scored = np.take_along_axis(logits, order, 1) if normalize else logits
    exps = np.exp(scored - scored.max(1, keepdims=True))
    weights = exps / exps.sum(1, keepdims=True)
    return order, weights if normalize else np.take_along_axis(weights, order, 1)


class Layer:
    """Experts with random weights, and what a row gets of them (float64)."""

    def __init__(
        self,
        num_experts: int = 5,
        top_k: int = 2,
        hidden: int = 64,
        inner: int = 32,
        *,
        dtype: torch.dtype = torch.float32,
        row_format: str = "dense",
        normalize: bool = True,
        limit: float = 0.0,
        bias: bool = False,
    ):
        self.dtype, self.hidden, self.values = dtype, hidden, []
        matrices = []
        for seed, (n, k) in enumerate([(2 * inner, hidden), (hidden, inner)]):
            rows, values = random_rows(row_format, num_experts * n, k, dtype, DEVICE, seed)
            biases = random(seed + 7, num_experts * n) if bias else None
            matrices.append(ExpertWeights(rows, n, biases))
            self.values.append((values.reshape(num_experts, n, k), biases))
        self.experts = Experts(*matrices, num_experts, top_k, normalize, Gate(limit=limit))

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, math.nan)
        KERNELS.experts(out, x, logits, self.experts)
        return out

    def check(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        expected = self.expected(float64(x), float64(logits))
        tolerance = TOLERANCE[self.dtype]
        scale = np.abs(expected).max(1, keepdims=True)
        assert (np.abs(float64(self.run(x, logits)) - expected) <= tolerance * (1 + scale)).all()

    def expected(self, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        chosen, weights = routed64(logits, self.experts.top_k, self.experts.normalize)
        out = np.zeros_like(x)
        for row, used in enumerate(chosen):
            for expert, weight in zip(used, weights[row], strict=True):
                active = self._joined(self._product(x[row], 0, expert))
                out[row] += weight * self._product(active, 1, expert)
        return out

    def _product(self, x: np.ndarray, which: int, expert: int) -> np.ndarray:
        values, biases = self.values[which]
        n = values.shape[1]
        added = 0.0 if biases is None else float64(biases)[expert * n : (expert + 1) * n]
        return values[expert] @ x + added

    def _joined(self, both: np.ndarray) -> np.ndarray:
        gate, up = np.split(both, 2)
        limit = self.experts.gate.limit
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(
    ("num_experts", "top_k", "normalize"),
    [(1, 1, True), (8, 2, True), (8, 2, False), (60, 4, False), (128, 8, True), (3, 3, False)],
)
def test_each_row_uses_the_experts_with_the_largest_logits(num_experts, top_k, normalize):
    logits = random(num_experts, 5, num_experts)
    logits[1:3] = logits[1:3].round()  # many are equal
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    blocks = route(logits, num_experts, top_k, normalize=normalize, block_rows=16)
    chosen, weights = routed64(float64(logits), top_k, normalize)
    np.testing.assert_allclose(float64(blocks.weights), weights, rtol=1e-5)
    assert experts_of_pairs(blocks) == dict(enumerate(chosen.flatten().tolist()))


def experts_of_pairs(blocks) -> dict[int, int]:
    """Each pair's expert, if it stands in one block, of one expert's blocks side by side."""
    num_pairs, found = blocks.weights.numel(), {}
    owners = blocks.block_experts.tolist()
    used = [owner for owner in owners if owner >= 0]
    assert used == sorted(used) and owners[len(used) :] == [-1] * (len(owners) - len(used))
    for owner, pairs in zip(used, blocks.pairs.view(-1, blocks.block_rows).tolist(), strict=False):
        real = [pair for pair in pairs if pair < num_pairs]
        assert real == sorted(set(real)) and pairs[len(real) :] == [num_pairs] * (len(pairs) - len(real))
        assert real and not found.keys() & set(real)
        found |= dict.fromkeys(real, owner)
    return found


@pytest.mark.parametrize("block_rows", [16, 32])
def test_pairs_stand_in_blocks_of_one_expert(block_rows, monkeypatch):
    """With experts that have none, a whole block, and one pair more."""
    monkeypatch.setattr(expert_routing, "SCANNED", 32)
    rows_of = {0: 1, 2: 32, 3: 33, 6: 15}
    wanted = [expert for expert, rows in rows_of.items() for _ in range(rows)]
    wanted = np.random.default_rng(0).permutation(wanted)
    logits = torch.full((len(wanted), 8), -1.0, device=DEVICE)
    logits[torch.arange(len(wanted)), torch.from_numpy(wanted)] = 1.0
    blocks = route(logits, 8, 1, normalize=True, block_rows=block_rows)
    assert experts_of_pairs(blocks) == dict(enumerate(wanted.tolist()))
    assert len(blocks.block_experts) == most_blocks(len(wanted), 8, block_rows)


@pytest.mark.parametrize("block_rows", [1, 4, 16])
def test_there_is_room_for_the_most_blocks(block_rows):
    rng = np.random.default_rng(block_rows)
    for _ in range(300):
        num_experts, num_pairs = (int(n) for n in rng.integers(1, 40, 2))
        counts = np.bincount(rng.integers(0, rng.integers(1, num_experts + 1), num_pairs))
        assert (-(-counts // block_rows)).sum() <= most_blocks(num_pairs, num_experts, block_rows)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_stays_in_its_row():
    layer, x, logits = Layer(), random(1, 6, 64), random(2, 6, 5)
    logits[1], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    x[0, 7] = math.nan
    out = layer.run(x, logits)
    assert torch.isnan(out[:4]).any(1).all()
    assert torch.equal(out[4:], layer.run(x[4:], logits[4:]))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bits", [-1, 2**31 - 1, 0x7F800000, -0x800000, -(2**31)])
def test_no_bits_of_a_logit_change_how_many_experts_a_row_uses(bits):
    logits = random(1, 1, 5)
    logits.view(torch.int32)[0, ::2] = bits
    chosen = torch.full((6,), -7, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(6, device=DEVICE)
    route_kernel[(1,)](chosen, weights, logits, 5, NUM_EXPERTS=5, TOP_K=3, NORMALIZE=True, BLOCK=8)
    used = chosen[:3].tolist()
    assert used == sorted(set(used)) and set(used) <= set(range(5)) and chosen[3:].tolist() == [-7] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (3, {"normalize": False, "num_experts": 9, "top_k": 4}),
        (7, {"limit": 1.5, "bias": True}),
        (40, {"num_experts": 2, "top_k": 1, "hidden": 40, "inner": 72}),
        (9, {"num_experts": 2, "top_k": 2, "bias": True, "inner": 96}),
    ],
    ids=str,
)
def test_weighted_sums_of_experts(dtype, rows, options):
    layer = Layer(dtype=dtype, **options)
    num_experts = layer.experts.num_experts
    layer.check(random(1, rows, layer.hidden, dtype=dtype), random(2, rows, num_experts, dtype=dtype))


@pytest.mark.parametrize("row_format", [name for name in FORMATS if name != "dense"])
def test_quantised_experts(row_format):
    layer = Layer(3, 2, row_format=row_format, bias=row_format == "int8_row")
    layer.check(random(1, 5, 64), random(2, 5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(dtype, ordered_products):
    """Of 40 rows the blocks are of 32, of few rows 16."""
    layer = Layer(3, 2, 48, 32, dtype=dtype, bias=True)
    x, logits = random(1, 40, 48, dtype=dtype), random(2, 40, 3, dtype=dtype)
    whole = layer.run(x, logits)
    for first, rows in [(0, 1), (39, 1), (5, 3)]:
        part = slice(first, first + rows)
        assert torch.equal(layer.run(x[part], logits[part]), whole[part])


def test_no_rows():
    assert Layer().run(random(1, 0, 64), random(2, 0, 5)).shape == (0, 64)
