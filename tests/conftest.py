"""What every room's tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Tests import `helpers`, and the load test's modules by name, as its scripts do.
sys.path[:0] = [str(HERE), str(HERE.parent / "loadtest")]

# Without a GPU, Triton's kernels run in its interpreter: decided for a process when triton is first imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, fetched into the cache on first use."""
    from streamllm.sources import resolve

    return resolve(None, progress=False).path


@pytest.fixture(scope="session")
def gemma_model_path() -> Path:
    """Gemma 3 270M's GGUF, fetched into the cache on first use; for slow tests (240 MB)."""
    from helpers.gemma_model import gemma_gguf

    return gemma_gguf()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What emulates or interprets a GPU takes minutes, which the plain run does not have; what is slow may
    take longer before it counts as hanging."""
    can_time_out = items and items[0].config.pluginmanager.hasplugin("timeout")
    for item in items:
        if HERE / "ops" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if can_time_out and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))
