"""Adapters in the scheduler: who gets a slot, who waits for one, and that nobody reads another's weights.

The fake model draws other tokens for other adapters, keeps the adapter of everything in its KV memory, and
fails if a slot is loaded while a sequence has it.
"""

from __future__ import annotations

import random

import pytest
from helpers.fake_adapter import choice_of, fake_adapter
from helpers.fake_model import continuation
from helpers.scheduler_harness import Harness, beam_search_alone, outputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.engine.block_table import most_blocks
from streamllm.engine.lora_slots import MAX_PASSES
from streamllm.engine.request import Request
from streamllm.engine.step import Step

A, B, C = fake_adapter("a"), fake_adapter("b"), fake_adapter("c")
PROMPT = list(range(1, 40))


def check(request: Request) -> None:
    """Every sequence has what the adapter alone would have given it."""
    for choice, output in enumerate(outputs_of(request)):
        expected = continuation(request.prompt_token_ids, len(output), choice_of(request.adapter, choice))
        assert output == expected and request.sequences[choice].finished


def check_all(harness: Harness) -> None:
    for request in harness.requests:
        check(request)
    assert harness.pool.num_free == harness.pool.num_blocks
    assert harness.scheduler.num_running == harness.scheduler.num_waiting == 0
    assert not any(harness.scheduler.lora_slots._num_users)


def is_running(request: Request) -> bool:
    return request.sequences[0].slot >= 0


def loads(harness: Harness) -> list[tuple[int, bytes | None]]:
    """Every load so far: (slot, content)."""
    return [
        (load.slot, load.adapter and load.adapter.content)
        for batch in harness.runner.batches
        for load in batch.lora_loads
    ]


def test_base_and_adapters_in_one_batch():
    harness = Harness(max_loras=2, budget=64)
    for adapter in (None, A, B, A):
        harness.add([5, 6, 7], max_tokens=6, adapter=adapter)
    harness.step()
    assert len(harness.runner.batches[0].rows) == 4
    assert [new.lora_slot for new in harness.runner.batches[0].new_sequences] == [-1, 0, 1, 0]
    harness.run()
    check_all(harness)
    assert loads(harness) == [(0, A.content), (1, B.content)]


def test_who_finds_no_slot_lets_others_pass():
    harness = Harness(max_loras=1, max_num_seqs=200, budget=200, num_blocks=600)
    first = harness.add([1], max_tokens=20, adapter=A)
    # More than a step looks past.
    blocked = [harness.add([2, i + 1], max_tokens=2, adapter=B) for i in range(100)]
    behind = [harness.add([3], max_tokens=2, adapter=adapter) for adapter in (None, A)]
    harness.step()
    assert is_running(first) and all(map(is_running, behind)) and not any(map(is_running, blocked))
    assert harness.scheduler.num_waiting == 100
    harness.run()
    check_all(harness)
    assert harness.runner.max_adapters == 1


def test_the_least_recently_used_goes_first():
    harness = Harness(max_loras=2)
    for adapter in (A, B, A, C, A, B):
        harness.add([1, 2], max_tokens=2, adapter=adapter)
        harness.run()
    check_all(harness)
    assert loads(harness) == [(0, A.content), (1, B.content), (1, C.content), (1, B.content)]


def test_equal_content_is_one_adapter():
    twin = fake_adapter("a", name="twin")
    harness = Harness(max_loras=1)
    harness.add(PROMPT, max_tokens=5, adapter=A)
    harness.run()
    other = harness.add(PROMPT, max_tokens=5, adapter=twin)
    harness.run()
    check_all(harness)
    assert other.num_cached_tokens == 32 and len(loads(harness)) == 1


def test_blocks_are_shared_by_content_alone():
    harness = Harness(max_loras=2)
    cached = []
    for adapter in (None, A, B, None, A, B, fake_adapter("a2", name=A.name)):
        request = harness.add(PROMPT, max_tokens=2, adapter=adapter)
        harness.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32, 0]
    check_all(harness)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_steady_traffic_for_one_adapter_does_not_starve_another(queue_depth):
    """Without the limit the first adapter's slot would never be free: there is always one more."""
    harness = Harness(max_loras=1, max_num_seqs=4, queue_depth=queue_depth)
    for max_tokens in (3, 6):  # they do not end together
        harness.add([1], max_tokens=max_tokens, adapter=A)
    waits = harness.add([2], max_tokens=2, adapter=B)
    for _ in range(20 * MAX_PASSES):
        if waits.sequences[0].finished:
            break
        live = sum(not s.finished for r in harness.requests for s in r.sequences if r.adapter is A)
        if live < 3:
            harness.add([1], max_tokens=9, adapter=A)
        harness.step()
    passed = [r for r in harness.requests if r.adapter is A and r.admitted]
    assert waits.sequences[0].finished
    assert MAX_PASSES < len(passed) <= MAX_PASSES + 4
    harness.run()
    check_all(harness)


