"""What tests of the GPU's kernels share."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.triton_device import DEVICE


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of Triton's interpreter that sum over k in order: those of numpy's BLAS round a row by
    its place in the matrix, which matrix units do not."""
    if DEVICE != "cpu":
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            total += column[:, None] * row
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
