"""Steps cut into parts: the parts are the step, and a real runner gives the same for them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from helpers.in_parts import InParts
from helpers.random_runner import make_runner
from helpers.scheduler_harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.errors import InvalidRequestError
from streamllm.runner.messages import (
    LoraLoad,
    NewSequence,
    OutputRow,
    PoolRow,
    PromptRows,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
)
from streamllm.runner.micro_batches import StepInParts, merge, split, split_masks, without_outputs
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams


def new_sequence(slot: int, sequence_id: int) -> NewSequence:
    return NewSequence(slot, sequence_id, [1], 0, [[0]], SamplingParams(), None, 0, 0, 1)


@st.composite
def batches(draw: Any) -> ScheduledBatch:
    """Rows of any length, several output rows on some of them, in any order; sequence ``100 + slot``."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    count = len(lengths)
    slots = draw(st.permutations(range(count)))
    on_rows = draw(st.lists(st.integers(0, count - 1), max_size=2 * count))
    batch = ScheduledBatch(
        draw(st.integers(0, 9)),
        rows=[ScheduledRow(slot, 0, length, [], []) for slot, length in zip(slots, lengths, strict=True)],
        prompt_rows=[PromptRows(row, 1, [1], 0) for row in on_rows[: count // 2]],
        pool_rows=[PoolRow(row, "last", True) for row in on_rows[count // 2 : count]],
        finished_slots=draw(st.lists(st.integers(50, 60), max_size=3)),
        block_copies=[(1, 2)],
        lora_loads=[LoraLoad(0, None)],
    )
    for fork, row in enumerate(on_rows):
        is_own = draw(st.booleans())
        sequence_id = 100 + slots[row] if is_own else 1000 + fork
        batch.output_rows.append(OutputRow(row, sequence_id))
        if not is_own:
            batch.new_sequences.append(new_sequence(200 + fork, sequence_id))
    batch.new_sequences += [new_sequence(slot, 100 + slot) for slot in slots if draw(st.booleans())]
    return batch


def output_of(part: ScheduledBatch) -> StepOutput:
    """An output that names what each entry of it is for: sequence, and slot of its row."""
    rows = [row.slot for row in part.rows]
    output = StepOutput(
        token_ids=[[output.sequence_id, rows[output.row]] for output in part.output_rows],
        logprobs=[None for _ in part.output_rows],
        errors=[f"error of {output.sequence_id}" for output in part.output_rows],
    )
    output.prompt_logprobs = [f"prompt of {rows[prompt.row]}" for prompt in part.prompt_rows]
    output.pooled = [f"pooled of {rows[pooled.row]}" for pooled in part.pool_rows]
    return output


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5))
def test_the_parts_are_the_step(batch, num_parts):
    before = dataclasses.replace(batch)
    parts = split(batch, num_parts)
    assert batch == before
    assert len(parts) == (num_parts if len(batch.rows) >= num_parts else 1)
    assert [row for part in parts for row in part.rows] == batch.rows
    assert all(part.rows and part.step == batch.step for part in parts)
    for name in ("finished_slots", "block_copies", "lora_loads"):
        assert [getattr(part, name) for part in parts] == [getattr(batch, name), *([] for _ in parts[1:])]
    known: set[int] = set()
    for part in parts:
        known |= {sequence.sequence_id for sequence in part.new_sequences}
        new = {s.sequence_id for s in batch.new_sequences}
        used = {100 + row.slot for row in part.rows} | {output.sequence_id for output in part.output_rows}
        assert used & new <= known, "a sequence is used before it is there"
    assert sorted(s.slot for part in parts for s in part.new_sequences) == sorted(
        s.slot for s in batch.new_sequences
    )
    assert merge(batch, parts, [output_of(part) for part in parts]) == output_of(batch)


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 5))
def test_masks_go_with_their_output_rows(batch, num_parts):
    masks = {row: np.array([row]) for row in range(0, len(batch.output_rows), 2)}
    parts = split(batch, num_parts)
    found = []
    for part, own in zip(parts, split_masks(batch, parts, masks), strict=True):
        slots = [row.slot for row in part.rows]
        for index, mask in own.items():
            output, whole = part.output_rows[index], batch.output_rows[int(mask[0])]
            assert output.sequence_id == whole.sequence_id
            assert slots[output.row] == batch.rows[whole.row].slot
            found.append(int(mask[0]))
    assert sorted(found) == sorted(masks)


