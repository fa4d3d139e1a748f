"""Workers as actors of a local Ray cluster; without the extra ray, what is said about that."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from helpers.live_server import free_port
from helpers.tiny_models import make_tiny_model
from helpers.worker_processes import wait_until_gone

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError, EngineDeadError

HAS_RAY = importlib.util.find_spec("ray") is not None
SETTINGS = {"dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 128, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The quick brown fox", "and the dog"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("ray") / "base")


def on_ray(model, **settings) -> LLM:
    return LLM(str(model), distributed_executor_backend="ray", **{**SETTINGS, **settings})


@pytest.mark.skipif(HAS_RAY, reason="the extra is installed")
def test_without_the_extra_one_line_says_so(model):
    with pytest.raises(ConfigError, match=r"needs the extra ray: pip install 'streamllm\[ray\]'"):
        on_ray(model)


needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the extra ray")


@needs_ray
def test_a_cluster_that_does_not_answer(model, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"Ray cluster at {address} .* does not answer"):
        on_ray(model)


@needs_ray
def test_an_address_without_a_word(model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(ConfigError, match=r"^\$RAY_ADDRESS is empty: let it name a Ray cluster"):
        on_ray(model)


@pytest.fixture(scope="module")
def cluster():
    """Two cores, whatever the machine has, and whatever other cluster runs on it."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@needs_ray
@pytest.mark.slow
def test_two_actors_give_the_same_tokens(model, cluster):
    with LLM(str(model), **SETTINGS) as whole, on_ray(model, tensor_parallel_size=2) as divided:
        one, two = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for llm in (whole, divided))
    assert [o.outputs[0].token_ids for o in one] == [o.outputs[0].token_ids for o in two]


@needs_ray
@pytest.mark.slow
def test_more_workers_than_the_cluster_has_cores_for(model, cluster):
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 needs 2 times 2 CPU, .* room for 1 "):
        on_ray(model, tensor_parallel_size=2, threads=2)


@needs_ray
@pytest.mark.slow
def test_an_actor_that_is_killed_takes_the_engine_with_it(model, cluster):
    with on_ray(model) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        (link,) = llm._engine._executor._links
        assert link.launched.ending() is None
        pid = int(link.name.partition("pid ")[2].split()[0])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker 0 \(pid {pid} on .*\) has died"):
            for _ in range(1000):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        wait_until_gone([pid], 2.0)
