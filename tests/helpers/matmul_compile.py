"""Compiles Triton's matrix products for an architecture without a GPU.

``python -m helpers.matmul_compile sm_90`` prints, as JSON, what each kernel takes and which matrix
instructions it has.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
from helpers.quantized_weights import random_rows
from helpers.triton_compile import Compiler

from streamllm.ops.gpu.expert_weights import ExpertWeights
from streamllm.ops.gpu.triton_kernels import experts, matmul
from streamllm.ops.gpu.triton_kernels.expert_routing import ExpertBlocks
from streamllm.ops.gpu.weight_rows import WeightRows

SIZE = 4096
MATRIX_INSTRUCTION = re.compile(
    r"(mma\.sync|wgmma\.mma_async)\S*\.m(\d+)n\d+(k\d+)|(tcgen05\.mma)\.cta_group::(\d)\.(kind::\w+)"
)
CASES = {
    torch.bfloat16: {
        "q4_0": (1, 999), "q4_1": (1, 20, 40, 100, 999), "q8_0": (1, 999), "int8_row": (1, 999),
        "float8_row": (1, 999), "dense": (1, 40, 999), "q5_1": (1, 999), "q2_k": (1, 999), "q3_k": (1, 999),
        "q4_k": (1, 64, 999), "q5_k": (1, 999), "q6_k": (1, 64, 999), "iq4_xs": (1, 999), "mxfp4": (1, 999),
        "int4_32": (1, 999), "int4_128": (1, 999), "int8_128": (1, 999), "float8_e4m3": (1, 999),
    },
    torch.float16: {"q4_1": (1, 999), "dense": (1, 999)},
    torch.float32: {"q4_1": (1, 999), "q8_0": (1,), "dense": (1, 999)},
}  # fmt: skip
"""Rows of activations, by their dtype and the weight's format; the other formats are made of the same parts
(q5_0 of q5_1's and q4_0's, iq4_nl of iq4_xs's and q4_0's)."""

EXPERT_CASES = {
    (torch.bfloat16, "dense"): (16, 64, 128),
    (torch.bfloat16, "q4_0"): (16, 128),
    (torch.bfloat16, "q4_k"): (16,),
    (torch.bfloat16, "mxfp4"): (16, 128),
    (torch.float32, "dense"): (16, 128),
}
"""Rows of a block."""


class ProductCompiler(Compiler):
    """Notes matrix instructions too, without their extent over rows of activations.

    Attributes:
        instructions: by label.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__(architecture)
        self.instructions: dict[str, list[str]] = {}

    def _record(self, name: str, compiled: Any, log: str) -> None:
        super()._record(name, compiled, log)
        found = {" ".join(filter(None, match)) for match in MATRIX_INSTRUCTION.findall(compiled.asm["ptx"])}
        self.instructions[f"{self.label}: {name}"] = sorted(found)


def square_weight(row_format: str, dtype: torch.dtype) -> WeightRows:
    """One that claims to be ``[SIZE, SIZE]``; it is never read."""
    weight, _ = random_rows(row_format, SIZE, 256, dtype, "cpu")
    return replace(weight, n=SIZE, k=SIZE)


def compile_products(compiler: ProductCompiler) -> None:
    for dtype, formats in CASES.items():
        for row_format, row_counts in formats.items():
            weight = square_weight(row_format, dtype)
            for rows in row_counts:
                x, out = torch.empty(rows, SIZE, dtype=dtype), torch.empty(rows, SIZE, dtype=dtype)
                label = f"{str(dtype).removeprefix('torch.')} {row_format} rows={rows}"
                compiler.compile(label, matmul.multiply_rows, out, x, weight, torch.empty(SIZE))


def compile_experts(compiler: ProductCompiler) -> None:
    for (dtype, row_format), block_sizes in EXPERT_CASES.items():
        weights = ExpertWeights(square_weight(row_format, dtype), SIZE, torch.empty(SIZE))
        x, out = torch.empty(4, SIZE, dtype=dtype), torch.empty(8, SIZE, dtype=dtype)
        integers = torch.zeros(SIZE, dtype=torch.int32)
        for block_rows in block_sizes:
            blocks = ExpertBlocks(torch.empty(4, 2), integers, integers[:4], block_rows)
            label = f"{str(dtype).removeprefix('torch.')} {row_format} block={block_rows}"
            compiler.compile(label, experts.multiply_by_experts, out, x, weights, blocks)


def main(architecture: str) -> None:
    """Prints ``{"dtype format rows=n: kernel": {"registers": ..., "instructions": [...]}}``."""
    for module in (matmul, experts):
        module.gpu_architecture = lambda device: architecture  # type: ignore[attr-defined]
    compiler = ProductCompiler(architecture)
    with compiler.compiling():
        compile_products(compiler)
        compile_experts(compiler)
    found = {
        name: {**resources, "instructions": compiler.instructions[name]}
        for name, resources in compiler.found.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
