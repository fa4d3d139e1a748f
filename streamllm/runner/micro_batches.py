"""A step cut into smaller ones, which the stages of a pipeline compute one behind the other.

The parts have the step's rows in their order. A row may read K and V that an earlier one of the same step
writes (a prefix that is shared as soon as it is scheduled), never those of a later one; so it finds them when
the parts are computed in order.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from streamllm.runner.executor import Masks, RunningStep
from streamllm.runner.messages import ScheduledBatch, StepOutput


def split(batch: ScheduledBatch, num_parts: int) -> list[ScheduledBatch]:
    """The step as up to ``num_parts`` steps, with about as many tokens each; with fewer rows than that, as it
    is.

    What draws from a row, judges or pools it, and its sequence if that is new, go with the row. What has to
    be done before the step goes with the first part: copies of blocks, adapters, slots given back.
    """
    if num_parts == 1 or len(batch.rows) < num_parts:
        return [batch]
    borders = _borders([row.num_tokens for row in batch.rows], num_parts)
    parts = [
        ScheduledBatch(batch.step, rows=batch.rows[first:end]) for first, end in itertools.pairwise(borders)
    ]
    first = parts[0]
    first.finished_slots, first.block_copies = batch.finished_slots, batch.block_copies
    first.lora_loads = batch.lora_loads
    part_of_slot: dict[int, int] = {}
    for part, own in enumerate(parts):
        part_of_slot.update((row.slot, part) for row in own.rows)
    part_of_sequence: dict[int, int] = {}
    for output in batch.output_rows:
        part = part_of_sequence[output.sequence_id] = _part_of(output.row, borders)
        parts[part].output_rows.append(replace(output, row=output.row - borders[part]))
    for prompt in batch.prompt_rows:
        part = _part_of(prompt.row, borders)
        parts[part].prompt_rows.append(replace(prompt, row=prompt.row - borders[part]))
    for pooled in batch.pool_rows:
        part = _part_of(pooled.row, borders)
        parts[part].pool_rows.append(replace(pooled, row=pooled.row - borders[part]))
    for sequence in batch.new_sequences:
        # A fork has no row of its own, but an output row on another's.
        part = part_of_slot.get(sequence.slot, part_of_sequence.get(sequence.sequence_id, 0))
        parts[part].new_sequences.append(sequence)
    return parts


class StepInParts:
    """A step whose parts have been submitted one after the other (the protocol
    :class:`~streamllm.runner.executor.RunningStep`)."""

    exclusive = True

    def __init__(
        self, batch: ScheduledBatch, parts: Sequence[ScheduledBatch], steps: Sequence[RunningStep]
    ) -> None:
        self._batch, self._parts, self._steps = batch, parts, steps

    def sample(self, masks: Masks | None = None) -> None:
        own = split_masks(self._batch, self._parts, masks or {})
        for step, own_masks in zip(self._steps, own, strict=True):
            step.sample(own_masks)

    async def output(self) -> StepOutput:
        """Returns, or raises what the first part raised that did, when all are done."""
        outputs = await asyncio.gather(*(step.output() for step in self._steps), return_exceptions=True)
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        return merge(self._batch, self._parts, cast(Sequence[StepOutput], outputs))


def split_masks(
    batch: ScheduledBatch, parts: Sequence[ScheduledBatch], masks: Mapping[int, np.ndarray]
) -> list[dict[int, np.ndarray]]:
    """Each part's masks, of those that belong to the step's output rows."""
    places = _places([output.row for output in batch.output_rows], parts)
    own: list[dict[int, np.ndarray]] = [{} for _ in parts]
    for row, mask in masks.items():
        part, index = places[row]
        own[part][index] = mask
    return own


def merge(
    batch: ScheduledBatch, parts: Sequence[ScheduledBatch], outputs: Sequence[StepOutput]
) -> StepOutput:
    """The step's output from those of its parts."""
    if len(parts) == 1:
        return outputs[0]
    drawn = _places([output.row for output in batch.output_rows], parts)
    prompts = _places([prompt.row for prompt in batch.prompt_rows], parts)
    pooled = _places([row.row for row in batch.pool_rows], parts)
    return StepOutput(
        token_ids=[outputs[part].token_ids[index] for part, index in drawn],
        logprobs=[outputs[part].logprobs[index] for part, index in drawn],
        errors=[outputs[part].errors[index] for part, index in drawn],
        prompt_logprobs=[outputs[part].prompt_logprobs[index] for part, index in prompts],
        pooled=[outputs[part].pooled[index] for part, index in pooled],
    )


def without_outputs(batch: ScheduledBatch) -> ScheduledBatch:
    """The step as the stages before the last one compute it: its forward."""
    return replace(batch, output_rows=[], prompt_rows=[], pool_rows=[])


def _borders(num_tokens: Sequence[int], num_parts: int) -> list[int]:
    """Where parts of consecutive rows begin and end, each of at least one row."""
    sums = list(itertools.accumulate(num_tokens, initial=0))
    borders = [0]
    for part in range(1, num_parts):
        nearest = bisect.bisect_left(sums, sums[-1] * part / num_parts)
        borders.append(min(max(nearest, borders[-1] + 1), len(num_tokens) - (num_parts - part)))
    return [*borders, len(num_tokens)]


def _part_of(row: int, borders: Sequence[int]) -> int:
    return bisect.bisect_right(borders, row) - 1


def _places(rows: Sequence[int], parts: Sequence[ScheduledBatch]) -> list[tuple[int, int]]:
    """For entries on these rows of the step: the part of each, and its number among the part's."""
    borders = [0, *itertools.accumulate(len(part.rows) for part in parts)]
    counts = [itertools.count() for _ in parts]
    found = []
    for row in rows:
        part = _part_of(row, borders)
        found.append((part, next(counts[part])))
    return found
