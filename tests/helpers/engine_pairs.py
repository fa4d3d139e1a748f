"""One model on two engines that must agree to the last bit, one of them in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from streamllm import LLM, RequestOutput, SamplingParams
from streamllm.structured_outputs import StructuredOutputsParams

Pair = tuple[LLM, LLM]

PROMPTS = ["The quick brown fox", "A language model predicts the next token; a server", "and the dog", "A"]
EXACT = {"dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 128, "threads": 1}

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "four choices": {"temperature": 1.0, "seed": 5, "n": 4, "logprobs": 0},
    "penalties": {
        "temperature": 0.8, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.3, "prompt_logprobs": 2,
    },
    "rules": {"temperature": 1.0, "seed": 3, "logit_bias": {40: 5.0}, "bad_words": ["the"], "min_tokens": 5},
    "grammar": {
        "temperature": 1.0, "seed": 2, "structured_outputs": StructuredOutputsParams(regex="[ab]{8}"),
    },
}  # fmt: skip
"""Sampling parameters that take different ways through a runner, by name."""


def same_outputs(
    pair: Pair, prompts: Sequence[Any], params: SamplingParams, **options: Any
) -> list[RequestOutput]:
    """What both generate, after a look whether it is the same."""
    whole, other = (llm.generate(prompts, params, use_tqdm=False, **options) for llm in pair)
    for left, right in zip(whole, other, strict=True):
        assert left.prompt_logprobs == right.prompt_logprobs
        assert [dataclasses.asdict(c) for c in left.outputs] == [dataclasses.asdict(c) for c in right.outputs]
    return other


def check_prefix_hits_and_preemptions(pair: Pair) -> None:
    """Prompts of which the pool (``EXACT``) holds a few, twice."""
    prompts = [{"prompt_token_ids": [7 + i % 50 for i in range(start, start + 60)]} for start in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in range(2):
        same_outputs(pair, prompts, params)
    whole, other = (llm.stats() for llm in pair)
    assert whole.num_preemptions == other.num_preemptions > 0
    assert whole.prefix_cache_hits == other.prefix_cache_hits > 0


def check_embeddings(pair: Pair) -> None:
    whole, other = (llm.embed(PROMPTS, use_tqdm=False) for llm in pair)
    assert [e.outputs.embedding for e in whole] == [e.outputs.embedding for e in other]
