"""A model in one worker process against the same model in the engine's own process: equal to the last bit."""

from __future__ import annotations

import os
import sys

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
from helpers.worker_processes import FailAfter, ForbidToken, wait_until_gone, worker_pids

from streamllm import LLM, LoRARequest, SamplingParams
from streamllm.errors import ConfigError, InvalidRequestError, ModelLoadError, RequestFailedError
from streamllm.logits_processors import register_logits_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("one-worker") / "base")


@pytest.fixture(scope="module")
def pair(model):
    """The same engine twice: as it is, and with a worker."""
    settings = {**EXACT, "enable_lora": True, "max_cpu_loras": 8}
    with (
        LLM(str(model), **settings) as whole,
        LLM(str(model), distributed_executor_backend="mp", **settings) as apart,
    ):
        yield whole, apart


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_outputs_are_equal(pair, fields):
    outputs = same_outputs(pair, PROMPTS, SamplingParams(max_tokens=12, **fields))
    assert all(choice.token_ids for output in outputs for choice in output.outputs)


def test_prefix_hits_and_preemptions_are_equal(pair):
    check_prefix_hits_and_preemptions(pair)


def test_embeddings_are_equal(pair):
    check_embeddings(pair)


def test_adapters_are_equal_and_go_when_nobody_asks_for_them(pair, model, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(10):  # more than are kept
        folder = save_adapter(tmp_path / str(number), model, seed=number)
        request = LoRARequest(f"a{number}", number + 1, str(folder))
        same_outputs(pair, PROMPTS[:1], params, lora_request=request)
    sent = pair[1]._engine._executor._adapters
    assert sum(sent._num_uses.values()) - len(sent._collected) <= 8
    with pytest.raises(InvalidRequestError, match="There is no folder"):
        pair[1].generate("a", params, lora_request=LoRARequest("none", 99, str(tmp_path / "none")))


def test_logits_processors_run_in_the_worker(pair):
    register_logits_processor("forbid", lambda extra, size: ForbidToken(extra["token"]))
    register_logits_processor("fail", lambda extra, size: FailAfter())
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (plain,) = same_outputs(pair, PROMPTS[:1], greedy)
    first = plain.outputs[0].token_ids[0]
    forbid = greedy.clone(logits_processors=["forbid"], extra_args={"token": first})
    (output,) = same_outputs(pair, PROMPTS[:1], forbid)
    assert first not in output.outputs[0].token_ids
    messages = []
    for llm in pair:
        with pytest.raises(RequestFailedError) as error:
            llm.generate(PROMPTS[0], greedy.clone(logits_processors=["fail"]), use_tqdm=False)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "two are enough" in messages[1]


def test_a_processor_that_cannot_be_sent_is_refused_by_name(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    register_logits_processor("local", lambda extra, size: lambda prompt, output, logits: logits)
    with pytest.raises(InvalidRequestError, match=r"logits_processors: .*cloudpickle") as error:
        pair[1].generate("a", SamplingParams(logits_processors=["local"]), use_tqdm=False)
    assert error.value.param == "logits_processors"
    same_outputs(pair, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"kv_cache_memory_bytes": 1}, ConfigError), ({"max_model_len": 10**6}, ConfigError)],
)
def test_what_is_wrong_in_a_worker_is_said_as_in_one_process(model, settings, kind):
    messages = []
    for backend in (None, "mp"):
        with pytest.raises(kind) as error:
            LLM(str(model), distributed_executor_backend=backend, dtype="float32", threads=1, **settings)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_weights_that_cannot_be_read_are_one_line(model, tmp_path):
    broken = make_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError) as error:
        LLM(str(broken), distributed_executor_backend="mp", **EXACT)
    assert "\n" not in str(error.value)


def test_no_process_is_left(model):
    with LLM(str(model), distributed_executor_backend="mp", **EXACT) as llm:
        pids = worker_pids(os.getpid())
        llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    wait_until_gone(pids[-1:], 2.0)
