"""The engine in numbers: one snapshot that metrics, logs and tests read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Monotone counters since start.

    ``prompt_tokens`` counts a request's prompt once, with its first token; ``generation_tokens`` counts
    tokens as they are delivered; ``finished`` counts requests by finish reason.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_running, num_waiting: sequences in the batch, and in the queue.
        num_used_blocks, num_blocks: KV blocks held by live requests, and all of them.
        num_preemptions, prompt_tokens, generation_tokens, finished: counters since start.
        max_model_len, block_size: in tokens.
        num_steps: steps run since start.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    max_model_len: int
    block_size: int
    num_steps: int

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by live requests, 0 to 1."""
        return self.num_used_blocks / self.num_blocks


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
