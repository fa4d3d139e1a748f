"""That Triton compiles a weight's products to the same matrix instructions whatever the number of rows, on
every target: so a row's sums are taken in one order. What else they become, the table of all kernels says.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from helpers import triton_resources

pytest.importorskip("torch")
pytest.importorskip("triton")

INSTRUCTIONS = {
    "sm_80": "mma.sync 16 k16",
    "sm_90": "wgmma.mma_async 64 k16",
    "sm_100": "tcgen05.mma 1 kind::f16",
}
MOST_SPILLS = 64
"""Bytes a thread; ptxas spills a little to have one more program on a multiprocessor."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_matrix_instructions_do_not_depend_on_the_number_of_rows(architecture):
    """Triton 3.6 compiles a program that needs too much of sm_100's tensor memory to a trap without any."""
    of_weight = defaultdict(list)
    for name, taken in triton_resources.report("helpers.matmul_compile", architecture).items():
        assert taken["spills"] <= MOST_SPILLS, name
        dtype, row_format, _, kernel = name.split()
        if kernel in ("product_kernel", "expert_product_kernel"):
            of_weight[dtype, row_format, kernel].append(taken["instructions"])
    assert len(of_weight) == 23 + 5
    for weight, instructions in of_weight.items():
        expected = [] if weight[0] == "float32" else [INSTRUCTIONS[architecture]]
        assert all(found == expected for found in instructions), (weight, instructions)
