"""Servers for the cases: each is the default model behind ``streamllm serve``, spoken to over HTTP alone.

The cases are named after what users of other servers reported: S streaming, D leaving, N choices, L logprobs,
P prompts, V values, E errors, T templates, G constraints, C prefix cache, K scheduling, R isolation,
Q sampling, H life, M metrics, Z tokens, A access.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from case_server import CaseServer

ONE_AT_A_TIME = (
    "--max-num-seqs=1",
    "--max-num-queued-reqs=4",
    "--api-key=kéy",
    "--chat-template={% if messages[0].role != 'user' %}{{ raise_exception('Begin with a user.') }}"
    "{% endif %}{{ messages[0].content }}",
)


@pytest.fixture(scope="session")
def plain_server() -> Iterator[CaseServer]:
    with CaseServer() as server:
        yield server
    assert server.exit_code == 0 and "Traceback" not in server.stderr


@pytest.fixture
def server(plain_server: CaseServer) -> Iterator[CaseServer]:
    """The server as anyone starts it; after each case it must answer as before and hold nothing."""
    yield plain_server
    plain_server.canary()


@pytest.fixture(scope="session")
def strict_server() -> Iterator[CaseServer]:
    """Runs one sequence at a time, lets four wait, wants a key, and has a template that refuses."""
    with CaseServer(*ONE_AT_A_TIME, key="kéy") as server:
        yield server
    assert server.exit_code == 0 and "Traceback" not in server.stderr


@pytest.fixture(scope="session")
def small_server() -> Iterator[CaseServer]:
    """A pool of 16 blocks of 16 tokens: four requests of 100 tokens do not fit at once."""
    with CaseServer("--num-kv-blocks=16", "--max-num-batched-tokens=32", "--debug-kv-blocks") as server:
        yield server
    assert server.exit_code == 0 and "Traceback" not in server.stderr
