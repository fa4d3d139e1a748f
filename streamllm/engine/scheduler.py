"""Which tokens each step computes: continuous batching with one token budget.

There are no prefill and decode phases. A sequence has tokens that are not computed yet: many for a new
prompt, one for a sequence that generates. Each step hands out ``max_num_batched_tokens``, to running
sequences first, so that decodes always advance, then to waiting ones, whose prompts are cut into chunks that
fill the budget (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).

Plain data structures: neither torch nor asyncio, so that a test can step it a million times.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.request import Sequence, SequenceStatus, SequenceUpdate
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow, StepOutput


class Scheduler:
    """First come, first served; out of blocks, the sequence that came last is preempted and recomputed.

    Args:
        pool: the KV blocks. It must hold at least one sequence of the longest length that is admitted, so
            that the oldest sequence can always run to its end.
        max_num_seqs: sequences that run at once, and slots in the runner's state.
        max_num_batched_tokens: token budget of one step; at least ``max_num_seqs``, so that every running
            sequence advances in every step.
        watermark: share of the pool that admission leaves free, so that it does not cause a preemption soon.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._watermark_blocks = max(int(watermark * pool.num_blocks), 1)
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._finished_slots: list[int] = []
        self._in_flight: dict[int, list[Sequence]] = {}
        self._num_steps = 0

    # -- what others may ask -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not finished, running ones first."""
        yield from self._running
        yield from self._waiting.values()

    # -- requests come and go ------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting[sequence.sequence_id] = sequence

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence now, at any time. Blocks that the step in flight uses are freed when it returns."""
        if sequence.finished:
            return
        if sequence.status is SequenceStatus.WAITING:
            del self._waiting[sequence.sequence_id]
        else:
            self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.in_flight:
            self._release(sequence)

    # -- a step --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """The next step's work, or ``None`` if there is none."""
        batch = ScheduledBatch(step=self._num_steps)
        scheduled: list[Sequence] = []
        budget = self._schedule_running(batch, scheduled, self.max_num_batched_tokens)
        self._admit_waiting(batch, scheduled, budget)
        if not scheduled:
            return None
        batch.finished_slots, self._finished_slots = self._finished_slots, []
        for sequence in scheduled:
            sequence.in_flight = True
        self._in_flight[batch.step] = scheduled
        self._num_steps += 1
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceUpdate]:
        """Take in what a step gave: append tokens, end sequences by id or length, free what is done with."""
        scheduled = self._land(batch)
        updates = []
        for row, token_ids, logprobs, error in zip(
            batch.output_rows, output.token_ids, output.logprobs, output.errors, strict=True
        ):
            sequence = scheduled[row.row]
            if sequence.finished:
                continue
            if error is not None:
                self.finish(sequence, "error")
                updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=error))
            else:
                updates.append(self._append(sequence, token_ids, logprobs))
        return updates

    def fail_step(self, batch: ScheduledBatch, error: str) -> list[SequenceUpdate]:
        """A step raised: every sequence in it ends with an error, and nothing of it is kept."""
        updates = []
        for sequence in self._land(batch):
            if not sequence.finished:
                self.finish(sequence, "error")
                updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=error))
        return updates

    # -- inside --------------------------------------------------------------------------------------------

    def _schedule_running(self, batch: ScheduledBatch, scheduled: list[Sequence], budget: int) -> int:
        """Give running sequences their tokens; returns the budget left for admission.

        After a preemption nothing is left: admission would hand the freed blocks straight back.
        """
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            # Decodes of sequences that come later in the list keep one token each of the budget.
            reserve = len(self._running) - index - 1
            chunk = min(sequence.num_uncomputed_tokens, max(budget - reserve, 1))
            while not sequence.block_table.grow(sequence.num_computed_tokens + chunk):
                victim = self._running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return 0
            self._add_row(batch, scheduled, sequence, chunk)
            budget -= chunk
            index += 1
        return budget if self.num_preemptions == num_preemptions else 0

    def _admit_waiting(self, batch: ScheduledBatch, scheduled: list[Sequence], budget: int) -> None:
        if not self._waiting or budget == 0:
            return
        # Blocks that running prefills have yet to take count as taken.
        promised = sum(s.block_table.blocks_missing(len(s.token_ids)) for s in self._running)
        while self._waiting and budget > 0 and self._free_slots:
            sequence = next(iter(self._waiting.values()))
            needed = sequence.block_table.blocks_missing(len(sequence.token_ids))
            watermark = self._watermark_blocks if self._running else 0
            if needed + promised + watermark > self.pool.num_free:
                return
            chunk = min(sequence.num_uncomputed_tokens, budget)
            sequence.block_table.grow(sequence.num_computed_tokens + chunk)
            promised += sequence.block_table.blocks_missing(len(sequence.token_ids))
            del self._waiting[sequence.sequence_id]
            self._start(batch, sequence)
            self._add_row(batch, scheduled, sequence, chunk)
            budget -= chunk

    def _start(self, batch: ScheduledBatch, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.num_sent_blocks = len(sequence.block_table)
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
        self._running.append(sequence)
        batch.new_sequences.append(
            NewSequence(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                token_ids=list(sequence.token_ids),
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=list(sequence.block_table.block_ids),
                params=sequence.request.params,
                seed=sequence.seed,
                choice_index=sequence.choice_index,
                num_prompt_tokens=sequence.num_prompt_tokens,
            )
        )

    def _add_row(
        self, batch: ScheduledBatch, scheduled: list[Sequence], sequence: Sequence, num_tokens: int
    ) -> None:
        assert sequence.slot is not None
        row = len(batch.rows)
        batch.rows.append(
            ScheduledRow(
                slot=sequence.slot,
                num_computed_tokens=sequence.num_computed_tokens,
                num_tokens=num_tokens,
                new_token_ids=sequence.token_ids[sequence.num_sent_tokens :],
                new_block_ids=sequence.block_table.block_ids[sequence.num_sent_blocks :],
            )
        )
        sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.num_sent_blocks = len(sequence.block_table)
        sequence.num_computed_tokens += num_tokens
        if sequence.num_uncomputed_tokens == 0:
            batch.output_rows.append(OutputRow(row, sequence.sequence_id))
        scheduled.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, to be recomputed; its tokens stay."""
        sequence.block_table.release()
        self._give_back_slot(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.sequence_id] = sequence
        self._waiting.move_to_end(sequence.sequence_id, last=False)

    def _land(self, batch: ScheduledBatch) -> list[Sequence]:
        """The sequences of a step that has returned, no longer in flight."""
        scheduled = self._in_flight.pop(batch.step)
        for sequence in scheduled:
            sequence.in_flight = False
            if sequence.finished:
                self._release(sequence)
        return scheduled

    def _append(self, sequence: Sequence, token_ids: list[int], logprobs: list | None) -> SequenceUpdate:
        update = SequenceUpdate(sequence, [], logprobs)
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            update.token_ids.append(token_id)
            update.finish_reason, update.stop_reason = _ending(sequence, token_id)
            if update.finish_reason is not None:
                self.finish(sequence, update.finish_reason, update.stop_reason)
                break
        return update

    def _release(self, sequence: Sequence) -> None:
        sequence.block_table.release()
        self._give_back_slot(sequence)

    def _give_back_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._finished_slots.append(sequence.slot)
            self._free_slots.append(sequence.slot)
            sequence.slot = None


def _ending(sequence: Sequence, token_id: int) -> tuple[str | None, str | int | None]:
    """Whether the token just appended ends the sequence: (finish reason, stop reason)."""
    request, params = sequence.request, sequence.request.params
    num_output = sequence.num_output_tokens
    if num_output >= params.min_tokens:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return "stop", token_id
    if params.max_tokens is not None and num_output >= params.max_tokens:
        return "length", None
    if len(sequence.token_ids) >= request.max_total_tokens:
        return "length", None
    return None, None
