"""What every room's tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import `helpers` from here


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, fetched into the cache on first use."""
    from streamllm.sources import resolve

    return resolve(None, progress=False).path
