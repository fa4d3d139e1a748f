"""The int8 KV cache under everything that moves, shares and recomputes blocks: bit for bit the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams
from streamllm.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "mistral", sliding_window=40)


def new_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "kv_cache_dtype": "int8", "max_model_len": 128, **settings})


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    llm = new_llm(model_path)
    yield llm
    llm.shutdown()


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(20, 300) for _ in range(length)] for length in lengths]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(choice.token_ids, choice.logprobs) for output in outputs for choice in output.outputs]


def test_choices_that_part_in_the_midst_of_a_block(llm: LLM) -> None:
    """Greedy twins: the second one's block is a copy, with its scales."""
    for prompt in prompts_of(21, 39):
        first, second = answers(run(llm, [prompt], PARAMS.clone(n=2)))
        assert first == second == answers(run(llm, [prompt]))[0]


def test_a_prefix_from_the_cache(llm: LLM) -> None:
    (prompt,) = prompts_of(77)
    (cold,), (warm,) = run(llm, [prompt]), run(llm, [prompt])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    assert answers([cold]) == answers([warm])


def test_preempted_sequences_and_small_chunks(llm: LLM, model_path: Path) -> None:
    prompts, params = prompts_of(30, 17, 31, 45, 80), PARAMS.clone(max_tokens=40)
    small = new_llm(model_path, num_kv_blocks=9, max_num_batched_tokens=24)
    try:
        assert answers(run(small, prompts, params)) == answers(run(llm, prompts, params))
        assert small.stats().num_preemptions > 0
    finally:
        small.shutdown()


def test_it_is_not_the_float_cache_but_close(llm: LLM, model_path: Path) -> None:
    prompts = prompts_of(30, 60)
    exact = new_llm(model_path, kv_cache_dtype="float32")
    try:
        for ours, theirs in zip(answers(run(llm, prompts)), answers(run(exact, prompts)), strict=True):
            token_id = theirs[0][0]
            assert 0 < abs(ours[1][0][token_id].logprob - theirs[1][0][token_id].logprob) < 0.2
    finally:
        exact.shutdown()
