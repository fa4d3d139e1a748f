"""One served model for all clients; each test leaves it idle."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from helpers.live_server import LiveServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The default model, as anyone may serve it; templates of requests are allowed."""
    folder = tmp_path_factory.mktemp("data")
    with LiveServer("--trust-request-chat-template", "--data-dir", str(folder)) as server:
        yield server
    assert server.exit_code == 0
    assert "Traceback" not in server.stderr


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; nothing of a module's tests may still run or hold blocks when they are over."""
    yield shared_server
    shared_server.wait_until_quiet()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The unchanged ``openai`` client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
