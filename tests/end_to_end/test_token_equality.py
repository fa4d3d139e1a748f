"""Greedy tokens against Transformers in float32, and our own runs against each other, bit for bit."""

from __future__ import annotations

import functools
import random

import pytest
from helpers.reference import assert_greedy, load_transformers, teacher_forced_logits
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def prompts_of(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(20, vocab_size) for _ in range(length)] for length in lengths]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, *, together: bool = True) -> list:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if together:
        outputs = llm.generate(inputs, params, use_tqdm=False)
    else:
        outputs = [llm.generate(one, params, use_tqdm=False)[0] for one in inputs]
    return [output.outputs[0] for output in outputs]


def same(left, right) -> None:
    """Token for token and bit for bit."""
    assert left.token_ids == right.token_ids
    assert left.text == right.text
    assert left.logprobs == right.logprobs


@functools.cache
def tiny(family: str, tmp_root: str):
    from pathlib import Path

    return make_tiny_model(Path(tmp_root) / family, family)


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("tiny"))


def check_family(path, budget: int, lengths: list[int], *, together: bool) -> None:
    llm = LLM(str(path), dtype="float32", max_num_batched_tokens=budget, seed=0)
    try:
        reference = load_transformers(path)
        prompts = prompts_of(lengths, reference.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = run(llm, prompts, params, together=together)
        differing = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.token_ids) == 24
            differing += assert_greedy(reference, prompt, output.token_ids)
        # A test in which everything is a near tie would prove nothing.
        assert differing <= len(prompts)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [16, 2048])
def test_tiny_models_agree_with_transformers(family, budget, tiny_root):
    check_family(tiny(family, tiny_root), budget, [1, 2, 15, 16, 17, 100, 333], together=True)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 2048])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_agree_with_transformers_everywhere(family, budget, together, tiny_root):
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 700, 1100, 1500]
    check_family(tiny(family, tiny_root), budget, lengths, together=together)


@pytest.fixture(scope="module")
def default_reference(default_model_path):
    return load_transformers(default_model_path)


@pytest.fixture(scope="module")
def llm():
    llm = LLM(dtype="float32")
    yield llm
    llm.shutdown()


def test_the_default_model_agrees_with_transformers(llm, default_reference):
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, " * 30]
    prompts = [llm.get_tokenizer().encode(text) for text in texts] + prompts_of([1, 17, 257], 49_000)
    outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(default_reference, prompt, output.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_the_default_model_agrees_with_transformers_everywhere(budget, together, default_reference):
    llm = LLM(dtype="float32", max_num_batched_tokens=budget)
    prompts = prompts_of([1, 2, 16, 17, 64, 255, 256, 257, 600, 1000, 1500], 49_000, seed=budget)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(prompts, run(llm, prompts, params, together=together), strict=True):
        assert_greedy(default_reference, prompt, output.token_ids)
    llm.shutdown()


def test_logprobs_are_those_of_transformers(llm, default_reference):
    import torch

    prompt = llm.get_tokenizer().encode("The three primary colours are")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    (output,) = run(llm, [prompt], params)
    expected = torch.log_softmax(
        torch.tensor(teacher_forced_logits(default_reference, prompt, output.token_ids)).double(), -1
    )
    assert output.logprobs is not None
    total = 0.0
    for position, entry in enumerate(output.logprobs):
        assert next(iter(entry)) == output.token_ids[position]
        total += entry[output.token_ids[position]].logprob
        top = expected[position].topk(5)
        assert [t for t in sorted(entry, key=lambda t: entry[t].rank)] == top.indices.tolist()
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}])
def test_a_request_gives_the_same_bits_alone_in_a_batch_and_in_any_chunks(sampling, llm):
    prompts = prompts_of([5, 40, 90, 16, 17, 130], 49_000, seed=3)
    params = SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True, **sampling)
    alone = run(llm, prompts, params, together=False)
    for left, right in zip(alone, run(llm, prompts, params), strict=True):
        same(left, right)
    for budget, settings in ((7, {}), (33, {"enable_prefix_caching": False})):
        other = LLM(dtype="float32", max_num_batched_tokens=budget, threads=1, **settings)
        for left, right in zip(alone, run(other, prompts, params), strict=True):
            same(left, right)
        other.shutdown()


@pytest.mark.slow
def test_a_prefix_hit_a_partial_one_and_a_miss_give_the_same_bits(llm):
    (prompt,) = prompts_of([150], 49_000, seed=9)
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=8, logprobs=2, ignore_eos=True)
    cuts = [1, 15, 16, 17, 31, 32, 33, 100, 149, 150]
    llm._engine.reset_prefix_cache()
    missed = []
    for cut in cuts:
        missed += run(llm, [prompt[:cut]], params)
        llm._engine.reset_prefix_cache()
    run(llm, [prompt], params)
    for cut, miss in zip(cuts, missed, strict=True):
        (output,) = llm.generate({"prompt_token_ids": prompt[:cut]}, params, use_tqdm=False)
        assert output.num_cached_tokens == (cut - 1) // 16 * 16
        same(output.outputs[0], miss)


