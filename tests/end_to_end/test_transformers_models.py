"""Models that Transformers runs through our attention, in the whole engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import cpu_target
from helpers.reference import assert_greedy
from helpers.transformers_models import CHEAP, OTHERS, WINDOW, make_other_model

from streamllm import LLM, SamplingParams
from streamllm.engine import gpu_loader
from streamllm.errors import ModelLoadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CHEAP_RUNS = list(zip(CHEAP, (16, 256), strict=True))
SETTINGS = {"dtype": "float32", "threads": 1, "num_kv_blocks": 200, "debug_kv_blocks": True}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """name -> (the model in Transformers, its folder)."""
    made: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (make_other_model(folder, name), folder)
        return made[name]

    return get


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(20, 320) for _ in range(length)] for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param(name, budget, marks=[] if (name, budget) in CHEAP_RUNS else pytest.mark.slow)
        for name in OTHERS
        for budget in (16, 256)
    ],
)
def test_greedy_tokens_equal_transformers(model_of, name, budget):
    """In a mixed batch, then with prefix hits: each prompt once whole and cut after each of the lengths."""
    reference, folder = model_of(name)
    llm = LLM(str(folder), **SETTINGS, max_num_batched_tokens=budget)
    (longest,) = prompts_of([150])
    prompts = prompts_of([1, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 100], seed=1)
    prompts += [longest[:length] for length in (150, 32, 33, 48, 149)]
    differing = 0
    for batch in (prompts[:-4], prompts[-4:]):
        for prompt, output in zip(batch, generate(llm, batch), strict=True):
            differing += assert_greedy(reference, prompt, output.outputs[0].token_ids)
    assert differing <= len(prompts)
    assert llm._engine.stats().prefix_cache_hits > 100
    llm.shutdown()


def test_preemption_changes_no_token(model_of):
    reference, folder = model_of("deepseek-v3")
    llm = LLM(str(folder), **{**SETTINGS, "num_kv_blocks": 16, "max_model_len": 256})
    prompts = prompts_of([40, 50, 60, 70], seed=2)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids)
    assert llm._engine.stats().num_preemptions > 0
    llm.shutdown()


def test_logprobs_of_outputs_and_prompts_and_embeddings(model_of):
    """What is made from logits of many rows, and from hidden states."""
    reference, folder = model_of("cohere2")
    llm = LLM(str(folder), **SETTINGS, max_num_batched_tokens=32)
    (prompt,) = prompts_of([90], seed=3)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (output,) = generate(llm, [prompt], params)
    tokens = prompt + output.outputs[0].token_ids
    with torch.inference_mode():
        result = reference(torch.tensor([tokens]), output_hidden_states=True)
    expected = torch.log_softmax(result.logits[0].double(), -1)
    reported = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    for position, entry in enumerate(reported):
        token = tokens[position + 1]
        assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
    (embedding,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
    hidden = result.hidden_states[-1][0, len(prompt) - 1].double()
    np.testing.assert_allclose(embedding.outputs.embedding, hidden / hidden.norm(), atol=1e-4)
    llm.shutdown()


def test_on_a_gpu_it_is_eager(model_of, monkeypatch):
    reference, folder = model_of("cohere2")
    target = cpu_target(graphs=True)
    monkeypatch.setattr(gpu_loader, "find_gpu", lambda config: target)
    llm = LLM(str(folder), backend="cuda", **SETTINGS, max_num_batched_tokens=64)
    prompts = prompts_of([70, 5, WINDOW], seed=4)
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids)
    assert target.recorder.num_replays == 0
    llm.shutdown()


def test_what_cannot_run_is_refused_at_start(model_of, tmp_path):
    folder = model_of("cohere2")[1]
    text = (folder / "config.json").read_text().replace('"cohere2"', '"cohere9"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"neither streamllm nor Transformers .* 'cohere9'"):
        LLM(str(tmp_path))
