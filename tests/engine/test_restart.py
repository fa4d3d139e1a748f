"""Sequences that outgrow the length up to which their keys are good (LongRoPE) are computed anew."""

from __future__ import annotations

import pytest
from helpers.scheduler_harness import Harness, outputs_of

from streamllm.runner.messages import NewSequence

LIMIT = 40
PROMPT = list(range(1, 31))


def harness(**settings) -> tuple[Harness, list[NewSequence]]:
    """A harness, and what the runner is told of sequences that enter the batch."""
    h = Harness(**{"restart_length": LIMIT, **settings})
    entered: list[NewSequence] = []
    step = h.runner.step

    def recorded_step(batch):
        entered.extend(batch.new_sequences)
        return step(batch)

    h.runner.step = recorded_step
    return h, entered


def expected(prompt: list[int], **params) -> list[list[int]]:
    plain = Harness()
    request = plain.add(prompt, **params)
    plain.run()
    return outputs_of(request)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_it_starts_over_once_and_goes_on_as_before(queue_depth):
    h, entered = harness(queue_depth=queue_depth)
    request = h.add(PROMPT, max_tokens=40, ignore_eos=True)
    h.run()
    assert outputs_of(request) == expected(PROMPT, max_tokens=40, ignore_eos=True)
    assert [(new.restart_length, len(new.token_ids), new.num_computed_tokens) for new in entered] == [
        (0, len(PROMPT), 0),
        (LIMIT + 1, LIMIT + 1, 0),
    ]


@pytest.mark.parametrize("length", [LIMIT - 20, LIMIT, LIMIT + 1])
def test_one_that_stays_on_its_side_is_left_alone(length):
    h, entered = harness()
    prompt = [1 + number % 200 for number in range(length)]
    h.add(prompt, max_tokens=20 if length < LIMIT else 1, ignore_eos=True)
    h.run()
    assert [new.restart_length for new in entered] == [0]
    assert h.scheduler.num_preemptions == 0


def test_blocks_are_shared_only_within_a_side():
    h, entered = harness()
    for _ in range(2):
        h.add(PROMPT, max_tokens=20, ignore_eos=True)
        h.run()
    assert [(new.restart_length, new.num_computed_tokens) for new in entered] == [
        (0, 0),
        (LIMIT + 1, 0),
        (0, 16),
        (LIMIT + 1, 32),
    ]


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_choices_and_strangers_are_not_disturbed(queue_depth, num_blocks):
    """With few blocks sequences are preempted besides, before and after they have started over."""
    h, entered = harness(queue_depth=queue_depth, num_blocks=num_blocks)
    params = {"max_tokens": 30, "n": 3, "ignore_eos": True}
    prompts = [PROMPT, PROMPT[::-1], [7] * 50]
    requests = [h.add(prompt, **params) for prompt in prompts]
    h.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert outputs_of(request) == expected(prompt, **params)
    restarted = {new.sequence_id for new in entered if new.restart_length}
    assert restarted == {s.sequence_id for request in requests[:2] for s in request.sequences}
    assert all(new.restart_length > LIMIT for new in entered if new.restart_length)


def test_a_beam_group_starts_over_whole():
    h, entered = harness()
    params = {"beam_width": 3, "max_tokens": 20}
    request = h.add(PROMPT, **params)
    h.run()
    plain = Harness()
    same = plain.add(PROMPT, **params)
    plain.run()
    assert [x.token_ids for x in request.beams.results()] == [x.token_ids for x in same.beams.results()]
    assert sum(new.restart_length == LIMIT + 1 for new in entered) == 3
