"""The GPU's operations on a real GPU: attention of every sort of layer, what is put together from torch's
operations, and mixtures of experts at the shapes of real models, whose bits are the same in any batch."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.operation_cases import ATTENTION_LAYERS, MixtureLayer, StepPair, random  # noqa: E402
from helpers.quantized_weights import FORMATS, random_rows  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops import Experts, Gate  # noqa: E402
from streamllm.ops.gpu.expert_weights import ExpertWeights  # noqa: E402
from streamllm.ops.gpu.gpu_ops import GpuOps  # noqa: E402
from streamllm.ops.gpu.quantized_matrix import WeightRows  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.torch_ops import TorchOps  # noqa: E402

MIXTURES = {
    "Mixtral-8x7B": {"num_experts": 8, "top_k": 2, "hidden": 4096, "inner": 14336},
    "Qwen3-30B-A3B": {"num_experts": 128, "top_k": 8, "hidden": 2048, "inner": 768},
    "Qwen1.5-MoE-A2.7B": {"num_experts": 60, "top_k": 4, "hidden": 2048, "inner": 1408, "normalize": False},
    "gpt-oss-20b": {
        "num_experts": 32, "top_k": 4, "hidden": 2880, "inner": 2880, "bias": True, "limit": 7.0,
    },
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = 300


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
def test_attention(kernels, layer):
    pair = StepPair(kernels, ATTENTION_LAYERS[layer], DEVICE)
    for seed, (computed, chunks) in enumerate([([0, 0], [18, 22]), ([18, 22], [3, 1])]):
        expected, found = pair.attend(seed, computed, chunks)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_graph_holds_every_operation(kernels):
    ops, reference = GpuOps(kernels, torch.device(DEVICE), torch.float32), MixtureLayer(TorchOps())
    layer = MixtureLayer(ops)
    x = torch.zeros(4, 32, device=DEVICE)
    positions = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    layer(x, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, positions)
    for seed in (1, 2):
        x.copy_(torch.from_numpy(random(seed, 4, 32)))
        positions.copy_(torch.tensor([seed, 0, 7, 3]))
        graph.replay()
        expected = reference(x.cpu(), positions.cpu().numpy())
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def mixture(
    dtype: torch.dtype,
    num_experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    normalize: bool = True,
    bias: bool = False,
    limit: float = 0.0,
) -> Experts:
    matrices = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        values = torch.empty(num_experts * n, k, dtype=dtype, device=DEVICE).normal_(0, k**-0.5)
        biases = torch.randn(num_experts * n, device=DEVICE) if bias else None
        matrices.append(ExpertWeights(WeightRows("dense", len(values), k, values), n, biases))
    return Experts(*matrices, num_experts, top_k, normalize, Gate(limit=limit))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", MIXTURES)
def test_experts(kernels, model, dtype):
    """As the definition says; the same bits for any number of rows, and from a graph."""
    torch.manual_seed(0)
    experts = mixture(dtype, **MIXTURES[model])
    x = torch.randn(ROWS, MIXTURES[model]["hidden"], device=DEVICE).to(dtype)
    logits = torch.randn(ROWS, experts.num_experts, device=DEVICE).to(dtype)
    out, expected = (torch.full_like(x, math.nan) for _ in range(2))
    kernels.experts(out, x, logits, experts)
    ReferenceKernels().experts(expected, x, logits, experts)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for first, rows in ((0, 1), (ROWS - 1, 1), (7, 16), (0, 64), (100, 200)):
        part = torch.full_like(x[:rows], math.nan)
        kernels.experts(part, x[first : first + rows], logits[first : first + rows], experts)
        assert torch.equal(part, out[first : first + rows]), (first, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.experts(part, x[:rows], logits[:rows], experts)
    logits.copy_(logits.flip(1))
    kernels.experts(out, x, logits, experts)
    graph.replay()
    assert torch.equal(part, out[:rows])


@pytest.mark.parametrize("row_format", FORMATS)
def test_experts_in_every_format(kernels, row_format):
    torch.manual_seed(0)
    matrices = []
    for n, k in ((1024, 1024), (1024, 512)):
        rows, _ = random_rows(row_format, 8 * n, k, torch.bfloat16, DEVICE, seed=n)
        matrices.append(ExpertWeights(rows, n))
    experts = Experts(*matrices, num_experts=8, top_k=2, normalize=True)
    x = torch.randn(100, 1024, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(100, 8, device=DEVICE, dtype=torch.bfloat16)
    out, expected = (torch.full_like(x, math.nan) for _ in range(2))
    kernels.experts(out, x, logits, experts)
    ReferenceKernels().experts(expected, x, logits, experts)
    # Weights with a scale a group are rounded to bfloat16 before they are multiplied.
    worst = (out.float() - expected.float()).abs().max()
    assert worst <= 2e-2 * expected.float().abs().max()
