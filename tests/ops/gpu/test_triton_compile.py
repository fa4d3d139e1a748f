"""That every Triton kernel compiles for every target, into what the committed table says.

:mod:`helpers.triton_resources` writes the table. With another Triton than the table's numbers differ, and
what must hold with any is checked.
"""

from __future__ import annotations

import pytest
from helpers import triton_resources
from helpers.triton_resources import ARCHITECTURES, COMPILERS, Resources

pytest.importorskip("torch")
pytest.importorskip("triton")

NEVER_SPILL = {"prefill_kernel", "decode_kernel", "combine_kernel", "shrink_kernel", "expand_kernel"}


def check_limits(architecture: str, kernels: Resources) -> None:
    for name, taken in kernels.items():
        assert taken["shared"] <= triton_resources.SHARED_MEMORY[architecture], name
        if name.split(": ")[1] in NEVER_SPILL:
            assert taken["spills"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_into_what_the_table_says(architecture, compiler):
    found = triton_resources.compiled(compiler, architecture)
    table = triton_resources.read_table()
    expected = table["kernels"][architecture]
    assert found.keys() <= expected.keys()
    check_limits(architecture, found)
    if triton_resources.triton_version() == table["triton"]:
        assert found == {name: expected[name] for name in found}


def test_the_table_has_every_kernel_for_every_target_and_keeps_the_limits():
    table = triton_resources.read_table()["kernels"]
    assert set(table) == set(ARCHITECTURES)
    for architecture, kernels in table.items():
        assert {name.split(": ")[-1] for name in kernels} == triton_resources.kernel_names()
        check_limits(architecture, kernels)
