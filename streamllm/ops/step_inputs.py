"""The arrays that a step reads and writes besides weights and activations.

They are allocated once, so that a recorded plan can hold their addresses; each step fills their leading
entries and sets the counts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from streamllm.ops.kv_cache import KVCache
from streamllm.ops.lora import NO_ADAPTER

MAX_LOGPROBS = 64
"""Alternatives that a sampled token can be reported with: 20 for clients, more for beam search."""

TOKEN_NOT_FINITE, TOKEN_NOTHING_ALLOWED = -1, -2
"""What ``SamplingBuffers.token`` holds where there is no token: the logits hold NaN, +inf or nothing but
-inf; every token is forbidden."""

UNKNOWN_TOKEN = -1
"""What ``StepInputs.token_ids`` holds where a step in flight draws the token: the backend knows it."""

LARGEST_LOGIT = 1e30
"""Penalties and logits processors make no logit larger than this: no temperature makes it infinite."""

ROW_EDITS = np.dtype(
    [
        ("bias_ids", np.uint64),
        ("bias_values", np.uint64),
        ("seen_ids", np.uint64),
        ("output_counts", np.uint64),
        ("banned_ids", np.uint64),
        ("num_biases", np.int64),
        ("num_seen", np.int64),
        ("num_banned", np.int64),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ],
    align=True,
)
"""What one row adds to its logits and forbids among them (``RowEdits`` of the native sampler): addresses of
int32 ids, float32 values and int32 counts, then their lengths, then the penalties."""


class LogprobsMode(enum.IntEnum):
    """Which values are reported as logprobs: those of the model's own logits, or of the logits after bias,
    penalties, bans, temperature and filters; as logprobs, or as they are."""

    RAW_LOGPROBS = 0
    PROCESSED_LOGPROBS = 1
    RAW_LOGITS = 2
    PROCESSED_LOGITS = 3


@dataclass(slots=True)
class StepInputs:
    """What one forward reads.

    Attributes:
        token_ids: int32 ``[max_tokens]``, the chunks of all sequences one after the other. With a queue of
            several steps :data:`UNKNOWN_TOKEN` stands for the token drawn last for its row's slot.
        rope_rows: int32 ``[max_tokens]``, each token's row in the rotary tables: its position, but for
            dynamic embeddings. A model with learned positions has no such tables: there it is always the
            position.
        slot_mapping: int64 ``[num_groups, max_tokens]``, ``block * block_size + offset`` where each token's K
            and V go in the layers of a KV group.
        query_start: int32 ``[max_sequences + 1]``; sequence ``s`` owns rows ``[query_start[s],
            query_start[s + 1])``.
        context_lens: int32 ``[max_sequences]``, tokens of the sequence up to and with its last row here.
        block_tables: int64 ``[num_groups, max_sequences]``, the address of each sequence's int32 block ids;
            not set with a queue of several steps: its backend keeps the tables by slot.
        output_rows: int32 ``[max_outputs]``, rows whose hidden state is wanted.
        slots, output_slots: int32 ``[max_sequences]`` and ``[max_outputs]``, the slot of each scheduled
            sequence, and of the one that draws in each output row; set with a queue of several steps only.
        rope_cos, rope_sin: float32 ``[*, rotary_dim / 2]``, one each for every rotary embedding of the model.
        rope_version: rises when they have changed.
        kv_cache: the pool that ``slot_mapping`` and ``block_tables`` speak of.
        num_tokens, num_sequences, num_outputs: how many leading entries count in this step.
        lora_slots: int32 ``[max_tokens]``, the slot of the adapter of each token's sequence, or
            :data:`~streamllm.ops.lora.NO_ADAPTER`.
        has_adapters: whether any of this step's tokens has one.
    """

    token_ids: np.ndarray
    rope_rows: np.ndarray
    slot_mapping: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    output_rows: np.ndarray
    slots: np.ndarray
    output_slots: np.ndarray
    rope_cos: tuple[np.ndarray, ...]
    rope_sin: tuple[np.ndarray, ...]
    kv_cache: KVCache
    rope_version: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    num_outputs: int = 0
    lora_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    has_adapters: bool = False

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        max_sequences: int,
        rope_cos: tuple[np.ndarray, ...],
        rope_sin: tuple[np.ndarray, ...],
        kv_cache: KVCache,
        num_groups: int = 1,
        max_outputs: int | None = None,
    ) -> StepInputs:
        return cls(
            token_ids=np.zeros(max_tokens, np.int32),
            rope_rows=np.zeros(max_tokens, np.int32),
            slot_mapping=np.zeros((num_groups, max_tokens), np.int64),
            query_start=np.zeros(max_sequences + 1, np.int32),
            context_lens=np.zeros(max_sequences, np.int32),
            block_tables=np.zeros((num_groups, max_sequences), np.int64),
            output_rows=np.zeros(max_outputs or max_sequences, np.int32),
            slots=np.zeros(max_sequences, np.int32),
            output_slots=np.zeros(max_outputs or max_sequences, np.int32),
            rope_cos=rope_cos,
            rope_sin=rope_sin,
            kv_cache=kv_cache,
            lora_slots=np.full(max_tokens, NO_ADAPTER, np.int32),
        )


@dataclass(slots=True)
class SamplingBuffers:
    """What sampling reads for each output row, and where its results go.

    Attributes:
        temperature, top_p, min_p: float32 ``[max_outputs]``.
        top_k: int32 ``[max_outputs]``, 0 for off.
        seed: uint64 ``[max_outputs]``.
        choice, position: int32 ``[max_outputs]``; with ``seed`` they give the row's random number.
        num_logprobs: int32 ``[max_outputs]``, -1 for none.
        logprobs_mode: int32 ``[max_outputs]``, a :class:`LogprobsMode`.
        edits: int64 ``[max_outputs]``, the address of a :data:`ROW_EDITS`, or 0.
        allowed_mask, grammar_mask: int64 ``[max_outputs]``, the address of uint32
            ``[ceil(vocab_size / 32)]``, or 0: only tokens with a 1 in bit ``id % 32`` of word ``id // 32``
            can be drawn.
        replacement: int64 ``[max_outputs]``, the address of float32 ``[vocab_size]`` that takes the place of
            the row's logits, or 0. Raw logprobs are still those of the row.
        target: int32 ``[max_outputs]``, -1 to draw; else the raw logprobs of this token are reported, and of
            all other settings only ``num_logprobs`` counts.
        token: int32 ``[max_outputs]``, the sampled ids; :data:`TOKEN_NOT_FINITE` or
            :data:`TOKEN_NOTHING_ALLOWED` where there is none.
        logprob, rank: float32 and int32 ``[max_outputs]`` of the sampled token.
        top_ids, top_logprobs: int32 and float32 ``[max_outputs, MAX_LOGPROBS]``, likeliest first.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    choice: np.ndarray
    position: np.ndarray
    num_logprobs: np.ndarray
    logprobs_mode: np.ndarray
    edits: np.ndarray
    allowed_mask: np.ndarray
    grammar_mask: np.ndarray
    replacement: np.ndarray
    target: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def allocate(cls, max_outputs: int) -> SamplingBuffers:
        return cls(
            temperature=np.zeros(max_outputs, np.float32),
            top_k=np.zeros(max_outputs, np.int32),
            top_p=np.ones(max_outputs, np.float32),
            min_p=np.zeros(max_outputs, np.float32),
            seed=np.zeros(max_outputs, np.uint64),
            choice=np.zeros(max_outputs, np.int32),
            position=np.zeros(max_outputs, np.int32),
            num_logprobs=np.full(max_outputs, -1, np.int32),
            logprobs_mode=np.zeros(max_outputs, np.int32),
            edits=np.zeros(max_outputs, np.int64),
            allowed_mask=np.zeros(max_outputs, np.int64),
            grammar_mask=np.zeros(max_outputs, np.int64),
            replacement=np.zeros(max_outputs, np.int64),
            target=np.full(max_outputs, -1, np.int32),
            token=np.zeros(max_outputs, np.int32),
            logprob=np.zeros(max_outputs, np.float32),
            rank=np.zeros(max_outputs, np.int32),
            top_ids=np.zeros((max_outputs, MAX_LOGPROBS), np.int32),
            top_logprobs=np.zeros((max_outputs, MAX_LOGPROBS), np.float32),
        )
