"""Operations put together from torch's own, for what no step spends its time on.

Arithmetic is float32, results are rounded to the activations' dtype, and a graph can capture all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from streamllm.ops import Activation, LayerNorm

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def layer_norm(out: Tensor, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> None:
    """``out = norm(x + residual)``; the sum, rounded to the dtype, replaces ``residual`` and is what is
    normalised. All ``[rows, size]``."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    out.copy_(functional.layer_norm(x.float(), (norm.size,), norm.weight, norm.bias, norm.eps))


def activate(out: Tensor, x: Tensor, activation: Activation) -> None:
    """``out = activation(x)``."""
    out.copy_(ACTIVATIONS[activation](x.float()))


def soft_cap(x: Tensor, cap: float) -> None:
    """``x = cap * tanh(x / cap)``."""
    x.copy_((x.float() / cap).tanh_().mul_(cap))


def sigmoid_scale(x: Tensor, gate: Tensor) -> None:
    """``x *= sigmoid(gate)``, ``gate [rows, 1]``."""
    x.mul_(gate.float().sigmoid())
