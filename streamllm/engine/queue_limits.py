"""How much may wait: ``--max-num-queued-reqs`` and ``--max-num-queued-tokens``."""

from __future__ import annotations

from collections.abc import Sequence

from streamllm.config import EngineConfig
from streamllm.engine.scheduler import Scheduler
from streamllm.errors import QueueFullError
from streamllm.pooling_params import RequestParams


def check_queue(
    config: EngineConfig,
    scheduler: Scheduler,
    arrivals: Sequence[tuple[list[int], RequestParams]],
) -> None:
    """
    Args:
        arrivals: prompt ids and parameters of the requests that want to join the queue together.

    Raises:
        QueueFullError: with them more would wait than the configuration allows.
    """
    if config.max_num_queued_reqs is not None:
        arriving = sum(params.num_sequences for _, params in arrivals)
        # Sequences that could start at once hardly wait.
        free_places = max(config.max_num_seqs - scheduler.num_running, 0)
        if scheduler.num_waiting + arriving > config.max_num_queued_reqs + free_places:
            raise QueueFullError(
                f"{scheduler.num_waiting} requests wait already; {arriving} more would exceed the limit of "
                f"{config.max_num_queued_reqs}. Try again later."
            )
    if config.max_num_queued_tokens is not None:
        arriving = sum(len(token_ids) for token_ids, _ in arrivals)
        if scheduler.num_waiting_tokens + arriving > config.max_num_queued_tokens and scheduler.has_work:
            raise QueueFullError(
                f"{scheduler.num_waiting_tokens} prompt tokens wait already; {arriving} more would exceed "
                f"the limit of {config.max_num_queued_tokens}. Try again later."
            )
