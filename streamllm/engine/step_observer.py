"""Notes what each step computes, and what the queue waits for meanwhile."""

from __future__ import annotations

import time

from streamllm.engine.events import EventLog
from streamllm.engine.request import Sequence
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.step_history import StepRecord
from streamllm.engine.wait_clock import WaitClock, WaitReason
from streamllm.runner.messages import ScheduledBatch


class StepObserver:
    """Looks at each batch as a whole: what a row costs is little, and nothing where all rows generate.

    Args:
        events: where chunks of prompts are noted.
        waits: which turns with what the queue waits for.
    """

    def __init__(self, scheduler: Scheduler, events: EventLog, waits: WaitClock) -> None:
        self._scheduler = scheduler
        self._events = events
        self._waits = waits
        self._num_preemptions = 0
        # Sequences of the last step whose prompt goes on.
        self._partial: set[Sequence] = set()

    def scheduled(self, batch: ScheduledBatch | None, began: float) -> StepRecord | None:
        """The record of a step that has been scheduled, if one has.

        Args:
            began: when scheduling began, seconds of ``time.monotonic()``.
        """
        scheduler = self._scheduler
        now = time.monotonic()
        num_tokens = 0 if batch is None else batch.num_tokens
        self._waits.turn(self._wait_reason(num_tokens), now)
        if batch is None:
            return None
        num_prompt_tokens = 0
        if self._partial or batch.new_sequences or num_tokens > len(batch.rows):
            num_prompt_tokens = self._note_prompts(batch)
        return StepRecord(
            number=batch.step,
            num_sequences=len(batch.rows),
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_used_blocks=scheduler.pool.num_used,
            began=began,
            scheduled=now,
        )

    def _wait_reason(self, num_tokens: int) -> WaitReason | None:
        scheduler = self._scheduler
        reason = scheduler.wait_reason if scheduler.num_waiting else None
        preempted = scheduler.num_preemptions > self._num_preemptions
        self._num_preemptions = scheduler.num_preemptions
        if reason == "prompts_in_progress":
            if preempted:
                return "kv_blocks"
            if num_tokens >= scheduler.limits.max_num_batched_tokens:
                return "token_budget"
        return reason

    def _note_prompts(self, batch: ScheduledBatch) -> int:
        """Note the chunks of prompts in a batch; returns their tokens."""
        new = {sequence.sequence_id for sequence in batch.new_sequences}
        partial: set[Sequence] = set()
        total = 0
        for row, sequence in zip(batch.rows, self._scheduler.in_flight(batch).rows, strict=True):
            if row.num_tokens == 1 and sequence not in self._partial and sequence.sequence_id not in new:
                continue
            if sequence.request.beams is not None and row.num_computed_tokens >= sequence.num_prompt_tokens:
                continue  # a fork of a beam, new as it is, goes on from what is computed
            total += row.num_tokens
            self._events.record("prefill", sequence.request.request_id, row.num_tokens)
            if sequence.num_computed_tokens < len(sequence.token_ids):
                partial.add(sequence)
        self._partial = partial
        return total