def test_only_one_slot_is_cleared_for_who_waits_too_long():
    harness = Harness(max_loras=2, max_num_seqs=8)
    harness.add([1], max_tokens=80, adapter=A)
    harness.add([1], max_tokens=80, adapter=A)
    harness.add([2], max_tokens=30, adapter=B)
    waits = harness.add([3], max_tokens=2, adapter=C)
    while not is_running(waits):
        if sum(not s.finished for r in harness.requests for s in r.sequences) < 8:
            harness.add([4], max_tokens=1, adapter=A)
        harness.step()
    # The one with fewer sequences was cleared; the other served on.
    assert any(is_running(r) for r in harness.requests if r.adapter is A)
    harness.run()
    check_all(harness)


def test_beams_that_passed_go_on_while_their_slot_is_cleared():
    """The last that passed is a beam search, one of whose beams has yet to start when the slot is closed to
    others: without it the search would hold the slot for ever, for the model itself is always busy."""
    harness = Harness(max_loras=1, max_num_seqs=2)
    harness.add([1], max_tokens=MAX_PASSES + 4, adapter=A)
    waits = harness.add([2], max_tokens=2, adapter=B)
    for _ in range(MAX_PASSES - 1):
        harness.add([4], max_tokens=1, adapter=A)
        harness.step()
    search = harness.add([3, 4], beam_width=2, max_tokens=4, adapter=A)
    for _ in range(40):
        harness.add([5], max_tokens=3)
        harness.step()
    assert search.sequences[0].finished and waits.sequences[0].finished
    expected = beam_search_alone([3, 4], beam_width=2, max_tokens=4)
    assert [hypothesis.token_ids for hypothesis in search.beams.results()] == expected


def test_preempted_and_resumed_with_its_adapter():
    harness = Harness(num_blocks=8, max_loras=1, max_num_seqs=4, budget=32, max_model_len=96)
    requests = [harness.add([i, 2, 3], max_tokens=60, adapter=A) for i in range(1, 4)]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert all(len(outputs_of(request)[0]) == 60 for request in requests)
    check_all(harness)


def test_an_adapter_returns_after_its_sequence_was_preempted():
    """The slot went to another adapter in between, so it is loaded once more."""
    harness = Harness(num_blocks=8, max_loras=1, max_num_seqs=2, max_model_len=96)
    first = harness.add([1], max_tokens=90, adapter=A)
    harness.step()
    sequence = first.sequences[0]
    harness.scheduler._preempt(Step(budget=0), sequence)
    urgent = harness.add([2], priority=-1, max_tokens=3, adapter=B)
    harness.run()
    assert urgent.sequences[0].finished
    assert [content for _, content in loads(harness)] == [A.content, B.content, A.content]
    check_all(harness)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_failed_step_leaves_no_adapter_that_was_not_loaded(queue_depth):
    harness = Harness(max_loras=2, queue_depth=queue_depth)
    harness.add([1], max_tokens=30, adapter=A)
    harness.step()
    harness.add([2], max_tokens=30, adapter=B)
    harness.submit()
    while harness.in_flight:
        harness.fail()
    for slot, content in loads(harness):
        if content == B.content:
            harness.runner.adapters[slot] = fake_adapter("garbage")
    harness.add([3], max_tokens=3, adapter=B)
    harness.run()
    assert [content for _, content in loads(harness)].count(B.content) == 2
    assert outputs_of(harness.requests[-1]) == [continuation([3], 3, choice_of(B))]
    assert not any(harness.scheduler.lora_slots._num_users)


def test_dropping_an_adapter():
    harness = Harness(max_loras=2)
    harness.add([1], max_tokens=20, adapter=A)
    harness.step()
    harness.scheduler.lora_slots.drop(A.content)  # in use: nothing happens
    harness.run()
    harness.scheduler.lora_slots.drop(A.content)
    harness.scheduler.lora_slots.drop(B.content)  # never loaded
    harness.add([2], max_tokens=2)
    harness.run()
    assert loads(harness) == [(0, A.content), (0, None)]
    harness.add([1], max_tokens=2, adapter=A)
    harness.run()
    check_all(harness)


def test_aborted_while_it_waits_for_a_slot():
    harness = Harness(max_loras=1)
    first = harness.add([1], max_tokens=5, adapter=A)
    waits = [harness.add([2], n=2, max_tokens=5, adapter=B) for _ in range(3)]
    harness.step()
    assert harness.scheduler.num_waiting == 6
    for request in waits:
        harness.abort(request)
    assert harness.scheduler.num_waiting == harness.scheduler.num_waiting_tokens == 0
    harness.run()
    check(first)
    assert harness.pool.num_free == harness.pool.num_blocks
    harness.scheduler.lora_slots.call_back()
    assert not harness.scheduler._waiting.has_parked


