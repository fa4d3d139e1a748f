"""Prompt logprobs through scheduler and engine: by position, once, whatever happens to the request."""

from __future__ import annotations

import asyncio

import pytest
from helpers.fake_engine import make_engine
from helpers.fake_model import continuation, expected_prompt_logprobs, prompt_chunk
from helpers.scheduler_harness import Harness, outputs_of

from streamllm.engine.prompt_logprobs import PromptLogprobs
from streamllm.errors import RequestFailedError
from streamllm.runner.model_runner import NOT_FINITE
from streamllm.sampling_params import RequestOutputKind, SamplingParams


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + position) % 200 for position in range(length)]


def known(request) -> list:
    assert request.prompt_logprobs.complete
    return list(request.prompt_logprobs)


# -- scheduler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_chunks_add_up(budget):
    harness = Harness(budget=budget, max_num_seqs=1)
    request = harness.add(prompt_of(50), max_tokens=3, prompt_logprobs=2)
    harness.run()
    assert known(request) == expected_prompt_logprobs(prompt_of(50), 2)
    assert outputs_of(request) == [continuation(prompt_of(50), 3)]


def test_the_prefix_cache_is_filled_and_not_read():
    harness = Harness()
    for count in (None, 1, None):
        request = harness.add(prompt_of(50), max_tokens=1, prompt_logprobs=count)
        harness.run()
        if count is not None:
            assert known(request) == expected_prompt_logprobs(prompt_of(50), count)
            assert request.num_cached_tokens == 0
            harness.pool.reset_cache()
            harness.add(prompt_of(50), max_tokens=1, prompt_logprobs=count)
            harness.run()
    assert request.num_cached_tokens == 48, "what was judged is there for others"
    assert (harness.scheduler.prefix_cache.queries, harness.scheduler.prefix_cache.hits) == (100, 48)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_neither_loses_nor_doubles(prefix_caching):
    """The first request grows into the blocks of the second, whose prompt takes one token a step."""
    harness = Harness(
        num_blocks=8, budget=2, max_num_seqs=2, max_model_len=112, prefix_caching=prefix_caching
    )
    first = harness.add(prompt_of(30), max_tokens=70)
    while not outputs_of(first)[0]:
        harness.step()
    second = harness.add(prompt_of(60, 90), max_tokens=30, prompt_logprobs=1)
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert 1 < second.prompt_logprobs.num_known < 60
    harness.run()
    assert known(second) == expected_prompt_logprobs(prompt_of(60, 90), 1)
    assert outputs_of(second) == [continuation(prompt_of(60, 90), 30)]
    assert sum(len(rows.token_ids) for batch in harness.runner.batches for rows in batch.prompt_rows) == 59


def test_after_a_preemption_what_is_known_may_come_from_the_cache():
    harness = Harness(budget=16)
    request = harness.add(prompt_of(64), max_tokens=2, prompt_logprobs=0)
    for _ in range(2):
        harness.step()
    sequence = request.sequences[0]
    assert request.prompt_logprobs.num_known == 33 and sequence.num_adoptable_tokens == 32
    harness.run()
    assert sequence.num_adoptable_tokens == 65


def test_choices_are_judged_once():
    harness = Harness(max_num_seqs=2)
    request = harness.add(prompt_of(40), n=5, max_tokens=4, prompt_logprobs=1)
    harness.run()
    assert known(request) == expected_prompt_logprobs(prompt_of(40), 1)
    assert sum(len(rows.token_ids) for batch in harness.runner.batches for rows in batch.prompt_rows) == 39
    assert outputs_of(request) == [continuation(prompt_of(40), 4, choice) for choice in range(5)]


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_alone(n):
    harness = Harness(budget=16)
    request = harness.add(prompt_of(40), n=n, prompt_logprobs=1, prompt_only=True)
    harness.run()
    assert len(harness.runner.batches) == 3
    assert known(request) == expected_prompt_logprobs(prompt_of(40), 1)
    assert [(s.finish_reason, s.num_output_tokens) for s in request.sequences] == [("length", 0)] * n
    assert not any(batch.output_rows for batch in harness.runner.batches)
    assert harness.pool.num_used == 0


