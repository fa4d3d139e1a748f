"""An engine whose workers sit on two machines: the same tokens, and what goes wrong between the two."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator

import pytest
from helpers.network_nodes import RAY_ENVIRONMENT, Node, NodeServer, missing_for_nodes, two_ray_nodes
from helpers.tiny_models import make_tiny_model

import streamllm
from streamllm import LLM, SamplingParams

MISSING = missing_for_nodes()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

SETTINGS = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 512, "threads": 1}
FLAGS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
ON_RAY = ("--distributed-executor-backend", "ray")
PROMPTS = ["The quick brown fox", "and the dog"]
WORKER = "ray::_Actor"
SILENCE_SECONDS = 45.0
"""What a worker whose engine is silent gets to notice that."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("two-nodes") / "model")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_ray_nodes() as nodes:
        yield nodes


def serve(node: Node, model, folder, *flags: str, environment=RAY_ENVIRONMENT) -> NodeServer:
    flags = ("--model", str(model), *FLAGS, *ON_RAY, *flags)
    return NodeServer(node, folder / "engine.sock", *flags, environment=environment)


def complete(server: NodeServer) -> list[list[int]]:
    body = {
        "prompt": PROMPTS,
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with server.new_client() as client:
        choices = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    return [choice["token_ids"] for choice in choices]


@pytest.mark.parametrize("division", ["-tp", "-pp"])
def test_the_same_tokens(nodes, model, tmp_path, division):
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(model), **SETTINGS) as llm:
        whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    with serve(nodes[0], model, tmp_path, division, "2") as server:
        assert all(len(node.processes(WORKER)) == 1 for node in nodes)
        assert complete(server) == whole
    assert server.exit_code == 0
    assert not any(node.processes(WORKER) for node in nodes)


def refusal(node: Node, model, folder, environment=RAY_ENVIRONMENT) -> str:
    """The line with which a server does not start."""
    server = serve(node, model, folder, "-tp", "2", environment=environment)
    with pytest.raises(RuntimeError) as caught, server:
        pass
    return str(caught.value).strip().splitlines()[-1]


def test_another_version_on_a_node(nodes, model, tmp_path):
    package = streamllm.__file__
    with open(package) as file:
        text = file.read().replace(f'__version__ = "{streamllm.__version__}"', '__version__ = "0.0.9"')
    (tmp_path / "other.py").write_text(text)
    with nodes[1].instead_of(package, tmp_path / "other.py"):
        line = refusal(nodes[0], model, tmp_path)
    assert "on node-two has streamllm 0.0.9, and the engine on node-one" in line


def test_other_model_files_on_a_node(nodes, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    with nodes[1].instead_of(model, other):
        line = refusal(nodes[0], model, tmp_path)
    assert (
        "on node-two has other model files than the engine on node-one: config.json has other contents"
        in line
    )


def test_no_model_files_on_a_node(nodes, model, tmp_path):
    (tmp_path / "empty").mkdir()
    with nodes[1].instead_of(model, tmp_path / "empty"):
        line = refusal(nodes[0], model, tmp_path)
    assert "on 10.0.0.2): " in line and f"{model} holds no model" in line


def test_no_streamllm_on_a_node(nodes, model, tmp_path):
    (tmp_path / "empty").mkdir()
    with contextlib.ExitStack() as hidden:
        for folder in streamllm.__path__:  # an editable install has its native module in another one
            hidden.enter_context(nodes[1].instead_of(folder, tmp_path / "empty"))
        line = refusal(nodes[0], model, tmp_path)
    # An editable install still knows where its files should be.
    missing = r"No module named 'streamllm|No such file or directory: '.*/streamllm/"
    assert "on 10.0.0.2" in line and re.search(missing, line), line


def test_a_cluster_whose_token_is_another(nodes, model, tmp_path):
    line = refusal(nodes[0], model, tmp_path, RAY_ENVIRONMENT | {"RAY_AUTH_TOKEN": "0" * 64})
    assert "the Ray cluster at 10.0.0.1:6379 cannot be used: it asks for a token" in line


def test_an_engine_that_is_killed_leaves_no_worker(nodes, model, tmp_path):
    with serve(nodes[0], model, tmp_path, "-tp", "2") as server:
        server.send_signal(signal.SIGKILL)
        wait_for_no_worker(nodes, 10.0)


def test_a_cable_that_is_cut_ends_streams_and_processes(model, tmp_path):
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "ignore_eos": True, "stream": True}
    with (
        two_ray_nodes() as nodes,
        serve(nodes[0], model, tmp_path, "-tp", "2", "--worker-timeout", "3") as server,
        server.new_client() as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            events = list(itertools.islice(lines, 3))
            nodes[1].run("ip", "link", "set", "eth0", "down")
            cut = time.monotonic()
            events += lines
        assert time.monotonic() - cut < 6
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert "on 10.0.0.2) has given no sign of life for 3 s" in error["message"]
        assert client.get("/health").status_code == 503
        assert server.process.wait(30) == 1
        wait_for_no_worker(nodes, SILENCE_SECONDS)


def wait_for_no_worker(nodes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while running := [line for node in nodes for line in node.processes(WORKER)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)
