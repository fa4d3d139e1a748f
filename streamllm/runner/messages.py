"""The messages between scheduler and model runner, one pair a step.

They are incremental: a sequence travels in full once, when it enters (or re-enters) the batch; after that
each step carries its slot, its new tokens and its new blocks. That keeps a step cheap at hundreds of
sequences, and it is the message that workers of a tensor-parallel group will receive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from streamllm.errors import InvalidRequestError
from streamllm.ops.lora import NO_ADAPTER, LoraAdapter
from streamllm.ops.step_inputs import LogprobsMode
from streamllm.pooling_params import Pooling
from streamllm.runner.token_rules import TokenRules
from streamllm.sampling_params import SamplingParams

BlockUpdate = tuple[int, int, list[int]]
"""(KV group, first logical index, physical blocks from there on). A block that left its group's window is -1
and never read."""

BlockCopy = tuple[int, int]
"""(source, destination): a block to copy, in every layer, before the forward writes anything."""


class RowPurpose(Enum):
    """Why a row's hidden state is wanted after the forward."""

    SAMPLE = "sample"


@dataclass(slots=True)
class NewSequence:
    """A sequence that enters the batch, with everything that the runner keeps of it.

    Attributes:
        slot: its place in the runner's state, free until now.
        sequence_id: unique in the engine; names it in output rows.
        token_ids: all tokens known so far (prompt, and output after a preemption).
        num_computed_tokens: leading tokens whose K and V are already in the cache.
        block_ids: physical blocks in logical order, one list a KV group.
        params: sampling parameters of its request.
        num_logprobs: likeliest tokens to report per sampled one, ``None`` for no logprobs.
        seed: 64-bit seed of its random numbers.
        choice_index: which choice of its request it is; part of the random counter.
        num_prompt_tokens: where output begins; random counters start there.
        rules: what its request adds to the logits and forbids among them, if anything.
        logprobs_mode: which values are reported as logprobs.
        restart_length: its length when it started over because its keys were to have other angles: those of
            a sequence at least so long; 0: it has not.
        lora_slot: where its adapter was loaded, for as long as it stays in the batch.
    """

    slot: int
    sequence_id: int
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[list[int]]
    params: SamplingParams
    num_logprobs: int | None
    seed: int
    choice_index: int
    num_prompt_tokens: int
    rules: TokenRules | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    restart_length: int = 0
    lora_slot: int = NO_ADAPTER


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's share of a step.

    Attributes:
        slot: its place in the runner's state.
        num_computed_tokens: where the chunk begins.
        num_tokens: length of the chunk: K and V of positions ``[num_computed_tokens, +num_tokens)`` are
            computed in this step.
        new_token_ids: tokens appended since the runner last heard of the sequence. With several steps in
            flight a chunk of one token may lie beyond the known ones: it is the one drawn last for its slot,
            and comes with a later step.
        block_updates: blocks appended or replaced since then.
    """

    slot: int
    num_computed_tokens: int
    num_tokens: int
    new_token_ids: list[int]
    block_updates: list[BlockUpdate]


@dataclass(slots=True)
class OutputRow:
    """A row of the step whose logits are wanted: the last token of ``rows[row]``'s chunk.

    Several output rows may name one row: the forks of a sequence each draw their own next token from it.
    """

    row: int
    sequence_id: int
    purpose: RowPurpose = RowPurpose.SAMPLE


@dataclass(slots=True)
class PromptRows:
    """Prompt tokens whose logprobs are wanted; the token at a position is judged by the logits one before it,
    which must be in ``rows[row]``'s chunk.

    Attributes:
        first: position of the first of them, at least 1.
        token_ids: these tokens, in order.
        num_logprobs: likeliest tokens to report for each.
    """

    row: int
    first: int
    token_ids: list[int]
    num_logprobs: int


@dataclass(slots=True)
class PoolRow:
    """A chunk whose hidden states are pooled into its sequence's embedding.

    Attributes:
        row: the chunk, ``rows[row]``. For a mean every chunk of the prompt is named, from its first token on.
        complete: it ends with the prompt's last token, so that the result is wanted.
    """

    row: int
    pooling: Pooling
    complete: bool


@dataclass(slots=True)
class LoraLoad:
    """An adapter that takes the place of whatever its slot held; ``None`` empties it.

    Attributes:
        slot: below ``max_loras``; no sequence in the batch, or in a step in flight, has it.
    """

    slot: int
    adapter: LoraAdapter | None


@dataclass(slots=True)
class ScheduledBatch:
    """One step's work.

    Attributes:
        step: number of the step, counting from 0.
        new_sequences: sequences that enter. Each has a row, or (a fork) an output row on another's.
        rows: one entry a scheduled sequence, in the order of their tokens in the flat batch.
        output_rows: rows that produce an output. A chunk that ends before the sequence's last known token
            has none.
        prompt_rows: prompt tokens that are judged, one entry a sequence.
        pool_rows: chunks that are pooled, one entry a sequence.
        finished_slots: slots given back since the last step.
        block_copies: blocks to copy before the forward.
        lora_loads: adapters to load before the forward.
    """

    step: int
    new_sequences: list[NewSequence] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)
    output_rows: list[OutputRow] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    pool_rows: list[PoolRow] = field(default_factory=list)
    finished_slots: list[int] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    lora_loads: list[LoraLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])


@dataclass(slots=True)
class TokenLogprobs:
    """Raw logprobs of one sampled token: its own, and the likeliest ones in falling order.

    Attributes:
        logprob: of the sampled token.
        rank: of the sampled token, 1 for the likeliest.
        top_ids, top_logprobs: the k likeliest tokens, ties by lower id.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class PromptLogprobChunk:
    """Raw logprobs of consecutive tokens of a prompt.

    Attributes:
        first: position of the first of them.
        logprobs: float32 ``[count]``, of the tokens themselves.
        ranks: int32 ``[count]``, 1 for the likeliest.
        top_ids, top_logprobs: int32 and float32 ``[count, k]``, the k likeliest in falling order.
    """

    first: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(slots=True)
class StepOutput:
    """What a step gave, aligned with ``ScheduledBatch.output_rows``, ``prompt_rows`` and ``pool_rows``.

    Attributes:
        token_ids: per output row the ids it produced: one for a decode (more under speculation).
        logprobs: per output row ``None``, or one entry a token in ``token_ids``.
        errors: per output row ``None``, or why it produced no token: its logits were not finite, a logits
            processor failed; an ``InvalidRequestError`` where its request's own rules forbid every token.
        prompt_logprobs: per entry of ``prompt_rows`` their logprobs, or why there are none.
        pooled: per entry of ``pool_rows`` the pooled hidden states, float64 ``[hidden_size]``, or why there
            are none; ``None`` where the prompt goes on.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    errors: list[str | InvalidRequestError | None]
    prompt_logprobs: list[PromptLogprobChunk | str] = field(default_factory=list)
    pooled: list[np.ndarray | str | None] = field(default_factory=list)
