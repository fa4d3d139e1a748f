"""Tests that need an NVIDIA GPU. They run on a bare machine (``loadtest/README.md`` tells how), or not at
all: what can be tested without a GPU is tested elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamllm.errors import ConfigError
from streamllm.ops.gpu import dispatch
from streamllm.ops.gpu.kernels import GpuKernels

HERE = Path(__file__).parent


def _missing() -> str | None:
    """Why nothing here can run."""
    if not os.path.exists("/dev/nvidiactl"):
        return "there is no NVIDIA GPU"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


@pytest.fixture(scope="module", params=["cuda", "triton"])
def kernels(request: pytest.FixtureRequest) -> GpuKernels:
    """Those of either sort; those in CUDA C++ only where they were built."""
    import torch
    from helpers.triton_device import DEVICE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, request.param)
        try:
            return dispatch.choose_kernels(torch.device(DEVICE, 0)).kernels
        except ConfigError as error:
            pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = _missing() if here else None
    if reason:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))
