"""What every room's tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Tests import `helpers`, and the load test's modules by name, as its scripts do.
sys.path[:0] = [str(HERE), str(HERE.parent / "loadtest")]


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, fetched into the cache on first use."""
    from streamllm.sources import resolve

    return resolve(None, progress=False).path
