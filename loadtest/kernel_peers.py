"""Matrix products of the libraries inside torch, on the shapes of kernel_cases.py.

MKL multiplies float32 matrices as they are; oneDNN float32 weights that it has repacked for so many rows;
FBGEMM 8-bit weights, with activations that it rounds to 8 bits. Each goes through enough different weights to
outgrow the caches, as our kernels do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kernel_cases import SHAPES, copies_for

PEERS = {"float32": ("MKL", "oneDNN"), "int8": ("FBGEMM",)}
"""Whom a kernel is compared with, by the unit of its operations."""


def torch_with(threads: int) -> Any | None:
    """torch, on so many threads; ``None`` if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return torch


def peer_runs(
    torch: Any, name: str, rows: tuple[int, ...]
) -> Iterator[tuple[str, int, int, Callable[[], None]]]:
    """(Library, rows, products in one call, call) for a shape of ``kernel_cases.SHAPES``."""
    n, k = SHAPES[name]
    weight = torch.randn(n, k) * 0.05
    copies = copies_for(4 * n * k)

    def check(result: Any, x: Any) -> None:
        """A library that was asked wrongly may be fast, and compute nonsense."""
        expected = x @ weight.t()
        if (result - expected).norm() > 0.05 * expected.norm():
            raise RuntimeError("a library's product is not the product")

    inputs = {num_rows: torch.randn(num_rows, k) for num_rows in rows}

    plain = [weight.clone() for _ in range(copies)]
    for num_rows, x in inputs.items():
        product = partial(_mkl_product, torch, x)
        check(product(plain[0]), x)
        yield "MKL", num_rows, copies, partial(_run, torch, product, plain)
    del plain

    for num_rows, x in inputs.items():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for _ in range(copies)]
        product = partial(_onednn_product, torch, x)
        check(product(packed[0]), x)
        yield "oneDNN", num_rows, copies, partial(_run, torch, product, packed)
        del packed

    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of its quantised tensors
        rounded = torch.quantize_per_tensor(weight, 0.002, 0, torch.qint8)
    int8_copies = copies_for(n * k)
    int8 = [torch.ops.quantized.linear_prepack(rounded, None) for _ in range(int8_copies)]
    for num_rows, x in inputs.items():
        product = partial(_fbgemm_product, torch, x)
        check(product(int8[0]), x)
        yield "FBGEMM", num_rows, int8_copies, partial(_run, torch, product, int8)


def _mkl_product(torch: Any, x: Any, weight: Any) -> Any:
    return torch.mm(x, weight.t())


def _onednn_product(torch: Any, x: Any, weight: Any) -> Any:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _fbgemm_product(torch: Any, x: Any, weight: Any) -> Any:
    return torch.ops.quantized.linear_dynamic(x, weight, True)


def _run(torch: Any, product: Callable[[Any], Any], weights: list[Any]) -> None:
    with torch.inference_mode():
        for weight in weights:
            product(weight)
