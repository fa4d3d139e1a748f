"""The offline API as vLLM's quick start uses it."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from streamllm import LLM, SamplingParams
from streamllm.errors import ConfigError, EngineDeadError, InvalidRequestError


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
    conversation = [{"role": "user", "content": "Why is the sky blue?"}]
    params = SamplingParams(temperature=0, max_tokens=30)
    (one,) = llm.chat(conversation, params)
    several = llm.chat([conversation, conversation], params)
    assert "light" in one.outputs[0].text
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
        ({"data_parallel_size": 2}, "--data-parallel-size 2"),
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


# -- priorities, salts, the cache --------------------------------------------------------------------------


def test_priorities_and_salts_ride_with_their_prompts(llm):
    llm.reset_prefix_cache()
    ids = llm.get_tokenizer().encode("One sentence that is long enough to fill a block or two. " * 4)
    params = SamplingParams(temperature=0, max_tokens=4)
    plain = {"prompt_token_ids": ids}
    prompts = [plain, {**plain, "cache_salt": "a"}, plain]
    expected = llm.generate(plain, params)[0].outputs[0].token_ids
    for priority in (None, 3, [2, 1, 0]):
        outputs = llm.generate(prompts, params, priority=priority)
        assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3
        assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert all(output.num_cached_tokens > 0 for output in outputs)
    assert llm.reset_prefix_cache() is True
    assert llm.stats().memory.cached_blocks == 0
    assert llm.generate(plain, params)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompts", "priority", "words"),
    [
        (["a", "b"], [1], "1 entries for 2 prompts"),
        (["a", "b"], [1, "x"], r"prompt\[1\]: priority"),
        ("a", 1.5, "priority"),
        ("a", True, "priority"),
        ([{"prompt": "a", "cache_salt": ""}, "b"], 0, r"prompt\[0\]: cache_salt"),
        ([{"prompt": "a", "cache_salt": ["x"]}], None, "cache_salt"),
        (["a", {"prompt": "b", "cache_salt": "x" * 129}], 0, r"prompt\[1\]: cache_salt"),
    ],
)
def test_priorities_and_salts_that_are_refused(llm, prompts, priority, words):
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True), priority=priority)
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0


def test_lower_priorities_run_first():
    llm = LLM(max_num_seqs=1, max_model_len=64, scheduling_policy="priority")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["a", "b", "c", "d"], params, priority=[9, 1, 5, -1])
    ends = [output.metrics.finished_time for output in outputs]
    # The first runs already when the others come.
    assert sorted(range(1, 4), key=ends.__getitem__) == [3, 1, 2]
    llm.shutdown()


# -- chat templates and the tokenizer ----------------------------------------------------------------------

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object"}}}
ONE = SamplingParams(temperature=0, max_tokens=1)


def test_the_tokenizer_writes_the_prompts_of_chat(llm):
    tokenizer = llm.get_tokenizer()
    for options in (
        {},
        {"tools": [TOOL]},
        {
            "chat_template": "{{ messages[-1].content }}: {{ colour }}",
            "chat_template_kwargs": {"colour": "red"},
        },
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        (output,) = llm.chat(CONVERSATION, ONE, **options)
        variables = options.pop("chat_template_kwargs", {})
        options.setdefault("add_generation_prompt", True)
        ids = tokenizer.apply_chat_template(CONVERSATION, **options, **variables)
        assert ids == output.prompt_token_ids
        text = tokenizer.apply_chat_template(CONVERSATION, **options, **variables, tokenize=False)
        assert tokenizer.decode(ids) == text and "What is 2 + 2?" in text
        assert ("add_up" in text) == ("tools" in options) and ("red" in text) == bool(variables)


def test_the_tokenizer_has_the_names_and_defaults_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    ids = [*tokenizer.encode("Hello there"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "Hello there<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello there"
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [tokenizer.eos_token_id, None]
    assert len(tokenizer) == tokenizer.vocab_size == 49152
    assert "messages" in tokenizer.chat_template


def test_the_content_format_is_what_the_template_gets(llm):
    template = "{{ messages[0].content is string }}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    shown = {}
    for name in ("auto", "string", "openai"):
        (output,) = llm.chat(parts, ONE, chat_template=template, chat_template_content_format=name)
        shown[name] = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert shown == {"auto": "True", "string": "True", "openai": "False"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"tools": "add_up"}, "tools must be a list"),
        ({"chat_template_content_format": "parts"}, "one of auto, string, openai"),
        ({"chat_template": "{% if %}"}, "not valid Jinja"),
        ({"chat_template_kwargs": {"messages": []}}, "must not set messages"),
    ],
)
def test_chats_that_are_refused(llm, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat(CONVERSATION, ONE, **options)


# -- the end -----------------------------------------------------------------------------------------------


def test_a_context_manager_closes_once_and_for_all():
    with LLM(max_model_len=512) as llm:
        tokenizer = llm.get_tokenizer()
        failed = []

        def generate() -> None:
            try:
                llm.generate(["x"] * 3, SamplingParams(max_tokens=400, ignore_eos=True))
            except EngineDeadError as error:
                failed.append(error)

        other = threading.Thread(target=generate)
        other.start()
        while not llm.stats().num_running:
            pass
    other.join(timeout=10)
    assert not other.is_alive() and len(failed) == 1
    llm.close()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="make a new one"):
        llm.generate("x")
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


def test_vllms_module_path():
    from streamllm.entrypoints.llm import LLM as under_vllms_path

    assert under_vllms_path is LLM


async def test_the_readmes_example_of_the_engine_in_another_program(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", readme, re.S) if "aclosing" in code)
    program: dict = {}
    exec(example, program)
    await program["main"]()
    assert len(capsys.readouterr().out) > 20 and not program["engine"].is_healthy
