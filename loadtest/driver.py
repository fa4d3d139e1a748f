"""The engine's scheduler and block manager, stepped by hand: whatever answers a step stands for the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import BlockTables
from streamllm.engine.prefix_hash import block_hashes, chain_seed
from streamllm.engine.request import Request, Sequence, SequenceUpdate
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.step import Limits
from streamllm.outputs import RequestMetrics
from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.sampling_params import SamplingParams

Answer = Callable[[ScheduledBatch], StepOutput]


class Driver:
    """A scheduler over a pool of its own, and the requests that are not finished.

    Args:
        num_blocks, block_size: the KV pool.
        limits: of the scheduler.
        answer: gives each step's tokens.
        max_model_len: longest sequence in tokens.

    Attributes:
        live: requests that are queued or run, by id.
        num_finished: requests that are done.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, limits: Limits, answer: Answer, max_model_len: int
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, limits)
        self.live: dict[str, Request] = {}
        self.num_finished = 0
        self._answer = answer
        self._max_model_len = max_model_len
        self._num_requests = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        beams: BeamSearch | None = None,
        hashes: list[bytes] | None = None,
    ) -> Request:
        """Queue a request as the engine does: ``n`` samples of exactly ``max_tokens`` tokens, or a search.

        Args:
            hashes: of the prompt's blocks, where they are at hand.
        """
        self._num_requests += 1
        seed = chain_seed()
        nowhere: Any = None  # there is no one to deliver text to
        if beams is None:
            params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
        else:
            params = SamplingParams(temperature=0, max_tokens=None)
        request = Request(
            request_id=str(self._num_requests),
            prompt=None,
            prompt_token_ids=prompt,
            params=params,
            eos_token_ids=frozenset(),
            max_total_tokens=self._max_model_len,
            metrics=RequestMetrics(arrival_time=0.0),
            stream=nowhere,
            num_logprobs=None if beams is None else beams.num_candidates,
            hash_seed=seed,
            beams=beams,
        )
        if hashes is None:
            hashes = block_hashes(prompt, self.pool.block_size, seed)
        request.sequences = [
            Sequence(
                key=(0, self._num_requests, self.scheduler.new_sequence_id()),
                request=request,
                choice_index=choice,
                seed=0,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                blocks=BlockTables(self.pool),
                text=nowhere,
                block_hashes=hashes if choice == 0 else [],
            )
            for choice in range(n)
        ]
        self.live[request.request_id] = request
        self.scheduler.add(request)
        return request

    def step(self, in_flight: Callable[[], None] | None = None) -> bool:
        """One step; ``in_flight`` is called between its two halves. False when there is nothing to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        output = self._answer(batch)
        if in_flight is not None:
            in_flight()
        self.retire(self.scheduler.update(batch, output))
        return True

    def retire(self, updates: list[SequenceUpdate]) -> None:
        """Take requests that have ended off the list."""
        for update in updates:
            request = update.sequence.request
            ended = update.finish_reason is not None and all(s.finished for s in request.sequences)
            # Siblings that end in one step would each count.
            if ended and self.live.pop(request.request_id, None) is not None:
                self.num_finished += 1
