"""Beams in the batch: forks of one another, advanced together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamllm.engine.request import Sequence, SequenceUpdate
from streamllm.runner.messages import TokenLogprobs

if TYPE_CHECKING:
    from streamllm.engine.scheduler import Scheduler


def report(scheduler: Scheduler, sequence: Sequence, logprobs: TokenLogprobs) -> list[SequenceUpdate]:
    """Take in one beam's candidates. When all live beams have reported, the search takes a step: beams are
    forked, continued or dropped.

    Returns:
        One update, with the first beam, when the search is over; else none.
    """
    request = sequence.request
    beams, live = request.beams, request.sequences
    assert beams is not None
    request.beam_reports[sequence.sequence_id] = list(
        zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    )
    if len(request.beam_reports) < len(live):
        return []
    candidates = [request.beam_reports[beam.sequence_id] for beam in live]
    request.beam_reports = {}
    continuations = beams.advance(candidates)
    if not continuations:
        for beam in live:
            scheduler.finish(beam, "stop")
        return [SequenceUpdate(live[0], [], finish_reason="stop")]

    going_on: list[Sequence] = []
    forks: list[Sequence] = []
    for continuation in continuations:
        parent = live[continuation.parent]
        if parent in going_on:
            priority, arrival, _ = parent.key
            parent = parent.fork((priority, arrival, scheduler.new_sequence_id()))
            forks.append(parent)
        going_on.append(parent)
    # Dropped beams go first: their slots are free for the forks.
    for beam in live:
        if beam not in going_on:
            scheduler.finish(beam, "stop")
    for beam, continuation in zip(going_on, continuations, strict=True):
        beam.token_ids.append(continuation.token_id)
    request.sequences = going_on
    for fork in forks:
        scheduler.start_fork(fork)
    return []
