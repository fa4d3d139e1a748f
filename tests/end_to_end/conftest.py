"""The default model behind a server of its own, and the client that people use."""

from __future__ import annotations

import openai
import pytest
from helpers.live_server import LiveServer


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server
    assert server.exit_code == 0


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
