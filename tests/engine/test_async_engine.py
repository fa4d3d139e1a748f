from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from helpers.fake_engine import make_engine
from helpers.fake_model import continuation

from streamllm.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from streamllm.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
async def engine(request):
    engine = make_engine(queue_depth=request.param)
    await engine.start()
    yield engine
    await engine.stop()


def text_after(prompt: str, count: int, choice: int = 0) -> str:
    return bytes(continuation(list(prompt.encode()), count, choice)).decode()


def params(kind=RequestOutputKind.DELTA, **fields) -> SamplingParams:
    return SamplingParams(output_kind=kind, **{"max_tokens": 20, **fields})


async def collect(engine, prompt, sampling) -> list:
    return [output async for output in await engine.add_request(prompt, sampling)]


async def all_quiet(engine) -> None:
    for _ in range(100):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == stats.num_used_blocks == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not quiet: {engine.stats()}")


async def test_deltas_join_to_the_whole_text(engine):
    outputs = await collect(engine, "hello", params())
    assert "".join(o.outputs[0].text for o in outputs) == text_after("hello", 20)
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 20
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_cumulative_outputs_grow_and_final_only_comes_once(engine):
    grown = await collect(engine, "hello", params(RequestOutputKind.CUMULATIVE))
    texts = [o.outputs[0].text for o in grown]
    assert texts == sorted(texts, key=len) and texts[-1] == text_after("hello", 20)
    final = await collect(engine, "hello", params(RequestOutputKind.FINAL_ONLY))
    assert [o.outputs[0].text for o in final] == [text_after("hello", 20)]


async def test_a_slow_reader_gets_merged_deltas(engine):
    stream = await engine.add_request("hello", params(max_tokens=30))
    await all_quiet(engine)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert outputs[0].outputs[0].text == text_after("hello", 30)


async def test_many_requests_at_once_each_get_their_own_text(engine):
    prompts = [f"prompt number {i} " * (i % 5 + 1) for i in range(30)]
    results = await asyncio.gather(*(collect(engine, p, params(max_tokens=25)) for p in prompts))
    for prompt, outputs in zip(prompts, results, strict=True):
        assert "".join(o.outputs[0].text for o in outputs) == text_after(prompt, 25)
    await all_quiet(engine)
    stats = engine.stats()
    assert stats.generation_tokens == 30 * 25
    assert stats.prompt_tokens == sum(len(p) for p in prompts)
    assert stats.finished["length"] == 30


async def test_n_choices_come_with_their_own_index(engine):
    outputs = await collect(engine, "hello", params(n=3))
    for choice in range(3):
        deltas = [c for o in outputs for c in o.outputs if c.index == choice]
        assert "".join(d.text for d in deltas) == text_after("hello", 20, choice)
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert engine.stats().prompt_tokens == 5


@pytest.mark.parametrize("length", [1, 2, 5])
async def test_a_stop_string_ends_the_text_before_it(engine, length):
    whole = text_after("hello", 20)
    stop = whole[6 : 6 + length]
    cut = whole.index(stop)
    outputs = await collect(engine, "hello", params(stop=[stop]))
    last = outputs[-1].outputs[0]
    assert "".join(o.outputs[0].text for o in outputs) == whole[:cut]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == cut + length
    assert engine.stats().generation_tokens == cut + length
    await all_quiet(engine)


async def test_a_stop_string_before_min_tokens_is_ordinary_text(engine):
    whole = text_after("hello", 20)
    outputs = await collect(engine, "hello", params(stop=[whole[2]], min_tokens=20))
    assert "".join(o.outputs[0].text for o in outputs) in (whole, whole[:-1])
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 20


async def test_abort_frees_blocks_and_tells_the_reader(engine):
    stream = await engine.add_request("hello", params(max_tokens=200))
    await anext(stream)
    stream.abort()
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await all_quiet(engine)
    stream.abort()
    assert engine.stats().finished["abort"] == 1


async def test_leaving_generate_early_aborts(engine):
    async for _ in engine.generate("hello", params(max_tokens=200)):
        break
    await all_quiet(engine)
    assert engine.stats().finished["abort"] <= 1