def test_parts_are_about_as_long():
    batch = ScheduledBatch(0, rows=[ScheduledRow(slot, 5, 1, [1], []) for slot in range(64)])
    assert [part.num_tokens for part in split(batch, 4)] == [16] * 4
    batch.rows.append(ScheduledRow(64, 0, 64, [], []))
    assert [part.num_tokens for part in split(batch, 2)] == [64, 64]


class Twins:
    """Two runners of one model: one computes each step as it is, the other in parts."""

    def __init__(self, num_parts: int, **settings: Any) -> None:
        self.runners: list[ModelRunner] = [make_runner(**settings) for _ in range(2)]
        self.cut = InParts(self.runners[1], num_parts)
        self.num_drawn: dict[int, int] = {}

    def step(self, batch: ScheduledBatch) -> StepOutput:
        expected = self.runners[0].step(batch)
        found = self.cut.step(batch)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs
        for own, whole in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
            np.testing.assert_equal(dataclasses.asdict(own), dataclasses.asdict(whole))
        return found

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_parts=st.integers(2, 4))
def test_a_runner_gives_the_same_bits_for_parts(seed, num_parts):
    """Traffic with shared beginnings, several choices, preemptions, logprobs of prompts."""
    rng = random.Random(seed)
    harness = Harness(num_blocks=24, max_num_seqs=8, budget=48, max_num_partial_prefills=2)
    twins = Twins(num_parts, num_blocks=24, max_num_seqs=8, max_num_batched_tokens=48, threads=1)
    harness.runner = twins
    stems = [[rng.randint(1, 69) for _ in range(64)] for _ in range(2)]
    for _ in range(10):
        prompt = [*rng.choice(stems)[: rng.randint(0, 64)], rng.randint(1, 69)]
        harness.add(
            prompt,
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randint(1, 20),
            temperature=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        harness.step()
    harness.run()
    twins.close()
    assert twins.cut.num_cut > 3
    assert harness.pool.num_free == harness.pool.num_blocks


def test_the_first_failure_comes_out_when_all_parts_are_done():
    done = []

    class Part:
        exclusive = True

        def __init__(self, number: int) -> None:
            self.number = number

        def sample(self, masks: Any = None) -> None:
            self.masks = masks

        async def output(self) -> StepOutput:
            await asyncio.sleep(0.01 * self.number)
            done.append(self.number)
            if self.number:
                raise InvalidRequestError(f"part {self.number}", param=None)
            return StepOutput([], [], [])

    batch = ScheduledBatch(0, rows=[ScheduledRow(slot, 0, 1, [], []) for slot in range(3)])
    step = StepInParts(batch, split(batch, 3), [Part(number) for number in range(3)])
    step.sample()
    with pytest.raises(InvalidRequestError, match="part 1"):
        asyncio.run(step.output())
    assert done == [0, 1, 2]


def test_earlier_stages_compute_the_forward_alone():
    batch = ScheduledBatch(
        0,
        new_sequences=[new_sequence(0, 7)],
        rows=[ScheduledRow(0, 0, 1, [], [])],
        output_rows=[OutputRow(0, 7)],
        prompt_rows=[PromptRows(0, 1, [1], 0)],
        pool_rows=[PoolRow(0, "last", True)],
    )
    assert without_outputs(batch) == ScheduledBatch(0, new_sequences=batch.new_sequences, rows=batch.rows)
