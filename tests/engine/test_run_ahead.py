"""Two steps in flight: what the scheduler says of tokens that nobody knows yet."""

from __future__ import annotations

import pytest
from helpers.fake_model import continuation
from helpers.scheduler_harness import Harness, outputs_of

from streamllm.engine.prefix_hash import block_hashes, chain_seed
from streamllm.runner.token_rules import TokenRules


def harness(**settings) -> Harness:
    return Harness(**{"queue_depth": 2, "budget": 64, **settings})


def rows_of(harness: Harness) -> list[list[tuple[int, int, int]]]:
    """Of each step so far its rows: where the chunk begins, its length, and how many new ids came with it."""
    return [
        [(row.num_computed_tokens, row.num_tokens, len(row.new_token_ids)) for row in batch.rows]
        for batch in harness.runner.batches
    ]


def test_a_token_is_computed_a_step_before_its_id_is_told():
    h = harness()
    request = h.add([1, 2, 3], max_tokens=4)
    h.submit()
    assert rows_of(h) == [[(0, 3, 0)], [(3, 1, 0)]]
    assert outputs_of(request) == [[]]
    h.run()
    # The first token is told when the second is computed; after the last there is no step.
    assert rows_of(h) == [[(0, 3, 0)], [(3, 1, 0)], [(4, 1, 1)], [(5, 1, 1)]]
    assert outputs_of(request) == [continuation([1, 2, 3], 4)]
    assert h.num_wasted(request) == [0]


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"max_tokens": 5}, {"max_tokens": None}])
@pytest.mark.parametrize("queue_depth", [2, 3])
def test_no_step_goes_past_an_end_by_length(limits, queue_depth):
    h = harness(queue_depth=queue_depth, max_model_len=32, num_blocks=2)
    request = h.add([1] * 20, n=1, **limits)
    h.run()
    assert len(outputs_of(request)[0]) == (limits["max_tokens"] or 12)
    assert h.num_wasted(request) == [0]
    assert h.pool.num_free == 2


def test_an_end_by_id_costs_one_token_and_holds_blocks_until_it_is_dropped():
    prompt = [5, 6, 7]
    stop = continuation(prompt, 4)[-1]
    h = harness()
    request = h.add(prompt, stop_token_ids=[stop], max_tokens=50)
    length = continuation(prompt, 4).index(stop) + 1
    while not request.sequences[0].finished:
        h.step()
    assert len(h.in_flight) == 1 and h.pool.num_used == 1
    assert not h.scheduler.has_work and h.scheduler.schedule() is None
    h.run()
    assert h.pool.num_used == 0
    assert outputs_of(request) == [continuation(prompt, length)]
    assert h.num_wasted(request) == [1]
    assert [len(updates) for updates in h.events] == [1] * length + [0]


def test_choices_run_ahead_from_their_fork_on():
    h = harness()
    request = h.add([1] * 20, n=3, max_tokens=5)
    h.submit()
    assert [len(rows) for rows in rows_of(h)] == [1, 3]
    h.run()
    assert outputs_of(request) == [continuation([1] * 20, 5, choice) for choice in range(3)]
    assert h.num_wasted(request) == [0, 0, 0]
    assert h.pool.num_used == 0


def test_a_block_is_found_only_when_its_last_token_is_known():
    h = harness()
    request = h.add([1] * 14, max_tokens=10)
    (sequence,) = request.sequences
    key = block_hashes([1] * 14 + continuation([1] * 14, 2), 16, chain_seed(salt=None))[0]
    while sequence.num_computed_tokens < 16:
        h.submit()
        h.land()
    # The step that computes the block's last token is in flight; its id is not known.
    while len(sequence.token_ids) < 16:
        assert h.pool.lookup((0, key)) is None
        h.submit()
        h.land()
    assert h.pool.lookup((0, key)) is not None
    h.run()
    again = h.add([1] * 14 + continuation([1] * 14, 10), max_tokens=1)
    h.run()
    assert again.num_cached_tokens == 16
    assert outputs_of(again) == [continuation(again.prompt_token_ids, 1)]


