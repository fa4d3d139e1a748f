"""Whole engines on a GPU, graphs on and off: Transformers' tokens, the CPU's results, bits that do not depend
on the batch, memory as asked for."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers.reference import assert_greedy, load_transformers
from helpers.tiny_models import FAMILIES, make_tiny_model

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError
from streamllm.ops.gpu import dispatch
from streamllm.structured_outputs import StructuredOutputsParams

OTHER_FAMILIES = ("gemma3", "gpt-oss", "olmo3", "opt", "qwen2moe")
"""Those that between them have every operation, windows of both sorts of layers, and several rotary
embeddings."""

LENGTHS = [1, 2, 15, 16, 17, 100, 255, 256, 257, 700]
REQUESTS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "n": 3, "logprobs": 3},
    "top-k": {"temperature": 0.8, "seed": 7, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias and bans": {"temperature": 0, "logit_bias": {65: 5.0}, "min_tokens": 6, "bad_words": ["the"]},
    "allowed": {"temperature": 1.0, "seed": 1, "allowed_token_ids": [40, 41, 50, 60]},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "[a-f]{3,9}"}},
}


def prompts_of(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(20, 320) for _ in range(length)]} for length in lengths]


def engine(path, **settings) -> LLM:
    defaults = {"backend": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 2**28, "max_num_seqs": 32}
    return LLM(str(path), **{**defaults, **settings})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(family: str):
        if family not in made:
            fields = {"sliding_window": 40} if family == "mistral" else {}
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family, **fields)
        return made[family]

    return get


@pytest.mark.parametrize(
    ("family", "eager"),
    [*itertools.product(FAMILIES, (True, False)), *((family, False) for family in OTHER_FAMILIES)],
)
def test_tokens_are_those_of_transformers(models, family, eager):
    reference = load_transformers(models(family))
    prompts = prompts_of(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for budget in (64, 2048):
        llm = engine(models(family), enforce_eager=eager, max_num_batched_tokens=budget)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.shutdown()
        differing = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            differing += assert_greedy(reference, prompt["prompt_token_ids"], output.outputs[0].token_ids)
        assert differing <= len(prompts)


@pytest.fixture(scope="module")
def cpu(models):
    llm = engine(models("qwen3"), backend="cpu")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module", params=["cuda", "triton"])
def kernels_name(request):
    """Either sort of kernels; those in CUDA C++ only where they were built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, request.param)
        try:
            dispatch.kernel_choice()
        except ConfigError as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def gpu(request, models, kernels_name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, kernels_name)
        llm = engine(models("qwen3"), enforce_eager=request.param)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("request_name", REQUESTS)
def test_results_are_those_of_the_cpu(cpu, gpu, request_name):
    fields = {"max_tokens": 20, **REQUESTS[request_name]}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    params, prompts = SamplingParams(**fields), prompts_of([3, 40, 17, 300])
    for expected, actual in zip(
        cpu.generate(prompts, params, use_tqdm=False),
        gpu.generate(prompts, params, use_tqdm=False),
        strict=True,
    ):
        assert [choice.token_ids for choice in actual.outputs] == [
            choice.token_ids for choice in expected.outputs
        ]
        for one, two in zip(expected.outputs, actual.outputs, strict=True):
            for left, right in zip(one.logprobs or [], two.logprobs or [], strict=True):
                for token_id, entry in left.items():
                    assert right[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
        for left, right in zip(expected.prompt_logprobs or [], actual.prompt_logprobs or [], strict=True):
            for token_id, entry in (left or {}).items():
                assert right[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_embeddings_are_those_of_the_cpu(cpu, gpu):
    texts = ["The quick brown fox", "東京 " * 20]
    for one, two in zip(cpu.embed(texts, use_tqdm=False), gpu.embed(texts, use_tqdm=False), strict=True):
        assert one.outputs.embedding == pytest.approx(two.outputs.embedding, abs=1e-4)


def test_a_request_gives_the_same_bits_alone_and_in_a_batch(gpu):
    """Each prompt fits into one chunk, so that the same kernels compute its rows."""
    prompts = prompts_of([5, 40, 90, 16, 17, 130], seed=3)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=16, logprobs=3, ignore_eos=True)
    together = gpu.generate(prompts, params, use_tqdm=False)
    for prompt, expected in zip(prompts, together, strict=True):
        gpu.reset_prefix_cache()
        (alone,) = gpu.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
        assert alone.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({"dtype": "float16"}, 0.05), ({"dtype": "bfloat16"}, 0.3), ({"kv_cache_dtype": "fp8"}, 0.5)],
)
def test_lower_precisions_are_close(models, gpu, settings, tolerance):
    prompts = prompts_of([50, 7])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    coarse = engine(models("qwen3"), **settings)
    for one, two in zip(
        gpu.generate(prompts, params, use_tqdm=False),
        coarse.generate(prompts, params, use_tqdm=False),
        strict=True,
    ):
        for left, right in zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True):
            for token_id, entry in left.items():
                assert right[token_id].logprob == pytest.approx(entry.logprob, abs=tolerance)
    coarse.shutdown()


def test_memory_is_what_was_asked_for(models):
    import torch

    free_before, total = torch.cuda.mem_get_info()
    llm = engine(models("llama"), kv_cache_memory_bytes=None, gpu_memory_utilization=0.3)
    llm.generate(prompts_of([500] * 8), SamplingParams(max_tokens=8, logprobs=20), use_tqdm=False)
    taken = free_before - torch.cuda.mem_get_info()[0]
    llm.shutdown()
    assert 0.25 * total < taken <= 0.3 * total
