"""The engine in numbers: one snapshot that metrics, logs and tests read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.request import Sequence


@dataclass(slots=True)
class Counters:
    """Monotone counters since start.

    ``prompt_tokens`` counts a request's prompt once, with its first output; ``generation_tokens`` counts
    tokens as they are delivered; ``finished`` counts requests by finish reason.
    """

    prompt_tokens: int = 0
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
    """Count the blocks of all live sequences; linear in their number."""
    filled: dict[int, int] = {}
    logical = 0
    for sequence in sequences:
        for table in sequence.blocks.tables:
            for index in range(table.num_dropped, len(table.block_ids)):
                block_id = table.block_ids[index]
                tokens = min(sequence.num_computed_tokens - index * pool.block_size, pool.block_size)
                filled[block_id] = max(filled.get(block_id, 0), tokens)
                logical += 1
    return MemoryFigures(
        num_blocks=pool.num_blocks,
        used_blocks=pool.num_used,
        shared_blocks=sum(1 for block_id in filled if pool.reference_count(block_id) > 1),
        cached_blocks=pool.num_cached,
        logical_blocks=logical,
        allocated_slots=pool.num_used * pool.block_size,
        used_slots=sum(filled.values()),
    )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_running, num_waiting: sequences in the batch, and in the queue.
        num_waiting_tokens: prompt tokens in the queue.
        memory: how the KV blocks are used.
        num_preemptions, prompt_tokens, generation_tokens, finished: counters since start.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, counted once a request.
        max_model_len, block_size: in tokens.
        num_steps: steps run since start.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    memory: MemoryFigures
    num_preemptions: int
    prompt_tokens: int
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


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended; times in seconds of ``time.monotonic()``, ``None`` where never reached."""

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
