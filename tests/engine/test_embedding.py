"""Embeddings through scheduler and engine: every row once, whatever happens to the request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from helpers.fake_engine import make_engine
from helpers.fake_model import HIDDEN_SIZE, FakeRunner, continuation, hidden_state

from streamllm import PoolingParams, SamplingParams
from streamllm.errors import InvalidRequestError, QueueFullError, RequestFailedError
from streamllm.runner.pooler import HIDDEN_NOT_FINITE
from streamllm.sampling_params import RequestOutputKind


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + position) % 200 for position in range(length)]


def expected(
    prompt: list[int], pooling: str = "last", normalize: bool = True, dimensions=None
) -> list[float]:
    """The embedding of a prompt, from the fake model's hidden states."""
    states = [hidden_state(prompt[: end + 1]).astype(np.float64) for end in range(len(prompt))]
    pooled = (states[-1] if pooling == "last" else sum(states) / len(states))[:dimensions]
    if normalize:
        pooled = pooled / np.sqrt((pooled**2).sum())
    return pooled.astype(np.float32).tolist()


async def until(condition) -> None:
    """Lets the engine go on until it is so."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
async def engine(request):
    engine = make_engine(budget=16, queue_depth=request.param)
    await engine.start()
    yield engine
    assert engine.stats().num_used_blocks == engine.stats().num_running == 0
    await engine.stop()


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_a_prompt_in_chunks(engine, pooling):
    for length in (1, 15, 16, 17, 50):
        engine.reset_prefix_cache()
        output = await engine.embed(prompt_of(length), PoolingParams(pooling=pooling))
        assert output.outputs.embedding == pytest.approx(expected(prompt_of(length), pooling), abs=1e-7)
        assert output.outputs.hidden_size == HIDDEN_SIZE
        assert output.prompt_token_ids == prompt_of(length) and output.finished
    batches = engine._executor.runner.batches
    assert len(batches) == 1 + 1 + 1 + 2 + 4 and not any(batch.output_rows for batch in batches)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [1, 4, HIDDEN_SIZE])
async def test_dimensions_are_cut_before_the_length_is_set_to_one(engine, normalize, dimensions):
    params = PoolingParams(normalize=normalize, dimensions=dimensions)
    embedding = (await engine.embed(prompt_of(20), params)).outputs.embedding
    assert embedding == pytest.approx(expected(prompt_of(20), "last", normalize, dimensions))
    assert len(embedding) == dimensions
    assert (np.linalg.norm(embedding) == pytest.approx(1)) == normalize


async def test_more_dimensions_than_there_are(engine):
    with pytest.raises(InvalidRequestError, match=rf"between 1 and {HIDDEN_SIZE} .* got 7") as caught:
        await engine.embed([1], PoolingParams(dimensions=HIDDEN_SIZE + 1))
    assert caught.value.param == "dimensions"


async def test_the_configuration_says_what_a_request_leaves_open():
    engine = make_engine(pooling="mean")
    await engine.start()
    for pooling, meant in ((None, "mean"), ("last", "last"), ("mean", "mean")):
        output = await engine.embed(prompt_of(30), PoolingParams(pooling=pooling))
        assert output.outputs.embedding == pytest.approx(expected(prompt_of(30), meant), abs=1e-7)
    await engine.stop()


async def test_a_mean_does_not_read_the_prefix_cache_and_the_last_row_may(engine):
    cold = {p: await engine.embed(prompt_of(50), PoolingParams(pooling=p)) for p in ("mean", "last")}
    assert cold["last"].num_cached_tokens == 0, "a mean leaves nothing there"
    async for _ in engine.generate(prompt_of(50), SamplingParams(max_tokens=1)):
        pass
    warm = {p: await engine.embed(prompt_of(50), PoolingParams(pooling=p)) for p in ("mean", "last")}
    assert (warm["mean"].num_cached_tokens, warm["last"].num_cached_tokens) == (0, 48)
    for pooling in ("mean", "last"):
        assert warm[pooling].outputs == cold[pooling].outputs
    salted = await engine.embed(prompt_of(50), cache_salt="other")
    assert salted.num_cached_tokens == 0 and salted.outputs == cold["last"].outputs


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("prefix_caching", [False, True])
async def test_preemption_begins_the_sum_again(pooling, prefix_caching):
    """The first request grows into the blocks of the second, whose prompt takes one token a step."""
    engine = make_engine(
        num_blocks=8, budget=2, max_num_seqs=2, max_model_len=112, enable_prefix_caching=prefix_caching
    )
    await engine.start()
    params = SamplingParams(max_tokens=70, output_kind=RequestOutputKind.FINAL_ONLY)
    first = await engine.add_request(prompt_of(30), params)
    await until(lambda: engine.stats().generation_tokens > 0)
    output = await engine.embed(prompt_of(60, 90), PoolingParams(pooling=pooling))
    assert engine.stats().num_preemptions > 0
    assert output.outputs.embedding == pytest.approx(expected(prompt_of(60, 90), pooling), abs=1e-7)
    assert (await anext(first)).outputs[0].token_ids == continuation(prompt_of(30), 70)
    await engine.stop()


async def test_among_others_each_gets_its_own(engine):
    prompts = [prompt_of(5 + 7 * index, 3 * index) for index in range(12)]
    params = [
        PoolingParams(pooling=("last", "mean")[index % 2]) if index % 3 else SamplingParams(max_tokens=9)
        for index in range(12)
    ]
    streams = await engine.add_requests(prompts, params)
    for stream, prompt, own in zip(streams, prompts, params, strict=True):
        outputs = [output async for output in stream]
        if isinstance(own, PoolingParams):
            (output,) = outputs
            assert output.embedding.tolist() == pytest.approx(expected(prompt, own.pooling), abs=1e-7)
            assert [(c.text, c.token_ids, c.finish_reason) for c in output.outputs] == [("", [], "stop")]
        else:
            assert outputs[-1].outputs[0].token_ids == continuation(prompt, 9)
            assert outputs[-1].embedding is None


async def test_it_counts_a_prompt_and_no_token(engine):
    records = []
    engine.on_request_finished(records.append)
    await engine.embed(prompt_of(50), request_id="r")
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished["stop"]) == (50, 0, 1)
    (record,) = records
    assert (record.request_id, record.num_prompt_tokens, record.num_generation_tokens) == ("r", 50, 0)
    assert record.first_token_time is None and record.first_scheduled_time is not None


# -- context -----------------------------------------------------------------------------------------------


async def test_a_prompt_may_fill_the_whole_context(engine):
    assert engine.max_model_len == 256
    output = await engine.embed(prompt_of(256))
    assert output.outputs.embedding == pytest.approx(expected(prompt_of(256)), abs=1e-7)
    assert len((await engine.embed("a" * 256)).prompt_token_ids) == 256
    for prompt in (prompt_of(257), "a" * 257):
        with pytest.raises(
            InvalidRequestError, match=r"256 tokens and the prompt has .*257\. Short"
        ) as caught:
            await engine.embed(prompt)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (10, 10), (256, 256), (-1, 256)])
async def test_only_the_end_is_kept_where_the_request_says_so(engine, limit, kept):
    long = prompt_of(300)
    for prompt, ids in ((long, long), ("0123456789" * 30, list(b"0123456789" * 30))):
        output = await engine.embed(prompt, PoolingParams(truncate_prompt_tokens=limit))
        assert output.prompt_token_ids == ids[-kept:]
        assert output.outputs.embedding == pytest.approx(expected(ids[-kept:]), abs=1e-7)
    with pytest.raises(InvalidRequestError, match="at most 256") as caught:
        await engine.embed(long, PoolingParams(truncate_prompt_tokens=257))
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("prompt", [[], [257], [-1], [1, True], [2**63], [1.5]])
async def test_bad_ids_are_refused_and_the_engine_lives_on(engine, prompt):
    with pytest.raises(ValueError, match="prompt"):
        await engine.embed(prompt)
    assert (await engine.embed([1, 2])).outputs.embedding == pytest.approx(expected([1, 2]), abs=1e-7)


# -- how it may end ----------------------------------------------------------------------------------------


async def test_cancelling_frees_the_blocks(engine):
    tasks = [asyncio.create_task(engine.embed(prompt_of(200, index))) for index in range(20)]
    await until(lambda: engine.stats().num_used_blocks > 0)
    assert engine.stats().num_waiting > 0
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0.01)
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
    assert stats.finished["abort"] + stats.finished["stop"] == 20 and stats.finished["abort"] > 10


async def test_an_abort_from_elsewhere_is_an_error(engine):
    task = asyncio.create_task(engine.embed(prompt_of(200), request_id="r"))
    await until(lambda: engine.stats().num_running > 0)
    engine.abort("r")
    with pytest.raises(RequestFailedError, match="aborted"):
        await task


async def test_hidden_states_that_are_not_finite_end_the_request_alone():
    class Poisoned(FakeRunner):
        def _pool(self, batch):
            starts = [self.slots[batch.rows[entry.row].slot].token_ids[0] for entry in batch.pool_rows]
            pooled = super()._pool(batch)
            return [HIDDEN_NOT_FINITE if s == 1 else p for s, p in zip(starts, pooled, strict=True)]

    engine = make_engine(runner=Poisoned)
    await engine.start()
    bad, good = await asyncio.gather(
        engine.embed(prompt_of(30)), engine.embed(prompt_of(30, 5)), return_exceptions=True
    )
    assert isinstance(bad, RequestFailedError) and "not finite" in str(bad)
    assert good.outputs.embedding == pytest.approx(expected(prompt_of(30, 5)), abs=1e-7)
    assert engine.stats().num_used_blocks == 0
    await engine.stop()


async def test_a_step_that_raises_ends_it(engine):
    engine._executor.fail_next = [RuntimeError("boom")]
    with pytest.raises(RequestFailedError, match="boom"):
        await engine.embed(prompt_of(40), PoolingParams(pooling="mean"))
    output = await engine.embed(prompt_of(40), PoolingParams(pooling="mean"))
    assert output.outputs.embedding == pytest.approx(expected(prompt_of(40), "mean"), abs=1e-7)


async def test_the_queues_cap_holds():
    engine = make_engine(max_num_seqs=2, max_num_queued_reqs=3)
    await engine.start()
    with pytest.raises(QueueFullError):
        await engine.add_requests([[1]] * 6, [PoolingParams()] * 6)
    assert len(await engine.add_requests([[1]] * 5, [PoolingParams()] * 5)) == 5
    await engine.stop()


async def test_many_prompts_let_others_have_the_loop(engine, monkeypatch):
    monkeypatch.setattr("streamllm.engine.async_engine.LONGEST_TURN", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    streams = await engine.add_requests(["some text"] * 100, [PoolingParams()] * 100)
    counting.cancel()
    assert turns >= 90
    for stream in streams:
        stream.abort()
    await asyncio.sleep(0.01)