# -- random traffic ----------------------------------------------------------------------------------------


class AdapterTraffic:
    """Arrivals for many adapters over few slots, with aborts, failures, preemptions, beams and choices."""

    def __init__(self, seed: int, queue_depth: int, failures: bool):
        self.rng = rng = random.Random(seed)
        self.failures = failures
        self.num_slots = rng.randint(1, 3)
        budget = rng.choice([2, 8, 32])
        smallest = most_blocks(64, 16, (None,), budget)
        self.harness = Harness(
            num_blocks=rng.choice([2 * smallest, 8 * smallest]),
            max_num_seqs=min(rng.randint(2, 8), budget),
            budget=budget,
            max_model_len=64,
            max_loras=self.num_slots,
            queue_depth=queue_depth,
            prefix_caching=rng.random() < 0.8,
            max_num_partial_prefills=rng.randint(1, 4),
        )
        self.adapters = [None, *(fake_adapter(str(i)) for i in range(rng.randint(1, 6)))]
        self.num_finished = 0

    def disturb(self) -> None:
        rng, harness = self.rng, self.harness
        live = [r for r in harness.requests[-60:] if not all(s.finished for s in r.sequences)]
        while rng.random() < 0.4 and len(live) < 25:
            live.append(self._arrival())
        if live and rng.random() < 0.05:
            harness.abort(rng.choice(live))
        if rng.random() < 0.03:
            harness.scheduler.lora_slots.drop(rng.choice(self.adapters[1:]).content)

    def _arrival(self) -> Request:
        rng = self.rng
        prompt = [*PROMPT[: rng.randint(0, 34)], rng.randint(1, 200)]
        options = {"adapter": rng.choice(self.adapters), "priority": rng.choice([0, 0, 0, 1])}
        if rng.random() < 0.15:
            return self.harness.add(prompt, beam_width=2, max_tokens=rng.randint(1, 8), **options)
        n = rng.choice([1, 1, 1, 3])
        return self.harness.add(prompt, n=n, max_tokens=rng.choice([1, 3, 20]), **options)

    def check_step(self) -> None:
        scheduler = self.harness.scheduler
        slots = scheduler.lora_slots
        running = [s for s in scheduler._holders() if s.slot >= 0]
        # After a failed step those that end have another slot than those that begin with the same adapter.
        held = {(s.lora_slot, s.request.adapter.content) for s in running if s.request.adapter is not None}
        assert len(held) <= self.num_slots
        assert len({slot for slot, _ in held}) == len(held)
        assert all((s.lora_slot >= 0) == (s.request.adapter is not None) for s in running)
        # Each slot is empty, idle or in use, and its users are those that have it.
        in_use = {slot for slot, users in enumerate(slots._num_users) if users}
        assert in_use == {slot for slot, _ in held}
        idle = {slots._slot_of[content] for content in slots._idle}
        assert sorted([*in_use, *idle, *slots._free]) == list(range(self.num_slots))
        users = {}
        for sequence in {s.sequence_id: s for s in running if s.lora_slot >= 0}.values():
            users[sequence.lora_slot] = users.get(sequence.lora_slot, 0) + 1
        assert users == {slot: count for slot, count in enumerate(slots._num_users) if count}
        waiting = sum(s.num_uncomputed_tokens for s in scheduler.sequences() if s.slot < 0)
        assert scheduler.num_waiting_tokens == waiting

    def run(self, num_steps: int) -> None:
        harness, rng = self.harness, self.rng
        for _ in range(num_steps):
            self.disturb()
            harness.submit()
            assert harness.in_flight or not harness.scheduler.has_work, "work, and no progress"
            self.disturb()
            if harness.in_flight and self.failures and rng.random() < 0.05:
                harness.fail()
            elif harness.in_flight:
                harness.land()
            self.check_step()
            harness.runner.batches.clear()
        harness.run()
        self.check_end()

    def check_end(self) -> None:
        harness = self.harness
        assert harness.pool.num_free == harness.pool.num_blocks
        assert not any(harness.scheduler.lora_slots._num_users)
        assert harness.runner.max_adapters <= self.num_slots
        for request in harness.requests:
            if {s.finish_reason for s in request.sequences} & {"abort", "error"}:
                continue
            if request.beams is None:
                check(request)
                continue
            hypotheses = [h.token_ids for h in request.beams.results()]
            alone = beam_search_alone(request.prompt_token_ids, beam_width=2, max_tokens=len(hypotheses[0]))
            assert hypotheses == alone


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_random_traffic(seed, queue_depth, failures):
    AdapterTraffic(seed, queue_depth, failures).run(100)
