"""A replica's server, and what it says of itself to another event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.replica_cluster import real_replica, wait_for

from streamllm.config import ServerConfig
from streamllm.deploy.ray_serve import own_config
from streamllm.errors import ConfigError, EngineDeadError, ModelLoadError


def test_load_and_use_follow_the_requests(tmp_path: Path) -> None:
    with real_replica(0, tmp_path, step_seconds=0.01) as (replica, server):
        assert asyncio.run(server.load())["load"] == 0
        assert asyncio.run(server.use()) == {"queued_tokens": 0, "running_share": 0, "first_token": 0}
        body = {"prompt": "x" * 40, "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"http://{replica.address}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert asyncio.run(server.load())["load"] >= 41
            assert asyncio.run(server.use())["running_share"] == 1 / 8
        wait_for(lambda: asyncio.run(server.load())["load"] == 0, 2.0)
        assert asyncio.run(server.use())["first_token"] > 0
        asyncio.run(server.check())


def test_a_dead_engine_is_said_before_and_after_its_server_has_ended(tmp_path: Path) -> None:
    with real_replica(0, tmp_path) as (replica, server):
        server._loop.call_soon_threadsafe(server._engine.fail, "for a test")
        with pytest.raises(EngineDeadError, match="for a test"):
            while True:
                asyncio.run(server.check())
        assert httpx.get(f"http://{replica.address}/health").status_code == 503
        wait_for(lambda: not server._thread.is_alive())
        with pytest.raises(EngineDeadError, match="for a test"):
            asyncio.run(server.check())


def test_at_the_end_running_requests_finish(tmp_path: Path) -> None:
    with real_replica(0, tmp_path, step_seconds=0.01) as (replica, server):
        body = {"prompt": "x", "max_tokens": 30, "stream": True}
        with httpx.stream("POST", f"http://{replica.address}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server._server.should_exit = True
            assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_each_replica_has_a_server_and_a_folder_of_its_own(tmp_path: Path) -> None:
    whole = ServerConfig(host="0.0.0.0", port=443, api_key=("k",), data_dir=str(tmp_path), uds=None)
    own = own_config(whole, "10.0.0.1", 3)
    assert (own.host, own.ssl_certfile, own.api_key) == ("10.0.0.1", None, ("k",))
    assert own.data_dir == str(tmp_path / "replica-3")


def test_a_chat_template_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises((ModelLoadError, ConfigError)), real_replica(0, tmp_path, chat_template="{% if"):
        pass


def test_the_process_outlives_its_server(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from helpers.replica_cluster import real_replica
import streamllm.server.run
streamllm.server.run.LAST_RESORT = 0.1
with real_replica(0, pathlib.Path(sys.argv[2])):
    pass
time.sleep(1)
print("lives")
"""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(tests), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