async def test_generate_takes_the_options_of_a_request_and_aborts_when_closed_or_cancelled(engine):
    long = params(max_tokens=200)
    outputs = engine.generate("hello", long, request_id="mine", priority=3, cache_salt="salt")
    async with contextlib.aclosing(outputs):
        assert (await anext(outputs)).request_id == "mine"
        with pytest.raises(InvalidRequestError, match="'mine' is running"):
            await anext(engine.generate("hello", long, request_id="mine"))
    assert engine.stats().finished["abort"] == 1

    async def read() -> None:
        async for _ in engine.generate("hello", long):
            started.set()

    started = asyncio.Event()
    reader = asyncio.create_task(read())
    await started.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await all_quiet(engine)
    assert engine.stats().finished["abort"] == 2
    whole = [output async for output in engine.generate("hello", params(), "again")]
    assert "".join(output.outputs[0].text for output in whole) == text_after("hello", 20)


async def test_checking_requests_queues_none(engine):
    assert await engine.check_requests(["ab", [1, 2]], [params()] * 2) == [[97, 98], [1, 2]]
    with pytest.raises(InvalidRequestError, match=r"prompt\[1\]"):
        await engine.check_requests(["ab", ""], [params()] * 2)
    assert engine.stats().num_steps == 0 and not engine.live_requests()


async def test_200_requests_cut_off_at_random_moments_leave_nothing(engine):
    rng = random.Random(1)

    async def one(index: int) -> None:
        stream = await engine.add_request(f"request {index} " * rng.randint(1, 12), params(max_tokens=60))
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(rng.random() * 0.002)
        stream.abort()

    await asyncio.gather(*(one(i) for i in range(200)))
    await all_quiet(engine)
    assert (await collect(engine, "hello", params(max_tokens=5)))[-1].finished
    stats = engine.stats()
    assert sum(stats.finished.values()) == 201


async def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(engine):
    engine._executor.fail_next = [RuntimeError("out of luck")]
    with pytest.raises(RequestFailedError, match="out of luck"):
        await collect(engine, "hello", params())
    outputs = await collect(engine, "hello", params(max_tokens=4))
    assert "".join(o.outputs[0].text for o in outputs) == text_after("hello", 4)
    assert engine.is_healthy
    assert engine.stats().finished["error"] == 1


async def test_an_engine_whose_steps_keep_failing_dies_and_says_so(engine):
    engine._executor.fail_next = [RuntimeError("broken")] * 10
    for _ in range(3):
        with pytest.raises((RequestFailedError, EngineDeadError)):
            await collect(engine, "hello", params())
    assert not engine.is_healthy
    with pytest.raises(EngineDeadError, match="broken"):
        await engine.add_request("hello", params())


async def test_stopping_fails_what_is_still_running():
    engine = make_engine(step_seconds=0.01)
    await engine.start()
    stream = await engine.add_request("hello", params(max_tokens=200))
    await engine.stop()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    assert engine._executor.closed


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([257], "257"),
        ([-1], "-1"),
        ([2**63], "9223372036854775808"),
        ([1.0], "a float"),
        ([True], "true"),
        ([[1]], "a list"),
        ({"a": 1}, "text or a list"),
        ("x" * 256, "256 tokens"),
        ([1] * 300, "300"),
    ],
)
async def test_bad_prompts_are_refused_and_the_engine_is_untouched(engine, prompt, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await engine.add_request(prompt, params())
    assert caught.value.param == "prompt"
    assert engine.stats().num_waiting == 0


async def test_stop_token_ids_outside_the_vocabulary_are_refused(engine):
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds 300"):
        await engine.add_request("hello", params(stop_token_ids=[300]))


async def test_the_context_ends_a_sequence_by_length(engine):
    outputs = await collect(engine, [65] * 250, params(max_tokens=None))
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 6
    assert outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("queue_depth", [1, 2])
async def test_preempted_requests_stream_nothing_twice(queue_depth):
    engine = make_engine(num_blocks=18, max_num_seqs=6, queue_depth=queue_depth)
    await engine.start()
    prompts = [f"this is prompt {i} of some " * 2 for i in range(6)]
    results = await asyncio.gather(*(collect(engine, p, params(max_tokens=80)) for p in prompts))
    assert engine.stats().num_preemptions > 0
    for prompt, outputs in zip(prompts, results, strict=True):
        assert "".join(o.outputs[0].text for o in outputs) == text_after(prompt, 80)
    await engine.stop()