def test_a_chunk_out_of_order_is_refused():
    logprobs = PromptLogprobs(prompt_of(9), 0, None)
    logprobs.add(prompt_chunk(prompt_of(9), 1, 4, 0))
    for first in (1, 3, 5):
        with pytest.raises(ValueError, match="4 are known"):
            logprobs.add(prompt_chunk(prompt_of(9), first, first + 2, 0))


# -- engine and stream -------------------------------------------------------------------------------------


async def collect(engine, prompt, params, **options) -> list:
    stream = await engine.add_request(prompt, params, **options)
    return [output async for output in stream]


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
async def engine(request):
    engine = make_engine(budget=16, queue_depth=request.param)
    await engine.start()
    yield engine
    assert engine.stats().num_used_blocks == engine.stats().num_running == 0
    await engine.stop()


async def test_they_come_with_the_first_delta(engine):
    prompt, expected = prompt_of(50), expected_prompt_logprobs(prompt_of(50), 1)
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=5, n=2, prompt_logprobs=1, output_kind=kind)
        first, *rest = await collect(engine, prompt, params)
        assert first.prompt_logprobs == expected
        later = expected if kind is RequestOutputKind.CUMULATIVE else None
        assert all(output.prompt_logprobs == later for output in rest)
        assert first.prompt_logprobs[0] is None
        assert next(iter(first.prompt_logprobs[1])) == prompt[1], "the prompt's own token comes first"
    outputs = await collect(engine, prompt, SamplingParams(max_tokens=5))
    assert all(output.prompt_logprobs is None for output in outputs)


async def test_a_prompt_of_one_token_has_none(engine):
    output = (await collect(engine, [7], SamplingParams(max_tokens=1, prompt_logprobs=5)))[-1]
    assert output.prompt_logprobs == [None]


async def test_entries_are_made_when_they_are_read(engine):
    expected = expected_prompt_logprobs(prompt_of(50), 20)
    output = (await collect(engine, prompt_of(50), SamplingParams(max_tokens=1, prompt_logprobs=20)))[-1]
    entries = output.prompt_logprobs
    assert len(entries) == 50 and list(entries) == expected and entries[:] == expected
    assert [entries[index] for index in range(-50, 50)] == expected * 2
    assert entries[40:10:-7] == expected[40:10:-7] and entries != expected[:-1]
    for index in (50, -51):
        with pytest.raises(IndexError):
            entries[index]


async def test_scoring_counts_a_prompt_and_no_token(engine):
    records = []
    engine.on_request_finished(records.append)
    before = engine.stats()
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = await collect(engine, prompt_of(50), params, prompt_only=True)
    assert output.prompt_logprobs == expected_prompt_logprobs(prompt_of(50), 0)
    assert [(c.text, c.token_ids, c.finish_reason) for c in output.outputs] == [("", [], "length")] * 2
    stats = engine.stats()
    assert stats.prompt_tokens - before.prompt_tokens == 50
    assert stats.generation_tokens == before.generation_tokens
    assert stats.finished["length"] - before.finished["length"] == 1
    assert records[0].first_token_time is None and records[0].num_generation_tokens == 0


async def test_an_abort_midway_gives_none(engine):
    params = SamplingParams(prompt_logprobs=1, output_kind=RequestOutputKind.CUMULATIVE)
    stream = await engine.add_request(prompt_of(200), params, request_id="r")
    await asyncio.sleep(0)  # a first chunk has been computed
    engine.abort("r")
    outputs = [output async for output in stream]
    assert [output.prompt_logprobs for output in outputs] == [None]


async def test_logits_that_are_not_finite_end_the_request_alone(engine, monkeypatch):
    step = engine._executor.runner.step

    def poisoned(batch):
        output = step(batch)
        output.prompt_logprobs = [NOT_FINITE if r.token_ids[0] < 100 else c for r, c in zip(
            batch.prompt_rows, output.prompt_logprobs, strict=True)]  # fmt: skip
        return output

    monkeypatch.setattr(engine._executor.runner, "step", poisoned)
    params = SamplingParams(max_tokens=4, n=3, prompt_logprobs=1)
    bad, good = await asyncio.gather(
        collect(engine, prompt_of(30), params),
        collect(engine, prompt_of(30, 110), params),
        return_exceptions=True,
    )
    assert isinstance(bad, RequestFailedError) and "not finite" in str(bad)
    assert good[-1].prompt_logprobs == expected_prompt_logprobs(prompt_of(30, 110), 1)
