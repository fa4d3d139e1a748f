"""Thousands of prompts at once: the bar, the window in the engine, memory."""

from __future__ import annotations

import io
import os
import time

import pytest
from helpers.fake_engine import make_engine
from helpers.fake_model import FakeRunner, continuation
from helpers.tiny_models import make_tiny_model
from tqdm import tqdm

from streamllm import LLM, SamplingParams
from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import InvalidRequestError, RequestFailedError

FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
WINDOW = 64


class Bar(tqdm):
    """A bar on a screen of its own."""

    def __init__(self, *args, **options):
        self.screen = io.StringIO()
        super().__init__(*args, **{**options, "file": self.screen, "dynamic_ncols": False, "ncols": 160})
        bars.append(self)


bars: list[Bar] = []


def fake_llm(monkeypatch, **settings) -> LLM:
    """An LLM whose engine computes nothing."""
    options = {"num_blocks": 400, "max_num_seqs": 16, **settings}
    monkeypatch.setattr(AsyncEngine, "from_config", lambda config: make_engine(**options))
    return LLM()


@pytest.fixture
def llm(monkeypatch):
    with fake_llm(monkeypatch) as llm:
        yield llm


def most_requests_at_once(llm: LLM) -> list[int]:
    """Grows with every request that ends: how many the engine knew then."""
    known: list[int] = []
    llm._engine.on_request_finished(lambda record: known.append(len(llm._engine._requests) + 1))
    return known


def test_many_prompts_are_fed_through_a_window(llm):
    prompts = [f"prompt {index}" for index in range(300)]
    params = [SamplingParams(max_tokens=1 + index % 7, ignore_eos=True) for index in range(300)]
    known = most_requests_at_once(llm)
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        expected = continuation(list(prompt.encode()), own.max_tokens)
        assert output.outputs[0].token_ids == expected and output.finished
    assert len(known) == 300 and max(known) <= WINDOW
    assert llm.stats().num_used_blocks == 0


def test_one_slow_prompt_does_not_hold_up_the_window(llm):
    slow = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = llm.generate(["slow", *["quick"] * 299], [slow, *[FOUR] * 299])
    ends = [output.metrics.finished_time for output in outputs]
    assert ends[WINDOW * 2] < ends[0]


@pytest.mark.parametrize(
    ("bad", "options", "words"),
    [
        ("", {}, r"prompt\[290\]: prompt is empty"),
        ({"prompt": "a", "cache_salt": ""}, {}, r"prompt\[290\]: cache_salt"),
        ("fine", {"priority": [0] * 290 + ["x"] + [0] * 9}, r"prompt\[290\]: priority"),
        ("fine", {"bad_params": True}, r"prompt\[290\]: "),
    ],
)
def test_one_bad_prompt_among_many_runs_none(llm, bad, options, words):
    prompts = ["fine"] * 300
    prompts[290] = bad
    params = [FOUR] * 300
    if options.pop("bad_params", False):
        params[290] = SamplingParams(allowed_token_ids=[10**6])
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, params, **options)
    assert llm.stats().generation_tokens == llm.stats().num_used_blocks == 0


def test_priorities_hold_across_windows(monkeypatch):
    with fake_llm(monkeypatch, max_num_seqs=2, scheduling_policy="priority") as llm:
        outputs = llm.generate(["x"] * 200, FOUR, priority=[200 - index for index in range(200)])
    starts = [output.metrics.first_scheduled_time for output in outputs]
    assert starts[199] < starts[100] < starts[0]
    assert sorted(starts, reverse=True) == starts


@pytest.mark.parametrize("count", [10, 300])
def test_the_bar_counts_prompts_and_tokens(llm, count):
    bars.clear()
    llm.generate(["ten bytes."] * count, SamplingParams(n=2, max_tokens=4, ignore_eos=True), use_tqdm=Bar)
    (bar,) = bars
    assert bar.n == bar.total == count
    last = bar.screen.getvalue().split("\r")[-1]
    assert f"{count}/{count}" in last and "prompt/s" in last
    assert last.startswith("Processed prompts: 100%") and "est. speed input: " in last
    read, written = (float(part.split(": ")[-1]) for part in bar.postfix.split(" toks/s")[:2])
    assert read / written == pytest.approx(10 * count / (8 * count), rel=0.01)


def test_the_bar_moves_while_a_prompt_is_generated(monkeypatch):
    monkeypatch.setattr("streamllm.llm_batch.REFRESH_INTERVAL", 0.02)
    bars.clear()
    with fake_llm(monkeypatch, step_seconds=0.005) as llm:
        llm.generate("one", SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=Bar)
    rates = [
        line.split("output: ")[1] for line in bars[0].screen.getvalue().split("\r") if "output: " in line
    ]
    assert len(set(rates)) > 3


class FailingRunner(FakeRunner):
    """Fails at the fourth token of one prompt."""

    PROMPT = b"prompt 5 "

    def step(self, batch):
        output = super().step(batch)
        for index, output_row in enumerate(batch.output_rows):
            row = batch.rows[output_row.row]
            known = bytes(self.slots[row.slot].token_ids)
            if known.startswith(self.PROMPT) and row.num_computed_tokens > len(self.PROMPT) + 2:
                output.errors[index] = "no luck"
        return output


@pytest.mark.parametrize("count", [10, 300])
def test_one_that_fails_ends_the_others(monkeypatch, count):
    """And the engine lives on."""
    llm = fake_llm(monkeypatch, runner=FailingRunner)
    with pytest.raises(RequestFailedError, match="no luck"):
        llm.generate([f"prompt {index} " for index in range(count)], SamplingParams(max_tokens=30))
    for _ in range(200):
        if not (stats := llm.stats()).num_used_blocks:
            break
        time.sleep(0.01)
    assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
    assert stats.finished["error"] == 1 and stats.finished["abort"] > 0
    assert llm.generate("fine", FOUR)[0].finished
    llm.shutdown()


def test_no_bar_where_nobody_looks(llm, capsys):
    llm.generate(["x"] * 300, FOUR)
    llm.generate(["x"] * 3, FOUR, use_tqdm=False)
    assert capsys.readouterr().err == ""


def resident() -> float:
    """MB of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_is_flat_over_5000_prompts(tmp_path):
    """What grows is what is returned, some 2 KB an output."""
    prompts = [f"{index} " + "the dog runs " * 12 for index in range(5000)]

    class Watching(Bar):
        def update(self, n=1):
            if self.n % 500 == 0:
                memory.append(resident())
            return super().update(n)

    # Few KV blocks, so that all of them have been touched before.
    settings = {"max_num_seqs": 64, "max_model_len": 256, "num_kv_blocks": 1000}
    with LLM(str(make_tiny_model(tmp_path / "model")), **settings) as llm:
        llm.generate(prompts[:1000], FOUR)
        known = most_requests_at_once(llm)
        memory = [resident()]
        outputs = llm.generate(prompts, FOUR, use_tqdm=Watching)
    assert len(outputs) == 5000 and all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    assert max(known) <= 128
    assert max(memory) - memory[0] < 25, memory
