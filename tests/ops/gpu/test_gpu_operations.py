"""The GPU's operations against the reference's on the same rows: attention with every sort of kernels,
what is put together from torch's in every dtype, and a layer replayed, as a graph does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.cpu_as_gpu import ReplayRecorder  # noqa: E402
from helpers.cuda_emulation import emulated, missing  # noqa: E402
from helpers.operation_cases import ATTENTION_LAYERS, MixtureLayer, StepPair, random  # noqa: E402
from helpers.quantized_weights import dequantized, stored_groups  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops import Experts, Gate, LayerNorm  # noqa: E402
from streamllm.ops.gpu.cuda_kernels import CudaKernels  # noqa: E402
from streamllm.ops.gpu.gpu_ops import GpuOps  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels  # noqa: E402
from streamllm.ops.stored_rows import StoredRows  # noqa: E402
from streamllm.ops.torch_ops import TorchOps  # noqa: E402

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative and absolute: the rounding of a result to its dtype."""

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

# -- attention ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["reference", "triton", "cuda"])
def kernels(request):
    if request.param == "reference":
        return ReferenceKernels()
    if request.param == "triton":
        return TritonKernels()
    if DEVICE != "cpu" or missing():
        pytest.skip(missing() or "CUDA's kernels are emulated where Triton's are interpreted")
    library = emulated(
        "attention_decode.cu", "elementwise.cu", "rotary_cache.cu", "copy_blocks.cu", "sampling.cu"
    )
    return CudaKernels(library, num_multiprocessors=2, device_index=None)


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
def test_attention(kernels, layer):
    """A prompt and a longer one, then a chunk of the first and a decode of the second."""
    device = DEVICE if isinstance(kernels, TritonKernels) else "cpu"
    pair = StepPair(kernels, ATTENTION_LAYERS[layer], device)
    for seed, (computed, chunks) in enumerate([([0, 0], [18, 22]), ([18, 22], [3, 1])]):
        expected, found = pair.attend(seed, computed, chunks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# -- rows --------------------------------------------------------------------------------------------------


class Rows:
    """Random rows of a dtype, and the operations of both sides."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.ops = GpuOps(ReferenceKernels(), CPU, dtype)
        self.reference = TorchOps()

    def random(self, seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(scale * random(seed, *shape)).to(self.dtype)

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def rows(dtype) -> Rows:
    return Rows(dtype)


@DTYPES
def test_layer_norm(rows):
    weight = LayerNorm(torch.from_numpy(random(1, 24)), torch.from_numpy(random(2, 24)), 24, 1e-5)
    x, residual = rows.random(3, 5, 24, scale=30), rows.random(4, 5, 24)
    out, kept = rows.ops.layer_norm(x, weight)
    rows.check(out, rows.reference.layer_norm(x.float(), weight)[0])
    assert kept is x
    total = (x.float() + residual.float()).to(rows.dtype)
    out, kept = rows.ops.layer_norm(x, weight, residual)
    rows.check(out, rows.reference.layer_norm(total.float(), weight)[0])
    assert kept is residual and torch.equal(residual, total)


@DTYPES
def test_operations_in_place_round_once(rows):
    x, other, gate = rows.random(1, 5, 24), rows.random(2, 5, 24), rows.random(3, 5, 1)
    expected = x.float() + other.float()
    assert rows.ops.add(x, other) is other
    assert torch.equal(other, expected.to(rows.dtype))
    for name, argument in (("scale", 0.3), ("soft_cap", 0.7), ("sigmoid_scale", gate)):
        before = x.float().clone()
        assert getattr(rows.ops, name)(x, argument) is x
        wanted = argument.float() if name == "sigmoid_scale" else argument
        assert torch.equal(x, getattr(rows.reference, name)(before, wanted).to(rows.dtype))
    assert torch.equal(gate, rows.random(3, 5, 1))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(rows, activation):
    x = rows.random(1, 5, 24, scale=3)
    before = x.clone()
    rows.check(rows.ops.activate(x, activation), rows.reference.activate(x.float(), activation))
    gate = Gate(activation)
    rows.check(rows.ops.gate_and_mul(x, gate), rows.reference.gate_and_mul(x.float(), gate))
    assert torch.equal(x, before)


@DTYPES
def test_a_gate_with_a_limit(rows):
    x, gate = rows.random(1, 5, 24, scale=3), Gate("silu", limit=1.5)
    rows.check(rows.ops.gate_and_mul(x, gate), rows.reference.gate_and_mul(x.float(), gate))


@DTYPES
def test_positions_are_looked_up_where_the_step_says(rows):
    weight = random(1, 9, 24)
    batch = SimpleNamespace(num_tokens=3, rope_rows=torch.tensor([8, 0, 3], dtype=torch.int32))
    found = rows.ops.position_embedding(batch, rows.ops.matrix(9, 24, [weight]))
    assert torch.equal(found, torch.from_numpy(weight).to(rows.dtype)[[8, 0, 3]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_stay_in_float32(rows):
    head, weight, x = rows.ops.with_float32_products(), random(1, 9, 24), rows.random(2, 3, 24)
    logits = head.linear(x, head.matrix(9, 24, [weight]))
    expected = 30 * torch.tanh(logits.clone() / 2 / 30)
    found = head.soft_cap(head.scale(logits, 0.5), 30.0)
    assert found is logits and found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


# -- experts -----------------------------------------------------------------------------------------------


def expert_parts(seed: int, num_experts: int, n: int, k: int, row_format: str | None = None) -> list[list]:
    """Two parts an expert."""
    rng = np.random.default_rng(seed)
    if row_format is None:
        parts = [random(seed + 100 * expert, n, k) for expert in range(num_experts)]
        return [[part[: n // 2], part[n // 2 :]] for part in parts]
    return [[stored_groups(row_format, n // 2, k, rng) for _ in range(2)] for _ in range(num_experts)]


def values(parts: list[list]) -> list[list[np.ndarray]]:
    return [[dequantized(p) if isinstance(p, StoredRows) else p for p in expert] for expert in parts]


@pytest.mark.parametrize(
    ("row_formats", "options"),
    [
        ((None, None), {"normalize": True}),
        ((None, None), {"normalize": False, "gate": Gate(limit=1.2)}),
        (("q4_0", "q8_0"), {"normalize": True}),
    ],
    ids=str,
)
def test_experts(row_formats, options):
    ops, reference = GpuOps(ReferenceKernels(), CPU, torch.float32), TorchOps()
    gate_up, down = (
        expert_parts(seed, 4, n, k, row_format)
        for seed, (n, k), row_format in zip((1, 2), ((64, 64), (64, 32)), row_formats, strict=True)
    )
    biases = random(5, 4, 64), random(6, 4, 64)
    made = [
        Experts(
            side.expert_matrices(64, 64, iter(convert(gate_up)), biases[0]),
            side.expert_matrices(64, 32, iter(convert(down)), biases[1]),
            num_experts=4,
            top_k=2,
            **options,
        )
        for side, convert in ((ops, lambda parts: parts), (reference, values))
    ]
    x, logits = torch.from_numpy(random(7, 9, 64)), torch.from_numpy(random(8, 9, 4).round())
    torch.testing.assert_close(
        ops.experts(x, logits, made[0]), reference.experts(x, logits, made[1]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("row_format", [None, "q4_0"])
def test_experts_weigh_what_they_are_stored_in(row_format):
    ops = GpuOps(ReferenceKernels(), CPU, torch.float16)
    weights = ops.expert_matrices(64, 128, expert_parts(1, 3, 64, 128, row_format), random(2, 3, 64))
    bytes_each = 2 * 64 * 128 if row_format is None else 64 * 128 // 32 * 18
    assert ops.weight_bytes == weights.nbytes == 3 * (bytes_each + 4 * 64)


def test_experts_stored_in_several_formats_are_dequantised():
    parts = expert_parts(1, 2, 64, 64, "q4_0")
    parts[1] = expert_parts(3, 1, 64, 64, "q8_0")[0]
    weights = GpuOps(ReferenceKernels(), CPU, torch.float16).expert_matrices(64, 64, parts)
    assert weights.rows.format == "dense" and weights.rows.values.dtype == torch.float16
    expected = np.concatenate([np.concatenate(expert) for expert in values(parts)])
    assert torch.equal(weights.rows.values, torch.from_numpy(expected).half())


# -- a layer -----------------------------------------------------------------------------------------------


def test_replayed_operations_read_their_tensors_anew(kernels):
    device = DEVICE if isinstance(kernels, TritonKernels) else "cpu"
    ops, reference = GpuOps(kernels, torch.device(device), torch.float32), MixtureLayer(TorchOps())
    recorder, layer = ReplayRecorder(), MixtureLayer(ops)
    x, positions = torch.zeros(4, 32, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    recorder.begin()
    ops.launch = recorder.launch
    out = layer(x, positions)
    replay = recorder.end()
    for seed in (1, 2):
        x.copy_(torch.from_numpy(random(seed, 4, 32)))
        positions.copy_(torch.tensor([seed, 0, 7, 3]))
        replay()
        expected = reference(x.cpu(), positions.cpu().numpy())
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
