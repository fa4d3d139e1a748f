"""Matrix products at the shapes of real models on a real GPU: their values, and that a row's bits depend
neither on the batch nor on being replayed from a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.quantized_weights import BLOCKS, FILE_FORMATS, FORMATS, random_rows  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul import multiply_rows, quantized_linear  # noqa: E402

SHAPES = [(6144, 4096), (1024, 14336), (2304, 896)]
HALF_STEP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ROWS = (1, 3, 16, 17, 64, 65, 200)


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("row_format", sorted({*FORMATS, *FILE_FORMATS}))
def test_products(row_format, dtype):
    """Values within what rounding can do to them, and the same bits for any number of rows."""
    for n, k in SHAPES:
        if row_format in BLOCKS and k % BLOCKS[row_format].elements:
            continue
        weight, values = random_rows(row_format, n, k, dtype, DEVICE, seed=n)
        x = torch.randn(ROWS[-1], k, device=DEVICE).to(dtype)
        bias = torch.randn(n, device=DEVICE)
        out = torch.full((ROWS[-1], n), float("nan"), dtype=dtype, device=DEVICE)
        multiply_rows(out, x, weight, bias)
        reference = torch.from_numpy(values).to(DEVICE)
        expected = x.double() @ reference.t() + bias.double()
        tolerance = x.double().abs() @ reference.abs().t() * (HALF_STEP[dtype] + 3e-6)
        tolerance += expected.abs() * HALF_STEP[dtype] + 1e-6
        assert ((out.double() - expected).abs() <= tolerance).all()
        for rows in ROWS:
            for first in {0, ROWS[-1] - rows}:
                part = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
                multiply_rows(part, x[first : first + rows], weight, bias)
                assert torch.equal(part, out[first : first + rows]), (n, k, rows)


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_graph_replays_a_product(rows):
    weight, _ = random_rows("q4_1", 4096, 4096, torch.bfloat16, DEVICE)
    matrix = QuantizedMatrix([weight], torch.randn(4096, device=DEVICE))
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(x)
    quantized_linear(out, x, matrix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized_linear(out, x, matrix)
    for _ in range(3):
        x.normal_()
        expected = torch.empty_like(x)
        quantized_linear(expected, x, matrix)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_rows_of_an_embedding_are_gathered_in_a_graph():
    weight, values = random_rows("q8_0", 32_000, 4096, torch.bfloat16, DEVICE)
    matrix = QuantizedMatrix([weight])
    ids = torch.zeros(50, dtype=torch.int64, device=DEVICE)
    out = torch.empty(50, 4096, dtype=torch.bfloat16, device=DEVICE)
    matrix.gather(out, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matrix.gather(out, ids)
    ids.random_(0, 32_000)
    graph.replay()
    assert torch.equal(out.cpu(), torch.from_numpy(values)[ids.cpu()].bfloat16())
