from __future__ import annotations

import pytest
from helpers.fake_model import continuation
from helpers.scheduler_harness import Harness, beam_search_alone, outputs_of

from streamllm.engine.request import SequenceStatus
from streamllm.runner.messages import StepOutput


def prompt_of(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def chunks_of(harness: Harness) -> list[list[int]]:
    return [[row.num_tokens for row in batch.rows] for batch in harness.runner.batches]


# -- the token budget --------------------------------------------------------------------------------------


def test_a_prompt_is_cut_into_chunks_of_the_budget_and_then_decodes():
    harness = Harness(budget=16)
    request = harness.add(prompt_of(40), max_tokens=3)
    harness.run()
    assert chunks_of(harness) == [[16], [16], [8], [1], [1]]
    assert outputs_of(request) == [continuation(prompt_of(40), 3)]
    assert request.sequences[0].finish_reason == "length"


def test_decodes_go_on_while_a_long_prompt_is_prefilled():
    harness = Harness(budget=16)
    first = harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    harness.add(prompt_of(64), max_tokens=1)
    before = len(outputs_of(first)[0])
    for _ in range(4):
        harness.step()
    assert len(outputs_of(first)[0]) == before + 4
    assert all(batch.num_tokens <= 16 for batch in harness.runner.batches)


@pytest.mark.parametrize("long_length", [100, 1000, 3000])
def test_a_short_prompt_passes_a_long_one(long_length):
    harness = Harness(budget=32, num_blocks=300, max_model_len=4000)
    long = harness.add(prompt_of(long_length), max_tokens=1)
    harness.step()
    short = harness.add(prompt_of(30, 7), max_tokens=1)
    for _ in range(3):
        harness.step()
    assert len(outputs_of(short)[0]) == 1
    harness.run()
    assert outputs_of(long) == [continuation(prompt_of(long_length), 1)]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    harness = Harness(budget=32, num_blocks=300, max_model_len=4000)
    long = harness.add(prompt_of(320), max_tokens=1)
    steps = 0
    while not outputs_of(long)[0]:
        harness.add(prompt_of(16, steps), max_tokens=1)
        harness.add(prompt_of(16, steps + 3), max_tokens=1)
        harness.step()
        steps += 1
    # Alone it takes 10 steps; beside newcomers it keeps at least every second token of the budget.
    assert steps <= 21


def test_at_most_so_many_prompts_are_in_progress_and_whole_ones_pass():
    harness = Harness(budget=32, num_blocks=300, max_model_len=4000, max_num_partial_prefills=2)
    longs = [harness.add(prompt_of(200, i), max_tokens=1) for i in range(3)]
    harness.step()
    harness.step()
    short = harness.add(prompt_of(8, 50), max_tokens=1)
    harness.step()
    started = [request.admitted for request in longs]
    assert started == [True, True, False]
    assert outputs_of(short) == [continuation(prompt_of(8, 50), 1)]
    harness.run()
    assert all(len(outputs_of(request)[0]) == 1 for request in longs)


def test_the_longest_chunk_may_be_limited():
    harness = Harness(budget=64, long_prefill_token_threshold=10)
    harness.add(prompt_of(35), max_tokens=1)
    harness.run()
    assert chunks_of(harness) == [[10], [10], [10], [5]]


def test_no_more_than_max_num_seqs_run_and_slots_are_reused():
    harness = Harness(max_num_seqs=2)
    for _ in range(5):
        harness.add([1, 2, 3], max_tokens=4)
    harness.run()
    assert max(len(batch.rows) for batch in harness.runner.batches) == 2
    assert {row.slot for batch in harness.runner.batches for row in batch.rows} == {0, 1}


def test_running_messages_are_incremental():
    harness = Harness()
    harness.add(prompt_of(16), max_tokens=4)
    harness.run()
    first, second, third, *_ = harness.runner.batches
    assert first.new_sequences[0].block_ids[0] and first.rows[0].new_token_ids == []
    assert second.new_sequences == []
    assert len(second.rows[0].new_token_ids) == 1
    ((group, index, blocks),) = second.rows[0].block_updates
    assert (group, index, len(blocks)) == (0, 1, 1)
    assert third.rows[0].block_updates == []


# -- endings -----------------------------------------------------------------------------------------------


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
    request = harness.add([5, 6, 7], **params)
    harness.run()
    (sequence,) = request.sequences
    assert sequence.finish_reason == reason
    assert sequence.stop_reason == (sequence.token_ids[-1] if stop_reason == "id" else None)
    if params.get("max_tokens", 0) is None:
        assert len(sequence.token_ids) == 96


def test_blocks_of_an_aborted_sequence_are_held_until_its_step_returns():
    harness = Harness()
    request = harness.add(prompt_of(19), max_tokens=10)
    used = []

    def abort() -> None:
        harness.abort(request)
        used.append(harness.pool.num_used)

    harness.step(between=abort)
    assert used == [2]
    assert harness.pool.num_used == 0
    assert not harness.scheduler.has_work
    assert harness.events == [[]]


def test_aborting_a_waiting_request_never_schedules_it():
    harness = Harness(max_num_seqs=1)
    harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=3, n=2)
    third = harness.add([5, 6], max_tokens=3)
    harness.step()
    assert harness.scheduler.num_waiting == 3
    harness.abort(second)
    assert harness.scheduler.num_waiting == 1
    assert harness.scheduler.num_waiting_tokens == 2
    harness.run()
    assert outputs_of(second) == [[], []]
    assert third.sequences[0].finish_reason == "length"


