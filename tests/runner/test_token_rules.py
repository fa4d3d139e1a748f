"""A sequence's rules as it grows, against plain Python and against a fresh start at the same point."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch_state import make_inputs

from streamllm.ops.step_inputs import ROW_EDITS, SamplingBuffers
from streamllm.runner.batch_state import BatchState
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow
from streamllm.runner.sampler import RowEdits
from streamllm.runner.token_rules import SequenceRules, TokenRules
from streamllm.sampling_params import SamplingParams

TOKENS = st.integers(0, 12)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start(rules: TokenRules, tokens: array, num_prompt: int) -> tuple[SequenceRules, np.ndarray]:
    records = np.zeros(1, ROW_EDITS)
    return SequenceRules(rules, tokens, num_prompt, records[0]), records


def counts_of(records: np.ndarray) -> dict[int, int]:
    edits = RowEdits.at(records.ctypes.data)
    assert len(set(edits.seen_ids.tolist())) == len(edits.seen_ids)
    return dict(zip(edits.seen_ids.tolist(), edits.output_counts.tolist(), strict=True))


def bans_of(records: np.ndarray) -> set[int]:
    return set(RowEdits.at(records.ctypes.data).banned_ids.tolist())


def forbidden(words: list[list[int]], tokens: list[int]) -> set[int]:
    """The last ids of the words that ``tokens`` end in, but for that last id."""
    return {
        word[-1]
        for word in words
        if len(word) > 1 and len(tokens) >= len(word) - 1 and tokens[-(len(word) - 1) :] == word[:-1]
    }


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=30),
    pieces=st.lists(st.lists(TOKENS, max_size=40), max_size=8),
    repetition=st.sampled_from([1.0, 1.5]),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6),
    min_tokens=st.integers(0, 30),
)
def test_growing_equals_starting_afresh_and_plain_counting(prompt, pieces, repetition, words, min_tokens):
    by_last: dict[int, list] = {}
    for word in words:
        if len(word) > 1:
            by_last.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))
    single = {word[0] for word in words if len(word) == 1}
    rules = TokenRules(
        repetition_penalty=repetition,
        presence_penalty=0.5,
        banned_ids=ids(*single),
        held_back_ids=ids(40, 41),
        min_tokens=min_tokens,
        bad_words=by_last,
    )
    tokens = array("i", prompt)
    growing, records = start(rules, tokens, len(prompt))
    for piece in [[], *pieces]:
        tokens.extend(piece)
        growing.append(piece)
        growing.refresh(tokens, len(tokens))
        fresh, fresh_records = start(rules, array("i", tokens), len(prompt))
        fresh.refresh(tokens, len(tokens))
        output = tokens.tolist()[len(prompt) :]
        expected = Counter(output)
        if repetition != 1.0:
            expected.update(dict.fromkeys(prompt, 0))
        assert counts_of(records) == counts_of(fresh_records) == dict(expected)
        bans = single | forbidden(words, tokens.tolist())
        bans |= {40, 41} if len(output) < min_tokens else set()
        assert bans_of(records) == bans_of(fresh_records) == bans


def test_without_penalties_nothing_is_counted():
    tokens = array("i", [1, 2, 3])
    growing, records = start(TokenRules(banned_ids=ids(5)), tokens, 2)
    growing.append([7])
    assert counts_of(records) == {}
    assert not TokenRules(processors=(lambda *_: None,)).edits_logits


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_repetition_penalty_stays_a_float32_number(penalty):
    _, records = start(TokenRules(repetition_penalty=penalty), array("i", [1]), 1)
    value = RowEdits.at(records.ctypes.data).repetition_penalty
    assert 0 < value < np.inf


def new_sequence(slot: int, tokens: list[int], rules: TokenRules | None, num_prompt: int = 2) -> NewSequence:
    return NewSequence(
        slot=slot,
        sequence_id=100 + slot,
        token_ids=tokens,
        num_computed_tokens=0,
        block_ids=[[0]],
        params=SamplingParams(),
        num_logprobs=None,
        seed=0,
        choice_index=0,
        num_prompt_tokens=num_prompt,
        rules=rules,
    )


def test_the_batch_state_hands_slots_on_without_leftovers():
    """Rows with rules, without, and a slot that a plain sequence takes over."""
    state, inputs, sampling = BatchState(3), make_inputs(slots=3), SamplingBuffers.allocate(3)
    mask = np.array([0b1011], np.uint32)
    ruled = TokenRules(presence_penalty=1.0, allowed_mask=mask)

    def step(number: int, slots: list[int], **news) -> None:
        batch = ScheduledBatch(number, **news)
        known = {new.slot for new in batch.new_sequences}
        for index, slot in enumerate(slots):
            tokens = [] if slot in known else [9]
            length = len(state.token_ids(slot)) if slot not in known else 2
            start_at, chunk = (0, length) if slot in known else (length, 1)
            batch.rows.append(ScheduledRow(slot, start_at, chunk, tokens, []))
            batch.output_rows.append(OutputRow(index, 100 + slot))
        state.update(batch)
        state.fill(batch, inputs)
        state.fill_outputs(batch, inputs, sampling)

    step(0, [0, 1], new_sequences=[new_sequence(0, [4, 5], ruled), new_sequence(1, [4, 5], None)])
    assert sampling.edits[1] == 0 and sampling.allowed_mask[:2].tolist() == [mask.ctypes.data, 0]
    assert len(RowEdits.at(int(sampling.edits[0])).seen_ids) == 0
    step(1, [1, 0])
    assert sampling.edits[0] == 0
    assert RowEdits.at(int(sampling.edits[1])).output_counts.tolist() == [1]
    assert state.rules(100) is ruled and state.rules(101) is None
    # Preempted and back in another slot, its old one taken by a plain sequence.
    step(
        2,
        [2, 0],
        finished_slots=[0],
        new_sequences=[new_sequence(2, [4, 5, 9], ruled), new_sequence(0, [4, 5], None)],
    )
    assert sampling.edits[1] == 0 and sampling.allowed_mask[1] == 0
    assert RowEdits.at(int(sampling.edits[0])).seen_ids.tolist() == [9]


@pytest.mark.parametrize(
    ("rules", "they_do"),
    [
        ({}, False),
        ({"bias_ids": ids(1), "bias_values": np.ones(1, np.float32)}, False),
        ({"banned_ids": ids(1), "held_back_ids": ids(2), "min_tokens": 3}, False),
        ({"allowed_mask": np.ones(1, np.uint32)}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"bad_words": {1: [(array("i", [1]), 2)]}}, True),
        ({"processors": (lambda prompt, output, logits: logits,)}, True),
    ],
)
def test_which_rules_ask_for_the_tokens_generated(rules, they_do):
    assert TokenRules(**rules).depend_on_output == they_do
