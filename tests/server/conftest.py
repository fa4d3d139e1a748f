"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import RunningServer, run_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for a module's tests; each leaves it idle."""
    with run_server() as running:
        yield running
