"""What is kept of steps and requests: bounded, and enough to say why a request was slow."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from helpers.fake_engine import make_engine

from streamllm.engine.events import EventLog
from streamllm.engine.request_history import MAX_EVENTS, RequestHistory
from streamllm.engine.stats import RequestRecord
from streamllm.engine.step_history import Delivery, StepHistory, StepRecord
from streamllm.engine.wait_clock import WaitClock
from streamllm.pooling_params import PoolingParams
from streamllm.sampling_params import BeamSearchParams, SamplingParams


@contextlib.asynccontextmanager
async def running(**settings):
    engine = make_engine(**settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine, prompt, params, **options):
    stream = await engine.add_request(prompt, params, **options)
    async for _ in stream:
        pass


def record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id, 0.0, None, None, None, 1.0, 1, 1, 0, "stop")


def step(number: int, began: float, seconds: float = 0.5) -> StepRecord:
    return StepRecord(number, 2, 3, 1, 2, 0, 4, began=began, scheduled=began, returned=began + seconds)


# -- the clock of the queue --------------------------------------------------------------------------------


def test_waits_by_reason():
    clock = WaitClock()
    clock.turn("slots", 10.0)
    mark = clock.mark(11.0)
    clock.turn("kv_blocks", 13.0)
    clock.turn("kv_blocks", 14.0)
    clock.turn(None, 15.5)
    assert clock.since(mark, 16.0) == {"slots": 2.0, "kv_blocks": 2.5, "next_step": 0.5}
    assert clock.since(clock.mark(16.0), 16.0) == {}


# -- histories are bounded ---------------------------------------------------------------------------------


def test_ended_requests_are_bounded():
    history = RequestHistory(max_ended=3, max_ended_events=100)
    events = EventLog(history=history)
    for number in range(5):
        events.record("queued", str(number))
        events.record("finished", str(number))
        history.end(record(str(number)))
    assert list(history.ended) == ["2", "3", "4"]
    assert [event.kind for event in history.events("4")] == ["queued", "finished"]
    assert history.events("0") == [] and history.events("unknown") == []
    events.record("queued", "long")
    for _ in range(98):
        events.record("prefill", "long", 1)
    history.end(record("long"))
    assert list(history.ended) == ["long"]  # alone it has nearly all events that are kept
    history.forget_ended()
    assert not history.ended and history.events("long") == []


def test_a_request_keeps_its_first_and_last_events():
    history = RequestHistory()
    events = EventLog(history=history)
    events.record("queued", "a")
    for number in range(3 * MAX_EVENTS):
        events.record("prefill", "a", number)
    kept = history.events("a")
    assert len(kept) == MAX_EVENTS and kept[0].kind == "queued"
    assert (kept[1].num_tokens, kept[-1].num_tokens) == (0, 3 * MAX_EVENTS - 1)


def test_a_name_used_again_is_the_later_request():
    history = RequestHistory()
    events = EventLog(history=history)
    for _ in range(2):
        events.record("queued", "a")
        history.end(record("a"))
    assert len(history.ended) == 1 and len(history.events("a")) == 1


def test_old_steps_become_spans():
    history = StepHistory(size=100, num_spans=4)
    for number in range(1000):
        history.add(step(number, began=float(number)), Delivery(0.0))
    assert len(history.latest) == 100
    spans = history.spans(0.0, 2000.0)
    # 1,000 steps are 15 spans of 64 and 40 more; the last four spans begin with step 704.
    assert spans[0].start == 704 and spans[-1].end == 999.5
    assert sum(span.num_steps for span in spans) == 3 * 64 + 100
    (few,) = history.spans(0.0, 2000.0, limit=1)
    assert (few.num_steps, few.num_sequences, few.num_tokens) == (292, 584, 876)
    assert few.seconds == pytest.approx(146.0)
    assert [span.start for span in history.spans(950.0, 951.9)] == [950.0, 951.0]
    assert history.spans(5000.0, 6000.0) == []


def test_steps_in_flight_together_are_not_counted_twice():
    history = StepHistory()
    for number in range(10):
        history.add(step(number, began=float(number), seconds=2.0), Delivery(0.0))
    (span,) = history.spans(0.0, 20.0, limit=1)
    assert span.seconds == pytest.approx(11.0)


# -- the engine fills them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_depth", [1, 2])
async def test_a_request_in_company(queue_depth):
    async with running(step_seconds=0.002, queue_depth=queue_depth) as engine:
        await asyncio.gather(
            *(
                collect(engine, [65 + n] * 100, SamplingParams(max_tokens=12, n=n), request_id=str(n))
                for n in (1, 2)
            )
        )
        trace = engine.trace("2")
        assert trace is not None and trace.live is None
        chunks = [event.num_tokens for event in trace.events if event.kind == "prefill"]
        assert sum(chunks) == 100 and max(chunks) <= 64
        assert (trace.record.num_generation_tokens, trace.record.longest_choice) == (24, 12)
        assert trace.record.queue_seconds == pytest.approx(sum(trace.waited.values()), abs=1e-4)
        assert max(span.num_sequences / span.num_steps for span in trace.steps) >= 3
        assert all(span.seconds > 0 for span in trace.steps)
        steps = list(engine.steps.latest)
        assert [s.number for s in steps] == list(range(len(steps)))
        assert sum(s.num_prompt_tokens for s in steps) == 200
        for each in steps:
            times = [each.began, each.scheduled, each.submitted, each.mask_began, each.masked, each.returned,
                     each.updated, each.delivered]  # fmt: skip
            assert times == sorted(times) and all(end >= start for start, end in each.phases)


async def test_a_prompt_whose_last_chunk_is_one_token():
    async with running() as engine:
        await collect(engine, [65] * 129, SamplingParams(max_tokens=3), request_id="a")
        events = engine.history.events("a")
        assert [event.num_tokens for event in events if event.kind == "prefill"] == [64, 64, 1]


async def test_gaps_between_tokens():
    async with running(step_seconds=0.001, num_blocks=16) as engine:
        deliveries = []
        engine.steps.on_step(lambda record, delivery: deliveries.append(delivery))
        await asyncio.gather(
            *(collect(engine, [n], SamplingParams(max_tokens=60, n=2)) for n in (65, 66, 67))
        )
        assert engine.stats().num_preemptions > 0
        gaps = [gap for delivery in deliveries for gap in delivery.gaps.items()]
        assert sum(count for _, count in gaps) == 6 * 59
        assert sum(len(delivery.first_tokens) for delivery in deliveries) == 3


async def test_what_keeps_the_queue():
    async with running(step_seconds=0.005, max_num_seqs=2, num_blocks=16) as engine:
        long = SamplingParams(max_tokens=30)
        await asyncio.gather(
            *(collect(engine, [65 + n] * 40, long, request_id=f"slots-{n}") for n in range(4))
        )
        waited = engine.trace("slots-3").waited
        assert max(waited, key=waited.get) == "slots"
    async with running(step_seconds=0.005, num_blocks=16) as engine:
        await asyncio.gather(
            *(collect(engine, [65 + n] * 200, long, request_id=f"blocks-{n}") for n in range(2))
        )
        waited = engine.trace("blocks-1").waited
        assert max(waited, key=waited.get) == "kv_blocks"


async def test_failed_and_aborted_requests_are_kept():
    async with running(step_seconds=0.002) as engine:
        engine._executor.fail_next.append(RuntimeError("broken"))
        with pytest.raises(Exception, match="broken"):
            await collect(engine, [65], SamplingParams(max_tokens=3), request_id="failed")
        stream = await engine.add_request([65], SamplingParams(max_tokens=200), request_id="left")
        await anext(stream)
        assert engine.trace("left").live.state == "decoding"
        stream.abort()
        assert engine.trace("left").record.finish_reason == "abort"
        assert engine.trace("failed").record.finish_reason == "error"
        assert engine.steps.latest[0].failed and engine.trace("nobody") is None


async def test_beams_and_embeddings():
    async with running() as engine:
        params = BeamSearchParams(beam_width=3, max_tokens=6)
        await collect(engine, [65] * 20, params, request_id="beams")
        trace = engine.trace("beams")
        assert trace.record.kind == "beam_search"
        assert trace.record.longest_choice == 6
        assert [event.num_tokens for event in trace.events if event.kind == "prefill"] == [20]
        await engine.embed([65] * 20, PoolingParams(), request_id="embedding")
        record = engine.trace("embedding").record
        assert (record.kind, record.first_token_time) == ("embed", None)
