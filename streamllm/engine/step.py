"""A step of the scheduler: its limits, a step in the making, and one that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamllm.engine.request import Sequence
from streamllm.runner.messages import BlockCopy


@dataclass(slots=True)
class Limits:
    """What a step and the batch may hold.

    Attributes:
        max_num_seqs: sequences that run at once, and slots in the runner's state.
        max_num_batched_tokens: token budget of one step; at least ``max_num_seqs``, so that every running
            sequence can advance in every step.
        max_num_partial_prefills: prompts that may be under way over several steps at once; prompts that fit
            into what a step has left pass them.
        long_prefill_token_threshold: longest chunk of a prompt; 0 for no limit but the budget.
        watermark: share of the pool that admission leaves free, so that it does not cause a preemption soon.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_partial_prefills: int = 4
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")


@dataclass(slots=True)
class PrefixCacheCounters:
    """Prompt tokens looked up and found in the prefix cache, counted once a request, at admission."""

    queries: int = 0
    hits: int = 0


@dataclass(slots=True)
class Step:
    """A step in the making."""

    budget: int
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    num_partial_prefills: int = 0
    preempted: bool = False


@dataclass(slots=True)
class InFlight:
    """A step that has been handed out and has not returned."""

    rows: list[Sequence]
    outputs: list[Sequence]
    registered: list[int]
