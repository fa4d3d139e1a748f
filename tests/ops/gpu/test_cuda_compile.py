"""That nvcc compiles every kernel for every target, into what the committed table says.

``PYTHONPATH=.:tests python -m helpers.cuda_compile`` writes the table anew, whose differences are then there
to be looked at. With another nvcc than the table's numbers differ, and what must hold with any is checked.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
from helpers import cuda_compile
from helpers.cuda_compile import TARGETS
from helpers.cuda_emulation import emulated


@pytest.mark.slow
@pytest.mark.skipif(cuda_compile.nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_into_what_the_table_says(target):
    found = cuda_compile.resources(target)
    table = cuda_compile.read_table()
    expected = table["kernels"][target]
    assert {source: set(kernels) for source, kernels in found.items()} == {
        source: set(kernels) for source, kernels in expected.items()
    }
    if cuda_compile.nvcc_version() == table["nvcc"]:
        for source, kernels in found.items():
            assert {name: asdict(taken) for name, taken in kernels.items()} == expected[source]
    for name, taken in found["attention_decode.cu"].items():
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), name
    for kernels in found.values():
        for name, taken in kernels.items():
            assert taken.static_shared == 0, (
                f"{name} has static shared memory, which the emulation does not see"
            )


def test_the_table_has_all_targets_and_no_attention_kernel_that_spills():
    table = cuda_compile.read_table()
    assert set(table["kernels"]) == set(TARGETS)
    for kernels in table["kernels"].values():
        assert all(taken["spill_stores"] == 0 for taken in kernels["attention_decode.cu"].values())


def test_decode_attention_launches_as_the_table_says():
    assert (
        cuda_compile.decode_launches(emulated("attention_decode.cu"))
        == (cuda_compile.read_table()["decode_launches"])
    )
