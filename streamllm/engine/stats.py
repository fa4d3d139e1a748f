"""The engine in numbers: one snapshot that metrics, logs and tests read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.request import Request, Sequence
from streamllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamllm.engine.scheduler import Scheduler

RequestKind = Literal["generate", "beam_search", "embed"]


@dataclass(slots=True)
class Counters:
    """Monotone counters since start.

    ``prompt_tokens`` counts a request's prompt once, with its first output, and ``cached_prompt_tokens`` what
    of it was found in the prefix cache; ``generation_tokens`` counts
    tokens as they are delivered; ``finished`` counts requests by finish reason.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """How the KV blocks are used now. A slot is room for one token in one KV group.

    Attributes:
        num_blocks: all blocks.
        used_blocks: held by live sequences.
        shared_blocks: held by more than one.
        cached_blocks: with a content that the prefix cache knows, held or free.
        logical_blocks: entries of all block tables.
        allocated_slots: slots of used blocks.
        used_slots: of them, those that hold a token (counted once, whoever shares them).
    """

    num_blocks: int
    used_blocks: int
    shared_blocks: int
    cached_blocks: int
    logical_blocks: int
    allocated_slots: int
    used_slots: int

    @property
    def waste(self) -> float:
        """Share of allocated slots that hold nothing: 1 - used / allocated."""
        return 1 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0

    @property
    def sharing(self) -> float:
        """Share of blocks saved by sharing: 1 - physical / logical."""
        return 1 - self.used_blocks / self.logical_blocks if self.logical_blocks else 0.0


def memory_figures(pool: BlockPool, sequences: Iterable[Sequence]) -> MemoryFigures:
    """Count the blocks of all live sequences; only those that are not full are looked at one by one, which
    are the last ones of each table."""
    size, counts = pool.block_size, pool.reference_counts
    held: set[int] = set()
    partly_filled: dict[int, int] = {}
    logical = 0
    for sequence in sequences:
        num_full, num_more = divmod(sequence.num_computed_tokens, size)
        for table in sequence.blocks.tables:
            block_ids, num_dropped = table.block_ids, table.num_dropped
            held.update(block_ids[num_dropped:] if num_dropped else block_ids)
            logical += len(block_ids) - num_dropped
            for index in range(max(num_full, num_dropped), len(block_ids)):
                tokens = num_more if index == num_full else 0
                # Who shares a partly filled block has computed the same tokens.
                partly_filled[block_ids[index]] = tokens
    return MemoryFigures(
        num_blocks=pool.num_blocks,
        used_blocks=pool.num_used,
        shared_blocks=sum(counts[block_id] > 1 for block_id in held),
        cached_blocks=pool.num_cached,
        logical_blocks=logical,
        allocated_slots=pool.num_used * size,
        used_slots=(len(held) - len(partly_filled)) * size + sum(partly_filled.values()),
    )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_running, num_waiting: sequences in the batch, and in the queue.
        num_deferred: of those waiting, the ones that would not start with more memory: they wait for a slot
            for their adapter, or for their prompt, which another choice computes.
        num_waiting_tokens: prompt tokens in the queue.
        memory: how the KV blocks are used.
        num_preemptions, prompt_tokens, cached_prompt_tokens, generation_tokens, finished: counters since
            start, as in :class:`Counters`.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, counted once a request.
        max_model_len, block_size: in tokens.
        num_steps: steps run since start.
    """

    num_running: int
    num_waiting: int
    num_deferred: int
    num_waiting_tokens: int
    memory: MemoryFigures
    num_preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    prefix_cache_queries: int
    prefix_cache_hits: int
    max_model_len: int
    block_size: int
    num_steps: int

    @property
    def num_used_blocks(self) -> int:
        return self.memory.used_blocks

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by live requests, 0 to 1."""
        return self.memory.used_blocks / self.memory.num_blocks


def take_stats(
    scheduler: Scheduler, counters: Counters, *, max_model_len: int, num_steps: int
) -> EngineStats:
    """The engine's figures as they are now."""
    sequences = list(scheduler.sequences())
    num_pending = scheduler.num_running + scheduler.num_waiting - len(sequences)
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_deferred=scheduler.lora_slots.num_parked + num_pending,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        memory=memory_figures(scheduler.pool, sequences),
        num_preemptions=scheduler.num_preemptions,
        prefix_cache_queries=scheduler.prefix_cache.queries,
        prefix_cache_hits=scheduler.prefix_cache.hits,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generation_tokens=counters.generation_tokens,
        finished=dict(counters.finished),
        max_model_len=max_model_len,
        block_size=scheduler.pool.block_size,
        num_steps=num_steps,
    )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended; times in seconds of ``time.monotonic()``, ``None`` where never reached.

    Attributes:
        arrival_time: before its prompt was tokenised.
        first_scheduled_time: when it left the queue for the first time.
        finished_time: of a request that goes on: now.
        num_generation_tokens: delivered, by all its choices.
        finish_reason: of its last choice; empty for a request that goes on.
        queued_time: when it came into the queue.
        last_scheduled_time: the last time it left the queue before its first token.
        num_cached_tokens: of the prompt, found in the prefix cache.
        num_choices: choices that it generates, those that ``best_of`` drops too.
        longest_choice: tokens of the longest of them.
        kind: what was asked for.
        params: how its tokens are sampled; ``None`` unless it generates by sampling.
        adapter: name of the LoRA adapter that answered it.
    """

    request_id: str
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    finish_reason: str
    queued_time: float | None = None
    last_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    num_choices: int = 1
    longest_choice: int = 0
    kind: RequestKind = "generate"
    params: SamplingParams | None = None
    adapter: str | None = None

    @property
    def queue_seconds(self) -> float | None:
        """From the queue to the last time it left that before its first token."""
        return _between(self.queued_time, self.last_scheduled_time)

    @property
    def prefill_seconds(self) -> float | None:
        """From there to the first token."""
        return _between(self.last_scheduled_time, self.first_token_time)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def inference_seconds(self) -> float | None:
        """Prefill and decode."""
        return _between(self.last_scheduled_time, self.last_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def seconds_per_token(self) -> float | None:
        """Of each token after the first one; ``None`` if there is none."""
        decode, num_gaps = self.decode_seconds, self.longest_choice - 1
        return decode / num_gaps if decode is not None and num_gaps > 0 else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def request_record(request: Request, finish_reason: str, now: float) -> RequestRecord:
    """A request as it is at ``now`` (``time.monotonic()``)."""
    metrics, stream = request.metrics, request.stream
    kind: RequestKind = "generate"
    if request.beams is not None:
        kind = "beam_search"
        longest = request.beams.length
    else:
        longest = max((s.text.num_tokens for s in request.sequences), default=0)
        kind = "embed" if request.embedding is not None else "generate"
    return RequestRecord(
        request_id=request.request_id,
        arrival_time=metrics.arrival_time,
        first_scheduled_time=metrics.first_scheduled_time,
        first_token_time=metrics.first_token_time,
        last_token_time=metrics.last_token_time,
        finished_time=now,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generation_tokens=stream.num_pushed_tokens,
        num_preemptions=metrics.num_preemptions,
        finish_reason=finish_reason,
        queued_time=metrics.queued_time,
        last_scheduled_time=metrics.last_scheduled_time,
        num_cached_tokens=request.num_cached_tokens,
        num_choices=stream.num_choices,
        longest_choice=longest,
        kind=kind,
        params=request.params if kind == "generate" else None,
        adapter=None if stream.lora_request is None else stream.lora_request.lora_name,
    )
