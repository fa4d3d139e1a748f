"""Workers that die or hang, and engines that do: what their clients see, and that no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from helpers.live_server import LiveServer
from helpers.tiny_gguf import save_tiny_gguf
from helpers.worker_processes import (
    die_while_loading,
    fail_while_loading,
    is_alive,
    wait_until_gone,
    worker_pids,
)

from streamllm import LLM, SamplingParams
from streamllm.config import EngineConfig
from streamllm.errors import EngineDeadError, ModelLoadError
from streamllm.runner.distributed.startup import start_executor
from streamllm.sources import resolve

LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """A client that reads a stream to its end.

    Attributes:
        events: the data of the stream's events so far.
        ended: when the stream did.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.events: list[str] = []
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=LONG, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
        self.ended = time.monotonic()


@contextlib.contextmanager
def streaming_server(*flags: str, streams: int = 4):
    """A server with a worker under so many streams: the server, its worker's process, the streams."""
    # The default model, which computes for minutes what these streams ask for.
    flags = (
        "--distributed-executor-backend",
        "mp",
        "--threads",
        "1",
        "--kv-cache-memory-bytes",
        "400MB",
        *flags,
    )
    with LiveServer(*flags) as server:
        readers = [Reader(server.url) for _ in range(streams)]
        deadline = time.monotonic() + 30
        while not all(len(reader.events) > 2 for reader in readers):
            assert time.monotonic() < deadline, "the streams do not flow"
            time.sleep(0.02)
        (worker,) = worker_pids(server.process.pid)
        yield server, worker, readers


def check_all_end(server, worker, readers, began: float, within: float, word: str) -> None:
    for reader in readers:
        reader.join(within + 5)
        assert reader.ended - began < within
        assert reader.events[-1] == "[DONE]"
        message = json.loads(reader.events[-2])["error"]["message"]
        assert f"worker 0 (pid {worker})" in message and word in message
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert server.process.wait(10) == 1
    wait_until_gone([worker], 1.0)


def test_a_worker_that_is_killed_ends_every_stream_at_once():
    with streaming_server() as (server, worker, readers):
        began = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        check_all_end(server, worker, readers, began, 2.0, "was killed by SIGKILL")


@pytest.mark.slow
def test_a_worker_that_hangs_ends_every_stream_after_the_limit():
    with streaming_server("--worker-timeout", "2") as (server, worker, readers):
        began = time.monotonic()
        os.kill(worker, signal.SIGSTOP)
        check_all_end(server, worker, readers, began, 6.0, "no sign of life for 2 s")


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_no_worker():
    with streaming_server(streams=1) as (server, worker, _):
        server.process.kill()
        wait_until_gone([worker], 2.0)


@pytest.mark.slow
def test_a_signal_to_all_processes_lets_requests_finish():
    with streaming_server("--shutdown-timeout", "2", streams=1) as (server, worker, readers):
        before = len(readers[0].events)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert is_alive(worker) and len(readers[0].events) > before
        assert server.process.wait(20) == 0
        wait_until_gone([worker], 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "m.gguf"
    save_tiny_gguf(path)
    return path


SMALL = {
    "num_gpu_blocks_override": 32,
    "max_model_len": 128,
    "threads": 1,
    "distributed_executor_backend": "mp",
}


def test_a_dead_worker_offline(model):
    with LLM(str(model), **SMALL) as llm:
        worker = worker_pids(os.getpid())[-1]
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker 0 \(pid {worker}\) was killed by SIGKILL"):
            for _ in range(1000):
                llm.generate(["a"] * 4, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize(
    ("load", "error", "words"),
    [
        (die_while_loading, ModelLoadError, "was killed by SIGKILL .* before it was ready"),
        (fail_while_loading, KeyError, "weights"),
    ],
)
def test_a_worker_that_fails_while_it_loads(model, load, error, words):
    config = EngineConfig(model=str(model), **SMALL)
    before = set(worker_pids(os.getpid()))
    with pytest.raises(error, match=words) as caught:
        start_executor(config, resolve(str(model)), load, sampled_vocab_size=10, read_adapter=None)
    if error is KeyError:
        assert "fail_while_loading" in str(caught.value.__cause__)
    assert set(worker_pids(os.getpid())) <= before


def test_an_engine_that_is_killed_while_it_loads_leaves_no_worker(model):
    script = f"from streamllm import LLM; LLM({str(model)!r}, **{SMALL!r}); print('up', flush=True); input()"
    engine = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (workers := worker_pids(engine.pid)):
        assert time.monotonic() < deadline and engine.poll() is None
        time.sleep(0.005)
    engine.kill()
    engine.wait()
    wait_until_gone(workers, 20.0)  # it may still be importing what it needs to notice
