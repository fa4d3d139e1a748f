"""From the hidden states of a prompt, which come chunk after chunk, to one vector."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streamllm.runner.messages import ScheduledBatch

HIDDEN_NOT_FINITE = "the model produced hidden states that are not finite"

MANY_VALUES = 2_000_000
"""Hidden values from which a step's pooling leaves the event loop (some milliseconds of work)."""


class Pooler:
    """Pools the hidden states of sequences.

    A mean is summed row by row, in order of position, in float64, and the sum goes on where the chunk before
    ended: so it is the same, bit for bit, however the prompt was cut. A sequence that is preempted begins
    again at its first token, and so does its sum.
    """

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}

    def forget(self, slots: Iterable[int]) -> None:
        """The sequences in these slots are gone."""
        for slot in slots:
            self._sums.pop(slot, None)

    def pool(
        self, batch: ScheduledBatch, query_start: np.ndarray, hidden: np.ndarray
    ) -> list[np.ndarray | str | None]:
        """
        Args:
            batch: the step, whose ``pool_rows`` are meant.
            query_start: int32, where each row of the batch begins in ``hidden``, and where the last ends.
            hidden: float32 ``[tokens, hidden_size]``, the step's hidden states.

        Returns:
            For each of the ``pool_rows`` a float64 ``[hidden_size]``, or why there is none; ``None`` where
            the prompt goes on.

        Raises:
            ValueError: a mean goes on that has not begun.
        """
        results: list[np.ndarray | str | None] = []
        for entry in batch.pool_rows:
            row = batch.rows[entry.row]
            states = hidden[query_start[entry.row] : query_start[entry.row + 1]]
            if entry.pooling == "mean":
                pooled = self._add(row.slot, row.num_computed_tokens, states)
                if entry.complete:
                    pooled = self._sums.pop(row.slot) / (row.num_computed_tokens + row.num_tokens)
            else:
                pooled = states[-1].astype(np.float64)
            if not entry.complete:
                results.append(None)
            else:
                results.append(pooled if np.isfinite(pooled).all() else HIDDEN_NOT_FINITE)
        return results

    def _add(self, slot: int, first: int, states: np.ndarray) -> np.ndarray:
        """Adds the hidden states from position ``first`` on to a slot's sum."""
        if first == 0:
            self._sums[slot] = np.zeros(states.shape[1], np.float64)
        elif slot not in self._sums:
            raise ValueError(f"the mean of slot {slot} goes on at position {first} and has not begun")
        total = self._sums[slot]
        # Not states.sum(0): its order of additions is numpy's own affair.
        for state in states:
            total += state
        return total
