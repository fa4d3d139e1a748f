"""A request's embedding: what it asks of the hidden states, and the vector when it is there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from streamllm.engine.request import Sequence, SequenceUpdate
from streamllm.pooling_params import Pooling, PoolingParams
from streamllm.runner.messages import PoolRow, ScheduledBatch

if TYPE_CHECKING:
    from streamllm.engine.scheduler import Scheduler
    from streamllm.engine.step import InFlight

SMALLEST_LENGTH = 1e-12
"""What a shorter embedding is divided by when it is normalised, as in ``torch.nn.functional.normalize``."""


class Embedding:
    """
    Args:
        params: how the embedding is made.
        pooling: what ``params`` or the configuration say.

    Attributes:
        values: float32 ``[dimensions]``; ``None`` until the whole prompt is computed.
    """

    def __init__(self, params: PoolingParams, pooling: Pooling) -> None:
        self.pooling: Pooling = pooling
        self.values: np.ndarray | None = None
        self._params = params

    def take(self, pooled: np.ndarray) -> None:
        """Make the embedding of the pooled hidden states, float64 ``[hidden_size]``."""
        values = pooled[: self._params.dimensions]
        if self._params.normalize:
            # Not np.linalg.norm: what it gives may depend on where the values lie in memory.
            length = math.sqrt(math.fsum((values * values).tolist()))
            values = values / max(length, SMALLEST_LENGTH)
        self.values = values.astype(np.float32)


def schedule(batch: ScheduledBatch, in_flight: InFlight, sequence: Sequence, row: int) -> None:
    """Ask for what a sequence's chunk, ``batch.rows[row]``, adds to its request's embedding."""
    embedding = sequence.request.embedding
    assert embedding is not None
    complete = not sequence.num_uncomputed_tokens
    if complete or embedding.pooling == "mean":
        batch.pool_rows.append(PoolRow(row, embedding.pooling, complete))
        in_flight.pooled.append(sequence)


def land(
    scheduler: Scheduler, in_flight: InFlight, results: list[np.ndarray | str | None]
) -> list[SequenceUpdate]:
    """Take in what a step pooled, and end the requests whose embedding is there.

    Returns:
        Updates of the sequences that ended, in failure or in success.
    """
    updates = []
    for sequence, result in zip(in_flight.pooled, results, strict=True):
        if result is None or sequence.finished:
            continue
        if isinstance(result, str):
            scheduler.finish(sequence, "error")
            updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=result))
            continue
        assert sequence.request.embedding is not None
        sequence.request.embedding.take(result)
        scheduler.finish(sequence, "stop")
        updates.append(SequenceUpdate(sequence, [], finish_reason="stop"))
    return updates