@pytest.mark.slow
def test_eviction_changes_nothing():
    small = LLM(dtype="float32", num_kv_blocks=16, max_model_len=256)
    prompts = prompts_of([100, 90, 110, 80], 49_000, seed=10)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    first = run(small, prompts, params, together=False)
    for left, right in zip(first, run(small, prompts, params, together=False), strict=True):
        same(left, right)
    small.shutdown()


def test_one_of_eight_choices_is_the_single_choice(llm):
    (prompt,) = prompts_of([45], 49_000, seed=12)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=1, ignore_eos=True)
    (single,) = run(llm, [prompt], params)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params.clone(n=8), use_tqdm=False)
    same(output.outputs[0], single)
    assert len({choice.text for choice in output.outputs}) == 8


@pytest.mark.slow
def test_a_batch_of_32_gives_the_same_bits_under_every_budget(llm):
    rng = random.Random(5)
    prompts = prompts_of([rng.randint(1, 200) for _ in range(32)], 49_000, seed=5)
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, logprobs=3, ignore_eos=True)
    alone = run(llm, prompts, params, together=False)
    for budget in (1, 2, 3, 5, 8, 13, 16, 21, 32, 47, 64):
        other = LLM(dtype="float32", max_num_batched_tokens=budget)
        for left, right in zip(alone, run(other, prompts, params), strict=True):
            same(left, right)
        other.shutdown()


@pytest.mark.parametrize("budget", [pytest.param(16, marks=pytest.mark.slow), 2048])
def test_layers_of_different_windows_agree_with_transformers(budget, tmp_path):
    """Two KV groups, with prefix hits: every prompt but the first begins like one before it."""
    path = make_tiny_model(
        tmp_path / "model", "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1
    )
    llm = LLM(
        str(path),
        dtype="float32",
        max_num_batched_tokens=budget,
        max_model_len=256,
        num_kv_blocks=256,
        debug_kv_blocks=True,
    )
    reference = load_transformers(path)
    assert len(llm._engine._windows) == 2
    (longest,) = prompts_of([200], reference.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for length in (200, 23, 24, 25, 47, 48, 49, 72, 130, 200):
        (output,) = run(llm, [longest[:length]], params)
        assert_greedy(reference, longest[:length], output.token_ids)
    assert llm._engine.stats().prefix_cache_hits > 300
    llm.shutdown()


@pytest.mark.slow
def test_preemption_changes_nothing(llm):
    prompts = prompts_of([40, 50, 60, 70], 49_000, seed=4)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=11, logprobs=0, ignore_eos=True)
    alone = run(llm, prompts, params, together=False)
    small = LLM(dtype="float32", num_kv_blocks=16, max_model_len=256)
    pressed = run(small, prompts, params)
    assert small._engine.stats().num_preemptions > 0
    for left, right in zip(alone, pressed, strict=True):
        same(left, right)
    small.shutdown()


def test_seeds(llm):
    def texts(**fields) -> list[str]:
        params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, **fields)
        return [choice.text for choice in llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs]

    four = texts(seed=5, n=4)
    assert len(set(four)) == 4
    assert texts(seed=5, n=4) == four
    assert texts(seed=5) == four[:1]
    assert texts(seed=6) != four[:1]
    assert texts() != texts()


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_scaled_rotary_embeddings_agree_with_transformers(rope, tmp_path):
    path = make_tiny_model(tmp_path / "model", "llama", rope_parameters=rope, max_position_embeddings=256)
    check_family(path, 32, [1, 40, 64, 65, 150, 200], together=True)


def test_dynamic_rotary_embeddings_agree_with_transformers(tmp_path):
    import torch

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path = make_tiny_model(tmp_path / "model", "llama", rope_parameters=rope, max_position_embeddings=64)
    llm = LLM(str(path), dtype="float32", max_num_batched_tokens=48)
    # Within the trained length, crossing it while decoding, and a prompt that is longer already.
    for length in (20, 58, 63, 64, 65, 120):
        reference = load_transformers(path)  # anew: the longest length seen so far stays in a model
        (prompt,) = prompts_of([length], reference.config.vocab_size, seed=length)
        (output,) = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        with torch.inference_mode():
            # The base follows the sequence's length, so teacher forcing in one pass is another computation.
            reference.generation_config.eos_token_id = None
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
            )
        assert output.token_ids == expected[0, length:].tolist()
    llm.shutdown()


@pytest.mark.parametrize("budget", [7, 256])
def test_a_sliding_window_agrees_with_transformers(budget, tmp_path):
    path = make_tiny_model(tmp_path / "model", "mistral", sliding_window=24)
    check_family(path, budget, [1, 23, 24, 25, 72, 200], together=True)


@pytest.mark.slow
def test_a_float16_cache_stays_close(llm, default_reference):
    """Not the exact mode: the tokens of plain text still are the reference's, or close seconds."""
    half = LLM(dtype="float32", kv_cache_dtype="float16")
    prompt = llm.get_tokenizer().encode("The capital of France is")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = run(half, [prompt], params)
    logits = teacher_forced_logits(default_reference, prompt, output.token_ids)
    for position, token_id in enumerate(output.token_ids):
        assert logits[position].max() - logits[position, token_id] < 0.05
    half.shutdown()
