"""The offline API as vLLM's quick start uses it."""

from __future__ import annotations

import asyncio

import pytest

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError, InvalidRequestError


@pytest.fixture(scope="module")
def llm():
    llm = LLM(gpu_memory_utilization=0.5, max_model_len=1024)
    yield llm
    llm.shutdown()


def test_the_vllm_quick_start(llm):
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished and output.outputs[0].text
        assert 1 <= len(output.outputs[0].token_ids) <= 100
        assert output.outputs[0].finish_reason in ("stop", "length")


def test_chat_answers_one_conversation_or_several(llm):
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=30)
    (one,) = llm.chat(conversation, params)
    several = llm.chat([conversation, conversation], params)
    assert "Paris" in one.outputs[0].text
    assert [o.outputs[0].text for o in several] == [one.outputs[0].text] * 2


async def test_inside_a_running_event_loop(llm):
    assert asyncio.get_running_loop().is_running()
    (output,) = llm.generate("Two plus two is", SamplingParams(max_tokens=4))
    assert output.outputs[0].token_ids


def test_one_params_a_prompt_and_token_ids(llm):
    ids = llm.get_tokenizer().encode("The sky is")
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5)]
    by_ids, by_text = llm.generate([{"prompt_token_ids": ids}, "The sky is"], params)
    assert by_ids.prompt is None and by_ids.prompt_token_ids == by_text.prompt_token_ids == ids
    assert by_text.outputs[0].token_ids[:3] == by_ids.outputs[0].token_ids
    assert llm.generate(ids, params[0])[0].outputs[0].token_ids == by_ids.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", None, "empty"),
        ([""], None, "empty"),
        ([[10**9]], None, "vocabulary"),
        ([3.5], None, r"prompts\[0\]"),
        ([{"text": "x"}], None, r"prompts\[0\]"),
        ("x " * 2000, None, "1024"),
        (["a", "b"], [SamplingParams()], "1 entries for 2 prompts"),
    ],
)
def test_bad_input_is_a_value_error_and_the_engine_lives_on(llm, prompts, params, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, params)
    assert llm.generate("ok", SamplingParams(max_tokens=1))[0].finished
    assert llm._engine.stats().num_used_blocks == 0


def test_one_bad_prompt_among_good_ones_runs_none(llm):
    before = llm._engine.stats().finished["length"]
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", ""], SamplingParams(max_tokens=5))
    stats = llm._engine.stats()
    assert (stats.finished["length"], stats.num_running, stats.num_used_blocks) == (before, 0, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"max_modle_len": 5}, "max_model_len"),
        ({"speculative_config": {"n": 1}}, "--speculative-config"),
        ({"max_model_len": 10**6}, "8192"),
        ({"max_model_len": 4096, "num_kv_blocks": 8}, "--max-model-len 128"),
        ({"kv_cache_memory_bytes": 1}, "--kv-cache-memory-bytes"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(**settings)
