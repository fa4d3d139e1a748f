"""From a planned step to the message that the runner gets, and the steps that have not returned yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from streamllm.engine import embedding, prompt_logprobs
from streamllm.engine.lora_slots import LoraSlots
from streamllm.engine.request import Sequence
from streamllm.engine.step import InFlight, Step
from streamllm.runner.messages import BlockUpdate, NewSequence, OutputRow, ScheduledBatch, ScheduledRow

NO_UPDATES: list[BlockUpdate] = []


class BatchMaker:
    """Knows what the runner has been told: a sequence travels in full once, then as what is new.

    Args:
        fork: called with a sequence whose prompt will be computed when the step returns; gives the siblings
            that draw their first token from the same row.
        lora_slots: gives sequences the slots of their adapters.

    Attributes:
        in_flight: steps that have been handed out and have not returned, by number, the oldest first. Who
            takes one out counts down ``in_flight`` of its ``rows`` and ``forks``.
    """

    def __init__(self, fork: Callable[[Sequence], Iterable[Sequence]], lora_slots: LoraSlots) -> None:
        self.in_flight: dict[int, InFlight] = {}
        self._fork = fork
        self._lora_slots = lora_slots
        self._num_steps = 0
        self._finished_slots: list[int] = []
        self._unknown_to_runner: set[int] = set()

    def enter(self, sequence: Sequence) -> None:
        """A sequence has got a slot."""
        self._lora_slots.enter(sequence)
        self._unknown_to_runner.add(sequence.sequence_id)

    def leave(self, sequence: Sequence) -> None:
        """A sequence gives its slot back, if it has one."""
        self._lora_slots.leave(sequence)
        self._unknown_to_runner.discard(sequence.sequence_id)
        if sequence.slot >= 0:
            self._finished_slots.append(sequence.slot)

    def make(self, step: Step) -> ScheduledBatch:
        """The message for a step, which is in flight from now on."""
        batch = ScheduledBatch(step=self._num_steps, block_copies=step.copies)
        in_flight = InFlight(step.registered)
        rows, output_rows, unknown = batch.rows, batch.output_rows, self._unknown_to_runner
        for sequence, chunk in step.chunks:
            end = sequence.num_computed_tokens
            if unknown and sequence.sequence_id in unknown:
                batch.new_sequences.append(self._new_sequence(sequence, end - chunk))
                new_token_ids, updates = [], NO_UPDATES
            else:
                new_token_ids = sequence.token_ids[sequence.num_sent_tokens :]
                updates = sequence.blocks.take_updates() if sequence.blocks.has_news else NO_UPDATES
                sequence.num_sent_tokens = len(sequence.token_ids)
            row = len(rows)
            rows.append(ScheduledRow(sequence.slot, end - chunk, chunk, new_token_ids, updates))
            sequence.in_flight += 1
            in_flight.rows.append(sequence)
            if sequence.request.prompt_logprobs is not None:
                prompt_logprobs.schedule(batch, in_flight, sequence, row)
            elif sequence.request.embedding is not None:
                embedding.schedule(batch, in_flight, sequence, row)
            if end >= len(sequence.token_ids) and not sequence.request.prompt_only:
                output_rows.append(OutputRow(row, sequence.sequence_id))
                in_flight.outputs.append(sequence)
                if end < sequence.run_ahead_limit:
                    sequence.num_pending_tokens += 1
                if end == sequence.num_prompt_tokens:
                    for sibling in self._fork(sequence):
                        self._add_fork(batch, in_flight, sibling, row)
        batch.finished_slots, self._finished_slots = self._finished_slots, []
        batch.lora_loads = self._lora_slots.take_loads()
        in_flight.lora_slots = [load.slot for load in batch.lora_loads]
        self.in_flight[batch.step] = in_flight
        self._num_steps += 1
        return batch

    def _add_fork(self, batch: ScheduledBatch, in_flight: InFlight, sibling: Sequence, row: int) -> None:
        sibling.in_flight = 1
        batch.new_sequences.append(self._new_sequence(sibling, sibling.num_computed_tokens))
        batch.output_rows.append(OutputRow(row, sibling.sequence_id))
        in_flight.outputs.append(sibling)
        in_flight.forks.append(sibling)

    def _new_sequence(self, sequence: Sequence, num_computed_tokens: int) -> NewSequence:
        self._unknown_to_runner.discard(sequence.sequence_id)
        sequence.num_sent_tokens = len(sequence.token_ids)
        return sequence.as_new(num_computed_tokens)
