"""The runner's memory of sequences, against plain lists."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.ops.kv_cache import KVCache
from streamllm.ops.step_inputs import UNKNOWN_TOKEN, SamplingBuffers, StepInputs
from streamllm.runner.batch_state import BatchState
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow
from streamllm.runner.sampler import RowEdits
from streamllm.runner.token_rules import TokenRules
from streamllm.sampling_params import SamplingParams

BLOCK = 16
SLOTS = 5
GROUPS = 2


def make_inputs(max_tokens: int = 4096, slots: int = SLOTS) -> StepInputs:
    cache = KVCache(
        layers_per_block=1,
        num_blocks=4,
        block_size=BLOCK,
        num_kv_heads=1,
        head_dim=8,
        kv_cache_dtype="float32",
    )
    table = np.zeros((8, 4), np.float32)
    return StepInputs.allocate(max_tokens, slots, table, table, cache, num_groups=GROUPS)


def by_group(blocks: list[int]) -> list[list[int]]:
    """Each KV group has blocks of its own."""
    return [[block + 1000 * group for block in blocks] for group in range(GROUPS)]


def new_sequence(slot: int, tokens: list[int], blocks: list[int], **changes) -> NewSequence:
    fields = {
        "sequence_id": 100 + slot,
        "num_computed_tokens": 0,
        "params": SamplingParams(),
        "seed": 0,
        "choice_index": 0,
        "num_prompt_tokens": len(tokens),
        "num_logprobs": None,
        **changes,
    }
    return NewSequence(slot=slot, token_ids=tokens, block_ids=by_group(blocks), **fields)


@dataclass
class Expected:
    sequence_id: int
    prompt: int
    params: SamplingParams
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_match_plain_lists(data):
    """Sequences come, grow, finish and hand their slots on; every array of every step is as lists say."""
    state, inputs, sampling = BatchState(SLOTS, GROUPS), make_inputs(), SamplingBuffers.allocate(SLOTS)
    live: dict[int, Expected] = {}
    next_id, next_block = 0, 0
    for step in range(data.draw(st.integers(1, 12))):
        finished = [slot for slot in list(live) if data.draw(st.booleans())] if live else []
        for slot in finished:
            del live[slot]
        batch = ScheduledBatch(step=step, finished_slots=finished)
        slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(0, SLOTS))]
        expected_rows = []
        for slot in slots:
            fresh = slot not in live
            if fresh:
                length = data.draw(st.integers(1, 70))
                params = SamplingParams(temperature=data.draw(st.sampled_from([0.0, 0.5])), top_k=slot)
                live[slot] = Expected(next_id, data.draw(st.integers(1, length)), params, list(range(length)))
                next_id += 1
            sequence = live[slot]
            new_tokens = [] if fresh else data.draw(st.lists(st.integers(0, 999), max_size=40))
            sequence.tokens += new_tokens
            left = len(sequence.tokens) - sequence.computed
            if left == 0:
                new_tokens = [7]
                sequence.tokens += new_tokens
                left = 1
            chunk = data.draw(st.integers(1, left))
            known = len(sequence.blocks)
            if known and not fresh and data.draw(st.booleans()):
                # Copy-on-write: the last block is replaced.
                known -= 1
                sequence.blocks[known] = next_block = next_block + 1
            while len(sequence.blocks) * BLOCK < sequence.computed + chunk:
                sequence.blocks.append(next_block := next_block + 1)
            if fresh:
                batch.new_sequences.append(
                    new_sequence(
                        slot,
                        list(sequence.tokens),
                        list(sequence.blocks),
                        sequence_id=sequence.sequence_id,
                        params=sequence.params,
                        seed=-slot - 1,
                        num_prompt_tokens=sequence.prompt,
                    )
                )
            updates = []
            if not fresh and sequence.blocks[known:]:
                news = by_group(sequence.blocks[known:])
                updates = [(group, known, blocks) for group, blocks in enumerate(news)]
            batch.rows.append(ScheduledRow(slot, sequence.computed, chunk, new_tokens, updates))
            expected_rows.append((slot, sequence.computed, chunk))
            sequence.computed += chunk
            if sequence.computed == len(sequence.tokens):
                batch.output_rows.append(OutputRow(len(batch.rows) - 1, sequence.sequence_id))
        state.update(batch)
        state.fill(batch, inputs)
        state.fill_outputs(batch, inputs, sampling)
        check_step(batch, inputs, sampling, live, expected_rows)
        assert state.num_sequences == len(live)
        for slot, sequence in live.items():
            assert state.token_ids(slot) == sequence.tokens
            assert state.block_ids(slot) == by_group(sequence.blocks)


def check_step(batch, inputs, sampling, live, expected_rows):
    tokens, positions, slots, query_start = [], [], [], [0]
    for slot, start, chunk in expected_rows:
        sequence = live[slot]
        span = range(start, start + chunk)
        tokens += [sequence.tokens[position] for position in span]
        positions += span
        slots += [sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK for position in span]
        query_start.append(len(tokens))
    count = len(tokens)
    assert (inputs.num_tokens, inputs.num_sequences) == (count, len(expected_rows))
    assert inputs.token_ids[:count].tolist() == tokens
    assert inputs.rope_rows[:count].tolist() == positions
    for group in range(GROUPS):
        assert inputs.slot_mapping[group, :count].tolist() == [s + 1000 * BLOCK * group for s in slots]
    assert inputs.query_start[: len(query_start)].tolist() == query_start
    for index, (slot, start, chunk) in enumerate(expected_rows):
        assert inputs.context_lens[index] == start + chunk
        for group, blocks in enumerate(by_group(live[slot].blocks)):
            address = int(inputs.block_tables[group, index])
            assert list((ctypes.c_int32 * len(blocks)).from_address(address)) == blocks
    assert inputs.num_outputs == len(batch.output_rows)
    for index, output in enumerate(batch.output_rows):
        slot = batch.rows[output.row].slot
        sequence = live[slot]
        assert inputs.output_rows[index] == query_start[output.row + 1] - 1
        assert sampling.position[index] == len(sequence.tokens) - sequence.prompt
        assert sampling.temperature[index] == np.float32(sequence.params.temperature)
        assert sampling.top_k[index] == slot
        assert int(sampling.seed[index]) == 2**64 - slot - 1


def test_a_taken_slot_and_an_empty_one_are_refused():
    state = BatchState(2, GROUPS)
    state.update(ScheduledBatch(0, new_sequences=[new_sequence(1, [1, 2], [0])]))
    with pytest.raises(ValueError, match="slot 1 already holds sequence 101"):
        state.update(ScheduledBatch(1, new_sequences=[new_sequence(1, [3], [1])]))
    with pytest.raises(ValueError, match="slot 0 is scheduled but holds no sequence"):
        state.update(ScheduledBatch(2, rows=[ScheduledRow(0, 0, 1, [], [])]))
    state.update(ScheduledBatch(3, finished_slots=[0, 1, 1]))
    assert state.num_sequences == 0


def test_positions_without_a_block_are_refused():
    state = BatchState(1, GROUPS)
    batch = ScheduledBatch(
        0, new_sequences=[new_sequence(0, list(range(17)), [0])], rows=[ScheduledRow(0, 0, 17, [], [])]
    )
    state.update(batch)
    with pytest.raises(IndexError):
        state.fill(batch, make_inputs())


def test_several_outputs_may_draw_from_one_row():
    """Forks of a sequence: each samples with its own choice number from the row that computed the prompt."""
    state, inputs, sampling = BatchState(3, GROUPS), make_inputs(), SamplingBuffers.allocate(3)
    batch = ScheduledBatch(
        0,
        new_sequences=[new_sequence(slot, [1, 2, 3], [0], choice_index=slot) for slot in range(3)],
        rows=[ScheduledRow(0, 0, 3, [], [])],
        output_rows=[OutputRow(0, 100 + slot) for slot in range(3)],
    )
    state.update(batch)
    state.fill(batch, inputs)
    state.fill_outputs(batch, inputs, sampling)
    assert inputs.output_rows[:3].tolist() == [2, 2, 2]
    assert sampling.choice[:3].tolist() == [0, 1, 2]


def test_a_token_that_is_being_drawn_is_unknown_and_counts():
    """With a queue of steps: the row's id is the backend's affair; slots stand in for block tables."""
    state, inputs, sampling = BatchState(3, GROUPS, queued=True), make_inputs(), SamplingBuffers.allocate(3)
    rules = TokenRules(held_back_ids=np.array([7], np.int32), min_tokens=2)
    sequences = [new_sequence(1, [1, 2, 3], [0], rules=rules), new_sequence(2, [4], [1])]
    batch = ScheduledBatch(
        0,
        new_sequences=sequences,
        rows=[ScheduledRow(2, 0, 1, [], []), ScheduledRow(1, 0, 3, [], [])],
        output_rows=[OutputRow(1, 101)],
    )
    banned = []
    for step in range(4):
        if step:
            # One step behind: what was drawn in the last one but one is told now.
            row = ScheduledRow(1, 2 + step, 1, [30 + step - 1] if step > 1 else [], [])
            batch = ScheduledBatch(step, rows=[row], output_rows=[OutputRow(0, 101)])
        state.update(batch)
        state.fill(batch, inputs)
        state.fill_outputs(batch, inputs, sampling)
        if step:
            assert inputs.token_ids[: inputs.num_tokens].tolist() == [UNKNOWN_TOKEN]
        assert sampling.position[0] == step
        assert inputs.slots[: inputs.num_sequences].tolist() == [row.slot for row in batch.rows]
        assert inputs.output_slots[0] == 1
        assert not inputs.block_tables.any()
        banned.append(RowEdits.at(int(sampling.edits[0])).banned_ids.tolist())
    assert state.token_ids(1) == [1, 2, 3, 31, 32]
    assert banned == [[7], [7], [], []]


def test_each_token_has_the_adapter_of_its_sequence():
    state, inputs = BatchState(SLOTS, GROUPS), make_inputs()

    def filled(batch: ScheduledBatch) -> list[int]:
        state.update(batch)
        state.fill(batch, inputs)
        return inputs.lora_slots[: inputs.num_tokens].tolist()

    first = ScheduledBatch(
        0,
        [
            new_sequence(1, [5, 6, 7], [0], lora_slot=2),
            new_sequence(0, [5], [1]),
            new_sequence(3, [8, 9], [2], lora_slot=0),
        ],
        [ScheduledRow(1, 0, 3, [], []), ScheduledRow(0, 0, 1, [], []), ScheduledRow(3, 0, 2, [], [])],
    )
    assert filled(first) == [2, 2, 2, -1, 0, 0] and inputs.has_adapters
    # A step of nobody with an adapter, while others of the batch have one.
    assert filled(ScheduledBatch(1, rows=[ScheduledRow(0, 1, 1, [4], [])])) == [-1]
    assert not inputs.has_adapters
    again = ScheduledBatch(
        2, [new_sequence(1, [5, 6], [0])], [ScheduledRow(1, 0, 2, [], [])], finished_slots=[1, 3]
    )
    assert filled(again) == [-1, -1] and not inputs.has_adapters