def test_a_step_that_fails_ends_its_sequences_and_forgets_what_it_wrote():
    harness = Harness(max_num_seqs=1)
    first = harness.add(prompt_of(32), max_tokens=3)
    second = harness.add(prompt_of(32), max_tokens=3)
    batch = harness.scheduler.schedule()
    updates = harness.scheduler.fail_step(batch, "it broke")
    assert [(u.sequence, u.error) for u in updates] == [(first.sequences[0], "it broke")]
    assert harness.pool.num_cached == 0
    harness.run()
    assert second.num_cached_tokens == 0
    assert outputs_of(second) == [continuation(prompt_of(32), 3)]
    assert harness.pool.num_used == 0


def test_a_row_without_finite_logits_ends_only_its_own_sequence():
    harness = Harness()
    first = harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=3)
    batch = harness.scheduler.schedule()
    updates = harness.scheduler.update(batch, StepOutput([[], [65]], [None, None], ["not finite", None]))
    assert updates[0].error == "not finite"
    assert first.sequences[0].finish_reason == "error"
    assert outputs_of(second) == [[65]]


# -- preemption and priority -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_out_of_blocks_the_last_comer_is_preempted_and_loses_nothing(prefix_caching):
    harness = Harness(num_blocks=7, max_num_seqs=4, prefix_caching=prefix_caching)
    prompts = [[i + 1] * 20 for i in range(3)]
    requests = [harness.add(prompt, max_tokens=40) for prompt in prompts]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert requests[0].metrics.num_preemptions == 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert outputs_of(request) == [continuation(prompt, 40)]
    assert harness.pool.num_used == 0


def test_lower_priorities_are_served_first_and_preempted_last():
    harness = Harness(num_blocks=7, max_num_seqs=4)
    late = harness.add([1] * 20, max_tokens=40, priority=5)
    harness.step()
    soon = harness.add([2] * 20, max_tokens=40, priority=-1)
    equal = harness.add([3] * 20, max_tokens=40, priority=-1)
    harness.run()
    assert late.metrics.num_preemptions > 0
    assert soon.metrics.num_preemptions == 0
    finished = [u.sequence.request for updates in harness.events for u in updates if u.finish_reason]
    assert finished == [soon, equal, late]


# -- the prefix cache --------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_token():
    harness = Harness(budget=64)
    prompt = prompt_of(48)
    harness.add(prompt, max_tokens=1)
    harness.run()
    for again, cached in [(prompt, 32), ([*prompt, 200], 48), (prompt[:40], 32), ([9, *prompt], 0)]:
        request = harness.add(again, max_tokens=4)
        harness.run()
        assert request.num_cached_tokens == cached
        assert outputs_of(request) == [continuation(again, 4)]
    counters = harness.scheduler.prefix_cache
    assert (counters.queries, counters.hits) == (48 + 48 + 49 + 40 + 49, 32 + 48 + 32)


