"""Operations on a device's tensors: products, weights as they are stored, what the kernels are told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamllm.errors import ModelLoadError
from streamllm.ops import Attention, RMSNorm
from streamllm.ops.gpu.gpu_ops import DenseMatrix, GpuOps, attention_shape
from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.stored_rows import StoredRows

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ops_of(dtype: torch.dtype = torch.float32) -> GpuOps:
    return GpuOps(ReferenceKernels(), CPU, dtype)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(weight: np.ndarray, dtype: torch.dtype) -> StoredRows:
    """Rows as a checkpoint of this dtype holds them."""
    rows = torch.from_numpy(weight).to(dtype).contiguous().view(torch.uint8)
    return StoredRows(str(dtype).removeprefix("torch."), rows.view(len(weight), -1).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_parts_and_bias(dtype):
    ops, upper, lower, bias = ops_of(dtype), random(5, 24), random(3, 24, seed=1), random(8, seed=2)
    x = torch.from_numpy(random(4, 24, seed=3)).to(dtype)
    matrix = ops.matrix(8, 24, iter([upper, lower]), bias)
    weight = np.concatenate([upper, lower])
    expected = x.double().numpy() @ torch.from_numpy(weight).to(dtype).double().numpy().T + bias
    actual = ops.linear(x, matrix)
    assert actual.dtype == dtype and matrix.shape == (8, 24)
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_not_rounded_to_16_bits(dtype, with_bias):
    ops, weight = ops_of(dtype), random(300, 64)
    bias = random(300, seed=5) if with_bias else None
    x = torch.from_numpy(random(2, 64, seed=1)).to(dtype)
    matrix = ops.matrix(300, 64, [weight], bias)
    logits = ops.with_float32_products().linear(x, matrix)
    expected = x.double() @ torch.from_numpy(weight).to(dtype).double().T
    if bias is not None:
        expected += torch.from_numpy(bias).to(dtype).double()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_checkpoint_keeps_its_bits(dtype):
    ops, weight = ops_of(dtype), random(6, 16)
    matrix = ops.matrix(6, 16, [stored(weight, dtype)])
    assert isinstance(matrix, DenseMatrix)
    assert torch.equal(matrix.weight, torch.from_numpy(weight).to(dtype))
    assert ops.weight_bytes == 6 * 16 * 2


def test_a_bias_counts_once_as_it_is_kept():
    ops, bias = ops_of(torch.float16), np.ones(64, np.float32)
    matrix = ops.matrix(64, 64, [np.zeros((64, 64), np.float32)], bias)
    assert isinstance(matrix, DenseMatrix) and matrix.bias is not None
    assert ops.weight_bytes == matrix.weight.nbytes + matrix.bias.nbytes
    ops = ops_of(torch.float16)
    quantised = ops.matrix(64, 64, [StoredRows("q8_0", np.zeros((64, 2 * 34), np.uint8))], bias)
    assert isinstance(quantised, QuantizedMatrix) and ops.weight_bytes == quantised.nbytes


def test_a_checkpoint_of_another_dtype_is_converted():
    matrix = ops_of(torch.float32).matrix(6, 16, [stored(random(6, 16), torch.bfloat16)])
    assert torch.equal(matrix.weight, torch.from_numpy(random(6, 16)).bfloat16().float())


def test_quantised_rows_stay_quantised():
    rows = np.random.default_rng(0).integers(0, 255, (64, 2 * 34), np.uint8)
    rows.view(np.float16)[:, [0, 17]] = np.linspace(0.01, 0.1, 128).reshape(64, 2)
    ops = ops_of(torch.float16)
    matrix = ops.matrix(64, 64, [StoredRows("q8_0", rows)])
    assert isinstance(matrix, QuantizedMatrix) and ops.weight_bytes < 64 * 64 * 2
    groups = rows.reshape(64, 2, 34)
    weight = groups[:, :, 2:].view(np.int8) * groups[:, :, :2].copy().view(np.float16).astype(np.float64)
    weight = weight.reshape(64, 64)
    x = torch.from_numpy(random(3, 64)).half()
    np.testing.assert_allclose(
        ops.linear(x, matrix).double().numpy(), x.double().numpy() @ weight.T, rtol=5e-3, atol=5e-2
    )


def test_parts_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"the parts of a weight \[9, 4\] have 8 rows"):
        ops_of().matrix(9, 4, [random(8, 4)])
    with pytest.raises(ValueError, match="format iq2_xs must be dequantised"):
        ops_of().matrix(1, 4, [StoredRows("iq2_xs", np.zeros((1, 4), np.uint8))])


def test_weights_that_do_not_fit_are_refused_in_a_line(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    ops = ops_of()
    monkeypatch.setattr(torch, "empty", full)
    stored_rows = StoredRows("q8_0", np.zeros((64, 2 * 34), np.uint8))
    for make in (
        lambda: ops.matrix(2, 2, [random(2, 2)]),
        lambda: ops.matrix(64, 64, [stored_rows]),
        lambda: ops.expert_matrices(2, 2, [[random(2, 2)]]),
    ):
        with pytest.raises(ModelLoadError, match="Not enough memory on cpu for the model's weights") as error:
            make()
        assert "\n" not in str(error.value)


def test_a_norm_adds_the_residual_in_its_place():
    ops = ops_of()
    norm = RMSNorm(ops.vector(random(16, seed=4)), 16, 1e-5)
    x, residual = torch.from_numpy(random(3, 16)), torch.from_numpy(random(3, 16, seed=1))
    total = x + residual
    out, kept = ops.rms_norm(x, norm, residual)
    assert kept is residual
    torch.testing.assert_close(kept, total)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(out, expected)
    first, unchanged = ops.rms_norm(total, norm)
    assert unchanged is total
    torch.testing.assert_close(first, expected)


def test_the_kernels_are_told_what_a_layer_is():
    sinks = torch.zeros(8)
    attention = Attention(0, 1, 8, 2, 64, 32, 0.125, window=7, soft_cap=30.0, sinks=sinks)
    shape = attention_shape(attention)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 2, 64)
    assert (shape.scale, shape.window, shape.soft_cap) == (0.125, 7, 30.0) and shape.sinks is sinks
