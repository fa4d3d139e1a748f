"""A model in stages, each a worker process, against the same model in one process: equal to the last bit."""

from __future__ import annotations

import pytest
from helpers.engine_pairs import (
    EXACT,
    FIELDS,
    PROMPTS,
    check_embeddings,
    check_prefix_hits_and_preemptions,
    same_outputs,
)
from helpers.lora_adapters import save_adapter
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, LoRARequest, SamplingParams
from streamllm.config import EngineConfig
from streamllm.errors import ConfigError
from streamllm.runner.distributed import launchers
from streamllm.runner.distributed.placement import Placement


def start(path, **settings) -> LLM:
    return LLM(str(path), **{**EXACT, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("pipeline") / "base", num_hidden_layers=3)


@pytest.fixture(scope="module")
def pair(model):
    """The same engine twice: in one process, and in two stages."""
    settings = {"enable_lora": True, "enable_prefix_caching": True}
    with start(model, **settings) as whole, start(model, pipeline_parallel_size=2, **settings) as staged:
        yield whole, staged


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_outputs_are_equal(pair, fields):
    outputs = same_outputs(pair, PROMPTS, SamplingParams(max_tokens=12, **fields))
    assert all(choice.token_ids for output in outputs for choice in output.outputs)


def test_prefix_hits_and_preemptions_are_equal(pair):
    check_prefix_hits_and_preemptions(pair)


def test_embeddings_are_equal(pair):
    check_embeddings(pair)


def test_adapters_are_equal(pair, model, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = same_outputs(pair, PROMPTS, params)
    path = save_adapter(tmp_path / "adapter", model, seed=3)
    adapted = same_outputs(pair, PROMPTS, params, lora_request=LoRARequest("a", 1, str(path)))
    assert [o.outputs[0].token_ids for o in plain] != [o.outputs[0].token_ids for o in adapted]


def test_more_stages_than_layers_are_refused(model, monkeypatch):
    monkeypatch.setattr(
        launchers,
        "place_workers",
        lambda config: pytest.fail("what cannot be is found before workers are started"),
    )
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 4 is more than the model's 3 layers"):
        start(model, pipeline_parallel_size=4)


def test_one_process_and_several_stages_contradict():
    with pytest.raises(ConfigError, match="uni runs one process, and --pipeline-parallel-size 2 needs 2"):
        EngineConfig(model="m", pipeline_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_other_families_are_equal(family, tmp_path):
    path = make_tiny_model(tmp_path, family, num_hidden_layers=4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    with start(path) as whole, start(path, pipeline_parallel_size=2) as staged:
        same_outputs((whole, staged), PROMPTS, params)


@pytest.mark.slow
def test_the_reference_in_stages(tmp_path):
    """Its products are not the same bits for every batch, and micro-batches are others."""
    path = make_tiny_model(tmp_path, "gemma2", num_hidden_layers=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"backend": "torch"}
    with start(path, **settings) as whole, start(path, pipeline_parallel_size=2, **settings) as staged:
        left, right = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (whole, staged))
    assert [o.outputs[0].token_ids for o in left] == [o.outputs[0].token_ids for o in right]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_default_model_is_equal(dtype):
    settings = {"dtype": dtype, "max_model_len": 256, "threads": 1, "num_gpu_blocks_override": 64}
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3,"]
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=1)
    with LLM(**settings) as whole, LLM(pipeline_parallel_size=2, **settings) as staged:
        outputs = same_outputs((whole, staged), prompts, params)
    assert "Paris" in outputs[0].outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_stages_of_two_ranks(family, tmp_path, monkeypatch):
    """As many ranks without stages give the same bits."""

    def any_core(config: EngineConfig) -> list[Placement]:
        return [Placement(None, 1, {"OMP_NUM_THREADS": "1"})] * config.world_size

    monkeypatch.setattr(launchers, "place_workers", any_core)
    path = make_tiny_model(tmp_path, family)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    settings = {"tensor_parallel_size": 2}
    with start(path, **settings) as flat, start(path, pipeline_parallel_size=2, **settings) as staged:
        same_outputs((flat, staged), PROMPTS, params)
