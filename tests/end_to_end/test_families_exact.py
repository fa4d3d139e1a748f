"""Every family through the engine: greedy tokens against Transformers, prefix hits included."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers.reference import assert_greedy
from helpers.tiny_models import TINY, VOCAB_SIZE, WINDOW, load_reference, make_tiny_model

from streamllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EDGES = [200, *(edge + step for edge in (16, WINDOW, 48, 3 * WINDOW, 128) for step in (-1, 0, 1)), 1, 200]
"""Lengths around each end of a block, window and chunk, after one that holds them all."""


def random_tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, VOCAB_SIZE) for _ in range(length)]


def make_llm(path: Path, budget: int) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=budget,
        num_kv_blocks=256,
        debug_kv_blocks=True,
    )


def check(path: Path, budget: int) -> None:
    llm = make_llm(path, budget)
    reference = load_reference(path)
    longest = random_tokens(max(EDGES))
    # One after the other, so that all but the first find their beginning in the prefix cache.
    for length in EDGES:
        (output,) = llm.generate({"prompt_token_ids": longest[:length]}, GREEDY, use_tqdm=False)
        assert_greedy(reference, longest[:length], output.outputs[0].token_ids)
    assert llm._engine.stats().prefix_cache_hits > 800
    prompts = [random_tokens(length, seed=length) for length in (1, 17, WINDOW, 90)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids)
    llm.shutdown()


@pytest.mark.parametrize("budget", [48, *(pytest.param(b, marks=pytest.mark.slow) for b in (7, 16, 2048))])
@pytest.mark.parametrize("family", TINY)
def test_every_family_agrees_with_transformers(family, budget, tmp_path):
    check(make_tiny_model(tmp_path / family, family), budget)


TRAINED = 64
"""Positions for which the short factors of the LongRoPE model are made."""


@pytest.fixture(scope="module")
def longrope_path(tmp_path_factory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("longrope"),
        "phi3",
        sliding_window=None,
        max_position_embeddings=256,
        original_max_position_embeddings=TRAINED,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.5, 2.2, 2.9, 3.6],
        },
    )


@pytest.mark.parametrize("budget", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_longrope_agrees_with_transformers_generate(budget, longrope_path):
    """Below the trained length, beyond it, and across: there transformers computes all keys anew."""
    import torch

    llm = make_llm(longrope_path, budget)
    reference = load_reference(longrope_path)
    reference.generation_config.eos_token_id = None
    longest = random_tokens(130)
    lengths = (20, TRAINED - 6, TRAINED - 1, TRAINED, TRAINED + 1, 120, TRAINED - 4, 130)
    params = SamplingParams(temperature=0, max_tokens=16, n=2, ignore_eos=True)

    def expected(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
            )
        return out[0, len(prompt) :].tolist()

    prompts = [longest[:length] for length in lengths]
    alone = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for prompt in prompts]
    together = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, *outputs in zip(prompts, alone, together, strict=True):
        for output in outputs:
            assert [choice.token_ids for choice in output.outputs] == [expected(prompt)] * 2
    # Nothing that was computed at one length is found at another.
    assert alone[lengths.index(TRAINED)].num_cached_tokens == TRAINED - 16
    assert llm._engine.stats().num_preemptions > 0
    llm.shutdown()
