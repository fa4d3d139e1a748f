from __future__ import annotations

import random

import pytest
from helpers.fake_model import FakeRunner, continuation
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import BlockTable
from streamllm.engine.request import Request, Sequence
from streamllm.engine.scheduler import Scheduler
from streamllm.outputs import RequestMetrics
from streamllm.runner.messages import StepOutput
from streamllm.sampling_params import SamplingParams

MAX_MODEL_LEN = 96


class Harness:
    """The scheduler and a fake model, stepped by hand."""

    def __init__(self, *, num_blocks=64, block_size=16, max_num_seqs=8, budget=32):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.runner = FakeRunner(block_size=block_size, max_num_batched_tokens=budget)
        self.sequences: list[Sequence] = []
        self.events: list = []

    def add(self, prompt: list[int], **params) -> Sequence:
        request = Request(
            request_id=str(len(self.sequences)),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            eos_token_ids=frozenset({0}),
            max_total_tokens=MAX_MODEL_LEN,
            metrics=RequestMetrics(arrival_time=0.0),
            stream=None,
        )
        sequence = Sequence(
            sequence_id=len(self.sequences),
            request=request,
            choice_index=0,
            seed=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            block_table=BlockTable(self.pool),
            text=None,
        )
        request.sequences = [sequence]
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self, between=lambda: None) -> bool:
        """One step; ``between`` runs while it is in flight. False when there is nothing to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        output = self.runner.step(batch)
        between()
        self.events.append(self.scheduler.update(batch, output))
        return True

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 10_000, "livelock"


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def test_a_prompt_is_cut_into_chunks_of_the_budget_and_then_decodes():
    harness = Harness(budget=16, max_num_seqs=8)
    sequence = harness.add(list(range(1, 41)), max_tokens=3)
    harness.run()
    chunks = [batch.rows[0].num_tokens for batch in harness.runner.batches]
    assert chunks == [16, 16, 8, 1, 1]
    assert output_of(sequence) == continuation(list(range(1, 41)), 3)
    assert sequence.finish_reason == "length"


def test_decodes_go_on_while_a_long_prompt_is_prefilled():
    harness = Harness(budget=16, max_num_seqs=8)
    first = harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    harness.add(list(range(1, 65)), max_tokens=1)
    before = len(output_of(first))
    for _ in range(4):
        harness.step()
    assert len(output_of(first)) == before + 4
    assert all(batch.num_tokens <= 16 for batch in harness.runner.batches)


def test_no_more_than_max_num_seqs_run_and_slots_are_reused():
    harness = Harness(max_num_seqs=2)
    for _ in range(5):
        harness.add([1, 2, 3], max_tokens=4)
    harness.run()
    assert max(len(batch.rows) for batch in harness.runner.batches) == 2
    assert {row.slot for batch in harness.runner.batches for row in batch.rows} == {0, 1}


def test_running_messages_are_incremental():
    harness = Harness()
    harness.add(list(range(1, 17)), max_tokens=4)
    harness.run()
    first, second, *_ = harness.runner.batches
    assert first.new_sequences[0].block_ids and first.rows[0].new_token_ids == []
    assert second.new_sequences == []
    assert len(second.rows[0].new_token_ids) == 1
    assert len(second.rows[0].new_block_ids) == 1


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason"),
    [
        ({"stop_token_ids": [ord(c) for c in "abcdefghijklmnopqrstuvwxyz ABCDE"]}, "stop", "id"),
        ({"max_tokens": 5}, "length", None),
        ({"max_tokens": None}, "length", None),
    ],
)
def test_endings_by_id_and_length(params, reason, stop_reason):
    harness = Harness()
    sequence = harness.add([5, 6, 7], **params)
    harness.run()
    assert sequence.finish_reason == reason
    assert sequence.stop_reason == (output_of(sequence)[-1] if stop_reason == "id" else None)
    if params.get("max_tokens", 0) is None:
        assert len(sequence.token_ids) == MAX_MODEL_LEN


def test_out_of_blocks_the_last_comer_is_preempted_and_loses_nothing():
    harness = Harness(num_blocks=7, max_num_seqs=4, budget=32)
    prompts = [[i + 1] * 20 for i in range(3)]
    sequences = [harness.add(prompt, max_tokens=40) for prompt in prompts]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert sequences[0].request.metrics.num_preemptions == 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert output_of(sequence) == continuation(prompt, 40)
    assert harness.pool.num_used == 0


def test_blocks_of_an_aborted_sequence_are_held_until_its_step_returns():
    harness = Harness()
    sequence = harness.add(list(range(1, 20)), max_tokens=10)
    used = []

    def abort() -> None:
        harness.scheduler.finish(sequence, "abort")
        used.append(harness.pool.num_used)

    harness.step(between=abort)
    assert used == [2]
    assert harness.pool.num_used == 0
    assert not harness.scheduler.has_work
    assert harness.events == [[]]


def test_aborting_a_waiting_sequence_never_schedules_it():
    harness = Harness(max_num_seqs=1)
    harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=3)
    third = harness.add([5, 6], max_tokens=3)
    harness.step()
    harness.scheduler.finish(second, "abort")
    assert harness.scheduler.num_waiting == 1
    harness.run()
    assert output_of(second) == []
    assert third.finish_reason == "length"


def test_a_step_that_fails_ends_its_sequences_and_no_others():
    harness = Harness(max_num_seqs=1)
    first = harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=3)
    batch = harness.scheduler.schedule()
    updates = harness.scheduler.fail_step(batch, "it broke")
    assert [(u.sequence, u.error) for u in updates] == [(first, "it broke")]
    assert first.finish_reason == "error"
    harness.run()
    assert second.finish_reason == "length"
    assert harness.pool.num_used == 0


def test_a_row_without_finite_logits_ends_only_its_own_sequence():
    harness = Harness()
    first = harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=3)
    batch = harness.scheduler.schedule()
    updates = harness.scheduler.update(batch, StepOutput([[], [65]], [None, None], ["not finite", None]))
    assert updates[0].error == "not finite"
    assert first.finish_reason == "error"
    assert output_of(second) == [65]


def random_run(seed: int, num_steps: int) -> None:
    """Random arrivals and aborts on a random pool; every promise is checked in every step."""
    rng = random.Random(seed)
    block_size = rng.choice([16, 32])
    smallest = -(-MAX_MODEL_LEN // block_size)
    budget = rng.choice([1, 4, 16, 64])
    harness = Harness(
        num_blocks=rng.randint(smallest, 4 * smallest),
        block_size=block_size,
        max_num_seqs=min(rng.randint(1, 12), budget),
        budget=budget,
    )
    live: list[Sequence] = []

    def disturb() -> None:
        while rng.random() < 0.3 and len(live) < 40:
            prompt = [rng.randint(1, 200) for _ in range(rng.randint(1, MAX_MODEL_LEN - 1))]
            live.append(harness.add(prompt, max_tokens=rng.choice([1, 2, 10, None])))
        if live and rng.random() < 0.05:
            harness.scheduler.finish(rng.choice(live), "abort")

    for _ in range(num_steps):
        disturb()
        stepped = harness.step(between=disturb)
        assert stepped or not harness.scheduler.has_work, "work, and no progress"
        live = [sequence for sequence in live if not sequence.finished]
        held = [b for s in harness.scheduler.sequences() for b in s.block_table.block_ids]
        assert len(held) == len(set(held)) == harness.pool.num_used
        assert harness.scheduler.num_running <= harness.scheduler.max_num_seqs
    harness.run()
    assert harness.pool.num_free == harness.pool.num_blocks
    for sequence in harness.sequences:
        output = output_of(sequence)
        assert output == continuation(sequence.request.prompt_token_ids, len(output))
        assert sequence.finished


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_random_traffic_keeps_every_promise(seed):
    random_run(seed, 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_for_long(seed):
    random_run(seed, 10_000)