def test_generated_tokens_are_found_too():
    harness = Harness(budget=64)
    first = harness.add(prompt_of(10), max_tokens=40)
    harness.run()
    conversation = prompt_of(10) + outputs_of(first)[0] + [7, 8]
    second = harness.add(conversation, max_tokens=2)
    harness.run()
    assert second.num_cached_tokens == 48


def test_a_later_row_of_the_same_step_shares_a_prefix():
    harness = Harness(budget=96)
    first = harness.add(prompt_of(40), max_tokens=2)
    second = harness.add(prompt_of(44), max_tokens=2)
    harness.step()
    assert chunks_of(harness) == [[40, 12]]
    harness.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert outputs_of(second) == [continuation(prompt_of(44), 2)]


def test_a_prefix_that_several_wait_for_is_computed_once():
    harness = Harness(budget=32, max_num_seqs=8, max_model_len=192)
    shared = prompt_of(128)
    requests = [harness.add([*shared, 200 + index, 7], max_tokens=2, ignore_eos=True) for index in range(5)]
    other = harness.add(prompt_of(20, 100), max_tokens=2, ignore_eos=True)
    harness.run()
    computed = sum(map(sum, chunks_of(harness)))
    # Once the prefix; of each request what follows it and one token of output; the other one.
    assert computed == 128 + 5 * (2 + 1) + 20 + 1
    assert [request.num_cached_tokens for request in requests] == [0, 128, 128, 128, 128]
    assert [outputs_of(request) for request in requests] == [
        [continuation([*shared, 200 + index, 7], 2)] for index in range(5)
    ]
    # It is not held up by those that wait.
    assert other.metrics.first_scheduled_time < requests[1].metrics.first_scheduled_time


def test_who_waits_for_a_prefix_goes_on_when_its_request_is_gone():
    harness = Harness(budget=32, max_num_seqs=8, max_model_len=192)
    shared = prompt_of(128)
    first, second, third = [
        harness.add([*shared, 200 + index], max_tokens=2, ignore_eos=True) for index in range(3)
    ]
    harness.step()
    harness.abort(first)
    harness.run()
    for request, last in [(second, 201), (third, 202)]:
        assert outputs_of(request) == [continuation([*shared, last], 2)]
    # What the first had computed is used, and the third waited for the second.
    assert 0 < second.num_cached_tokens < 128 == third.num_cached_tokens
    assert harness.pool.num_used == 0


def test_salts_keep_requests_apart():
    harness = Harness(budget=64)
    for salt, cached in [("a", 0), ("a", 32), ("b", 0), (None, 0), (None, 32)]:
        request = harness.add(prompt_of(40), max_tokens=1, salt=salt)
        harness.run()
        assert request.num_cached_tokens == cached


def test_eviction_takes_the_least_recently_used_and_tails_before_heads():
    harness = Harness(num_blocks=8, budget=64)
    old, new = prompt_of(48), prompt_of(48, 100)
    harness.add(old, max_tokens=1)
    harness.run()
    harness.add(new, max_tokens=1)
    harness.run()
    # Six of eight blocks remember; four fresh ones leave the head of the newer prompt.
    harness.add(prompt_of(60, 200), max_tokens=1)
    harness.run()
    request = harness.add(old, max_tokens=1)
    harness.run()
    assert request.num_cached_tokens < 32
    request = harness.add(new, max_tokens=1)
    harness.run()
    assert outputs_of(request) == [continuation(new, 1)]


def test_resetting_forgets_everything_and_disturbs_nobody():
    harness = Harness(budget=64)
    running = harness.add(prompt_of(40), max_tokens=30)
    harness.step()
    harness.pool.reset_cache()
    again = harness.add(prompt_of(40), max_tokens=2)
    harness.run()
    assert again.num_cached_tokens == 0
    assert outputs_of(running) == [continuation(prompt_of(40), 30)]


# -- forks -------------------------------------------------------------------------------------------------


