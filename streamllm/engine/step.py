"""A step of the scheduler: its limits, a step in the making, and one that is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.request import Request, Sequence, SequenceStatus
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
        restart_length: a sequence that grows longer starts over, because its keys then have other angles
            (:func:`streamllm.models.rope.restart_length`); 0: none does.
        queue_depth: steps that may be in flight at once; with more than one, sequences run ahead of what is
            known of them (see :mod:`streamllm.engine.run_ahead`).
        max_loras: different adapters among the running sequences; 0: no request has one.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_partial_prefills: int = 4
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    restart_length: int = 0
    queue_depth: int = 1
    max_loras: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")

    def starts_over(self, sequence: Sequence, length: int) -> bool:
        """Whether what is computed of a sequence is no use once it is so long."""
        limit = self.restart_length
        return 0 < limit < length and sequence.num_prompt_tokens <= limit and not sequence.restart_length

    def prefill_share(self, budget: int, num_prefills: int) -> int:
        """Longest chunk that each of so many prompts in progress, expected newcomers among them, gets at
        first."""
        share = max(budget // max(num_prefills, 1), 1)
        threshold = self.long_prefill_token_threshold
        return min(share, threshold) if threshold else share

    def first_chunk(self, uncomputed: int, budget: int, num_partial_prefills: int) -> int:
        """How much of a newcomer's tokens a step computes; 0 if it must wait."""
        chunk = min(uncomputed, budget, self.long_prefill_token_threshold or uncomputed)
        partial = chunk < uncomputed
        return 0 if partial and num_partial_prefills >= self.max_num_partial_prefills else chunk


@dataclass(slots=True)
class PrefixCacheCounters:
    """Prompt tokens looked up and found in the prefix cache, counted once a request, at admission."""

    queries: int = 0
    hits: int = 0

    def count(self, request: Request) -> None:
        """A request is admitted: its ``num_cached_tokens`` were found, if it looked for any."""
        if request.hash_seed is not None and request.prompt_logprobs is None:
            self.queries += len(request.prompt_token_ids)
            self.hits += request.num_cached_tokens


@dataclass(slots=True)
class Step:
    """A step in the making.

    Attributes:
        short_of_blocks: a sequence found none, and was preempted for it or (while steps are in flight) has no
            part in this step.
    """

    budget: int
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    num_partial_prefills: int = 0
    short_of_blocks: bool = False

    def computes_prefix_of(self, sequence: Sequence, block_size: int) -> bool:
        """Whether a prompt in progress computes next what ``sequence`` could share: waiting for it is sooner
        done than computing it twice. Hashes are chained, so equal ones mean equal beginnings."""
        if not self.num_partial_prefills:
            return False
        hashes = sequence.block_hashes
        num_shareable = min(len(hashes), sequence.num_adoptable_tokens // block_size)
        # Prompts in progress came last: who waits for one finds it without a look at every decode.
        for other, _ in reversed(self.chunks):
            place = other.num_computed_tokens // block_size
            if (
                place < min(num_shareable, len(other.block_hashes))
                and hashes[place] == other.block_hashes[place]
            ):
                return True
        return False

    def promised_blocks(self, blocks_to_come: Callable[[Sequence, int], int]) -> int:
        """Blocks that prompts in progress have yet to take: they count as taken."""
        if not self.num_partial_prefills:
            return 0
        return sum(
            blocks_to_come(s, s.num_computed_tokens)
            for s, _ in self.chunks
            if s.num_computed_tokens < len(s.token_ids)
        )

    def take_back(self, sequence: Sequence, pool: BlockPool) -> None:
        """Undo a sequence's chunk, if it has one (a beam whose group is preempted as a whole)."""
        for index, (scheduled, chunk) in enumerate(self.chunks):
            if scheduled is sequence:
                sequence.num_computed_tokens -= chunk
                self.budget += chunk
                del self.chunks[index]
                # Nothing will be copied into its blocks, nor written to them.
                held = {b for table in sequence.blocks.tables for b in table.held}
                self.copies = [copy for copy in self.copies if copy[1] not in held]
                pool.withdraw(b for b in self.registered if b in held)
                self.registered = [b for b in self.registered if b not in held]
                return


@dataclass(slots=True)
class InFlight:
    """A step that has been handed out and has not returned.

    Attributes:
        registered: blocks that can be shared once it has.
        rows, outputs, prompts, pooled: the sequences of the batch's ``rows``, ``output_rows``,
            ``prompt_rows`` and ``pool_rows``.
        forks: those of ``outputs`` that draw from another sequence's row.
        lora_slots: slots into which it loads adapters.
    """

    registered: list[int]
    rows: list[Sequence] = field(default_factory=list)
    outputs: list[Sequence] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    lora_slots: list[int] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    pooled: list[Sequence] = field(default_factory=list)

    def land(self) -> list[Sequence]:
        """It has returned; gives its sequences that have ended and are in no other step."""
        ended = []
        finished = SequenceStatus.FINISHED
        for sequence in self.rows + self.forks:
            sequence.in_flight -= 1
            if sequence.status is finished and not sequence.in_flight:
                ended.append(sequence)
        return ended
