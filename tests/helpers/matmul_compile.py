"""Compiles Triton's matrix products for an architecture without a GPU.

``python -m helpers.matmul_compile sm_90`` prints, as JSON, what each kernel takes and which matrix
instructions it has.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from helpers.quantized_weights import random_rows
from helpers.triton_compile import Compiler

from streamllm.ops.gpu.triton_kernels import matmul

SIZE = 4096
MATRIX_INSTRUCTION = re.compile(
    r"(mma\.sync|wgmma\.mma_async)\S*\.m(\d+)n\d+(k\d+)|(tcgen05\.mma)\.cta_group::(\d)\.(kind::\w+)"
)
CASES = {
    torch.bfloat16: {
        "q4_0": (1, 999), "q4_1": (1, 20, 40, 100, 999), "q8_0": (1, 999), "int8": (1, 999),
        "float8_e4m3": (1, 999), "dense": (1, 40, 999),
    },
    torch.float16: {"q4_1": (1, 999), "dense": (1, 999)},
    torch.float32: {"q4_1": (1, 999), "q8_0": (1,), "dense": (1, 999)},
}  # fmt: skip
"""Rows of activations, by their dtype and the weight's format."""


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


def main(architecture: str) -> None:
    """Prints ``{"dtype format rows=n: kernel": {"registers": ..., "instructions": [...]}}``."""
    matmul.gpu_architecture = lambda device: architecture  # type: ignore[attr-defined]
    compiler = ProductCompiler(architecture)
    with compiler.compiling():
        for dtype, formats in CASES.items():
            for row_format, row_counts in formats.items():
                weight, _ = random_rows(row_format, SIZE, 64, dtype, "cpu")
                weight = matmul.WeightRows(
                    weight.format, SIZE, SIZE, weight.values, weight.scales, weight.minimums
                )
                for rows in row_counts:
                    x, out = torch.empty(rows, SIZE, dtype=dtype), torch.empty(rows, SIZE, dtype=dtype)
                    label = f"{str(dtype).removeprefix('torch.')} {row_format} rows={rows}"
                    compiler.compile(label, matmul.multiply_rows, out, x, weight, torch.empty(SIZE))
    found = {
        name: {**resources, "instructions": compiler.instructions[name]}
        for name, resources in compiler.found.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