def test_n_choices_compute_their_prompt_once_and_copy_on_write():
    harness = Harness(budget=64)
    request = harness.add(prompt_of(40), n=4, max_tokens=12)
    harness.step()
    assert chunks_of(harness) == [[40]]
    assert harness.pool.num_used == 3
    assert harness.scheduler.num_running == 4
    harness.step()
    # The partly filled third block has been copied for all but one.
    assert len(harness.runner.batches[1].block_copies) == 3
    assert harness.pool.num_used == 6
    harness.run()
    assert outputs_of(request) == [continuation(prompt_of(40), 12, choice) for choice in range(4)]
    assert harness.pool.num_used == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_choices_that_find_no_slot_queue_for_themselves(prefix_caching):
    harness = Harness(budget=64, max_num_seqs=2, prefix_caching=prefix_caching)
    request = harness.add(prompt_of(40), n=5, max_tokens=6)
    harness.run()
    assert outputs_of(request) == [continuation(prompt_of(40), 6, choice) for choice in range(5)]
    assert (request.num_cached_tokens, harness.scheduler.num_waiting) == (0, 0)


def test_forks_survive_preemption():
    harness = Harness(num_blocks=8, budget=64)
    request = harness.add(prompt_of(20), n=4, max_tokens=50)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert outputs_of(request) == [continuation(prompt_of(20), 50, choice) for choice in range(4)]


# -- beams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_in_the_batch_equal_the_search_alone(width, num_blocks):
    harness = Harness(num_blocks=num_blocks, budget=32, max_num_seqs=6)
    prompt = prompt_of(37)
    params = {"beam_width": width, "max_tokens": 24}
    request = harness.add(prompt, **params)
    others = [harness.add(prompt_of(30, i), max_tokens=30) for i in range(4)]
    harness.run()
    hypotheses = [h.token_ids for h in request.beams.results()]
    assert hypotheses == beam_search_alone(prompt, **params)
    assert len(hypotheses) == width
    for i, other in enumerate(others):
        assert outputs_of(other) == [continuation(prompt_of(30, i), 30)]
    assert harness.pool.num_used == 0
    if num_blocks == 13 and width == 4:
        assert harness.scheduler.num_preemptions > 0


def test_beams_share_their_blocks():
    harness = Harness(budget=64)
    harness.add(prompt_of(40), beam_width=4, max_tokens=12)
    most = 0
    while harness.step():
        most = max(most, harness.pool.num_used)
    assert most < 4 * 4


def test_a_beam_group_is_preempted_whole():
    harness = Harness(num_blocks=20, budget=64, max_num_seqs=8)
    first = harness.add(prompt_of(60), max_tokens=36)
    group = harness.add(prompt_of(30, 5), beam_width=4, max_tokens=40)
    while harness.step():
        states = {sequence.status for sequence in group.sequences}
        assert states in ({SequenceStatus.RUNNING}, {SequenceStatus.WAITING}, {SequenceStatus.FINISHED}) or (
            group.metrics.num_preemptions > 0
        )
    assert outputs_of(first) == [continuation(prompt_of(60), 36)]
    hypotheses = [h.token_ids for h in group.beams.results()]
    assert hypotheses == beam_search_alone(prompt_of(30, 5), beam_width=4, max_tokens=40)


# -- KV groups ---------------------------------------------------------------------------------------------


def test_a_window_gives_back_what_left_it_while_a_full_group_keeps():
    harness = Harness(windows=(None, 20), num_blocks=64, max_model_len=300, budget=32)
    request = harness.add(prompt_of(200), max_tokens=40)
    most = 0
    while harness.step():
        most = max(most, harness.pool.num_used)
    assert outputs_of(request) == [continuation(prompt_of(200), 40)]
    # 15 blocks of full attention, and never more than window, chunk and two partly used ones.
    assert most <= 15 + 5
    assert harness.pool.num_used == 0


def test_a_prefix_counts_only_where_every_group_has_it():
    harness = Harness(windows=(None, 20), num_blocks=64, max_model_len=300, budget=64)
    prompt = prompt_of(160)
    harness.add(prompt, max_tokens=1)
    harness.run()
    again = harness.add(prompt, max_tokens=2)
    harness.run()
    assert again.num_cached_tokens == 144
    assert outputs_of(again) == [continuation(prompt, 2)]
    # The windowed group loses one block that the window needs: the hit shrinks to before it.
    harness.pool.withdraw([harness.pool.lookup((1, again.sequences[0].block_hashes[7]))])
    third = harness.add(prompt, max_tokens=2)
    harness.run()
    assert third.num_cached_tokens == 112
    assert outputs_of(third) == [continuation(prompt, 2)]
