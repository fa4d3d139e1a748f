"""RMSNorm with a residual, and gated activations: one program a row, or a row's part."""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops import Activation
from streamllm.ops.gpu.kernels import Tensor
from streamllm.ops.gpu.triton_kernels.primitives import tanh

ELEMENTS_PER_WARP = 256
ACTIVATION_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    out,
    x,
    residual,
    weight,
    eps,
    out_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        pointers = residual + row * residual_stride + column
        # What is normed is the rounded sum, as a later reader of the residual sees it.
        total = (values + tl.load(pointers, mask=inside, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(pointers, total, mask=inside)
        values = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    result = values * factor * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.rms_norm`."""
    rows, size = x.shape
    if not rows:
        return
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](
        out,
        x,
        residual,
        weight,
        eps,
        out.stride(0),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), 16),
        enable_fp_fusion=False,
    )


@triton.jit
def act_and_mul_kernel(
    out,
    x,
    width,
    limit,
    out_stride,
    x_stride,
    ACTIVATION: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if IS_LIMITED:
        # Comparisons, unlike minimum and maximum, keep NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        active = gate / (1.0 + tl.exp(-1.702 * gate))
    elif ACTIVATION == "relu":
        active = tl.where(gate < 0.0, 0.0, gate)
    elif ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    tl.store(out + row * out_stride + column, (active * up).to(out.dtype.element_ty), mask=inside)


def act_and_mul(out: Tensor, x: Tensor, activation: Activation, limit: float = 0.0) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.act_and_mul`."""
    rows, width = out.shape
    if not rows:
        return
    act_and_mul_kernel[rows, triton.cdiv(width, ACTIVATION_BLOCK)](
        out,
        x,
        width,
        limit,
        out.stride(0),
        x.stride(0),
        ACTIVATION=activation,
        IS_LIMITED=limit > 0,
        BLOCK=ACTIVATION_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