def test_a_block_whose_step_fails_after_it_was_found_is_forgotten():
    h = harness()
    request = h.add([1] * 14, max_tokens=10)
    while len(request.sequences[0].token_ids) < 16:
        h.step()
    assert h.pool.num_cached == 1 and h.in_flight
    h.fail()
    assert h.pool.num_cached == 0
    while h.in_flight:
        h.land()
    assert h.pool.num_used == 0


def test_a_failed_step_takes_along_who_came_with_the_step_behind_it():
    h = harness()
    first = h.add([1] * 20, max_tokens=10)
    h.submit()
    h.land()
    newcomer = h.add([2] * 20, max_tokens=10)
    h.submit()
    third = h.add([3] * 20, max_tokens=10)
    assert [len(batch.rows) for batch, _ in h.in_flight] == [1, 2]
    h.fail()
    assert [update.sequence.request for update in h.events[-1]] == [first, newcomer]
    assert h.pool.num_cached == 1  # of the first step, which had returned
    h.run()
    assert [s.finish_reason for r in (first, newcomer) for s in r.sequences] == ["error"] * 2
    assert outputs_of(third) == [continuation([3] * 20, 10)]
    assert h.pool.num_used == 0


def test_an_aborted_sequence_keeps_slot_and_blocks_until_the_last_of_its_steps_returns():
    h = harness()
    request = h.add([1] * 20, max_tokens=10)
    h.submit()
    h.abort(request)
    assert len(h.in_flight) == 2
    h.land()
    assert (h.pool.num_used, request.sequences[0].slot) == (2, 0)
    h.land()
    assert (h.pool.num_used, request.sequences[0].slot) == (0, -1)
    assert h.num_wasted(request) == [2]


def waits_for_its_ids(h: Harness, request, num_tokens: int) -> bool:
    """Whether every step of the request comes after the token before it is known."""
    (sequence,) = request.sequences
    for count in range(1, num_tokens + 1):
        h.submit()
        assert len(h.in_flight) == 1
        h.land()
        if sequence.num_output_tokens != count:
            return False
    return h.num_wasted(request) == [0]


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(repetition_penalty=1.1),
        TokenRules(frequency_penalty=0.1),
        TokenRules(bad_words={1: [([1], 2)]}),
        TokenRules(processors=(lambda prompt, output, logits: logits,)),
    ],
    ids=["repetition", "frequency", "bad words", "processors"],
)
def test_rules_that_look_at_the_output_wait_for_it(rules):
    h = harness()
    assert waits_for_its_ids(h, h.add([1, 2, 3], max_tokens=6, rules=rules), 6)


def test_rules_that_count_tokens_run_ahead():
    h = harness()
    h.add([1, 2, 3], max_tokens=6, rules=TokenRules(min_tokens=3))
    h.submit()
    assert len(h.in_flight) == 2


def test_who_finds_no_block_is_left_out_and_the_pipeline_drains_before_a_preemption():
    h = harness(num_blocks=8, max_num_seqs=3, max_model_len=64, budget=96, debug=False)
    first = h.add([1] * 37, max_tokens=27)
    last = h.add([2] * 33, max_tokens=31)
    h.step()
    taken = h.pool.allocate(h.pool.num_free)
    while not first.metrics.num_preemptions + last.metrics.num_preemptions:
        in_flight = len(h.in_flight)
        h.submit()
        if last.metrics.num_preemptions:
            assert in_flight == 0, "somebody was preempted under a step in flight"
        h.land()
    slots = [[row.slot for row in batch.rows] for batch in h.runner.batches]
    # The first in order finds no block; the last goes on for one step, then gives way.
    assert slots[-4:] == [[0, 1], [1], [0], [0]]
    h.pool.release(taken)
    h.run()
    assert first.metrics.num_preemptions == 0
    assert outputs_of(first) == [continuation([1] * 37, 27)]
    assert outputs_of(last) == [continuation([2] * 33, 31)]
    assert h.pool.num_used == 0


def test_a_prompt_alone_is_done_when_its_last_chunk_returns():
    h = harness(budget=8)
    request = h.add([1] * 20, max_tokens=1, prompt_only=True)
    h.submit()
    h.land()
    h.submit()
    # All of it has been scheduled, and a chunk has yet to return.
    assert request.sequences[0].num_uncomputed_tokens == 0
    h.land()
    assert not request.sequences[0].finished
    h.land()
    assert request.sequences[0].finish_reason == "length"
    assert h.pool.num_used == 0
