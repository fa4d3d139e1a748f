"""A request and the sequences that it owns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from streamllm.engine.prefix_hash import block_hashes, next_hash, restarted_seed
from streamllm.errors import StreamLLMError
from streamllm.ops.step_inputs import LogprobsMode
from streamllm.outputs import RequestMetrics
from streamllm.runner.messages import NewSequence, TokenLogprobs
from streamllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamllm.engine.beam_search import BeamSearch
    from streamllm.engine.block_table import BlockTables
    from streamllm.engine.embedding import Embedding
    from streamllm.engine.prompt_logprobs import PromptLogprobs
    from streamllm.engine.sequence_text import SequenceText
    from streamllm.engine.stream import RequestStream
    from streamllm.engine.structured import GrammarState
    from streamllm.ops.lora import LoraAdapter
    from streamllm.runner.token_rules import TokenRules


class SequenceStatus(enum.Enum):
    """``PENDING``: a sibling that will be forked when the prompt, computed once, is done."""

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


SchedulingKey = tuple[int, int, int]
"""(priority, arrival of the request, arrival of the sequence): what sorts lower runs first."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request, or one of its beams: its tokens, where they are computed, and how it ended.

    Attributes:
        key: its place in the order of service; the last part is unique in the engine.
        token_ids: prompt and output.
        block_hashes: chained hashes of the full blocks of ``token_ids`` (empty without prefix cache).
        num_computed_tokens: leading tokens whose K and V are in the cache (or will be when the steps in
            flight have returned).
        slot: place in the runner's state while running.
        lora_slot: where its request's adapter is loaded while it runs; -1 without one.
        num_sent_tokens: how many of ``token_ids`` the runner has been told.
        num_pending_tokens: tokens that steps in flight draw and that it goes on from without knowing them
            (see :mod:`streamllm.engine.run_ahead`); they follow ``token_ids``.
        run_ahead_limit: it goes on from a token that is not known while it is shorter than this.
        in_flight: steps in flight that read or write its blocks.
        restart_length: its length when it last started over because its keys were to have other angles; 0:
            it has not.
        grammar: where its text stands in the grammar that it must follow, if there is one.
        last_token_time: when its last token was delivered, seconds of ``time.monotonic()``; 0: none was.
    """

    key: SchedulingKey
    request: Request
    choice_index: int
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    blocks: BlockTables
    text: SequenceText
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    lora_slot: int = -1
    num_sent_tokens: int = 0
    num_pending_tokens: int = 0
    run_ahead_limit: int = 0
    in_flight: int = 0
    restart_length: int = 0
    grammar: GrammarState | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    last_token_time: float = 0.0

    @property
    def sequence_id(self) -> int:
        return self.key[2]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def hash_seed(self) -> bytes | None:
        """Parent of its first block's hash; ``None`` without prefix cache."""
        seed = self.request.hash_seed
        return restarted_seed(seed) if seed is not None and self.restart_length else seed

    @property
    def num_adoptable_tokens(self) -> int:
        """Leading tokens whose K and V may come from the prefix cache: not the last one, which must be
        computed, nor one whose logits have yet to judge the next token of the prompt."""
        known = self.request.prompt_logprobs
        return len(self.token_ids) - 1 if known is None or known.complete else known.num_known - 1

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def as_new(self, num_computed_tokens: int) -> NewSequence:
        """What the runner must know of it as it enters the batch."""
        request = self.request
        return NewSequence(
            slot=self.slot,
            sequence_id=self.sequence_id,
            token_ids=list(self.token_ids),
            num_computed_tokens=num_computed_tokens,
            block_ids=self.blocks.all_blocks(),
            params=request.params,
            num_logprobs=request.num_logprobs,
            seed=self.seed,
            choice_index=self.choice_index,
            num_prompt_tokens=self.num_prompt_tokens,
            rules=request.rules,
            logprobs_mode=request.logprobs_mode,
            restart_length=self.restart_length,
            lora_slot=self.lora_slot,
        )

    def start_over(self, block_size: int) -> None:
        """Nothing is computed of it any more, and what will be has the angles of its present length."""
        self.restart_length = len(self.token_ids)
        seed = self.hash_seed
        self.block_hashes = [] if seed is None else block_hashes(self.token_ids, block_size, seed)

    def register_blocks(self, start: int, end: int, block_size: int) -> list[int]:
        """Let others find the blocks that positions ``[start, end)``, which are computed, have filled, as
        far as their tokens are known.

        Returns:
            The blocks whose content the pool did not know.
        """
        seed, hashes = self.hash_seed, self.block_hashes
        first, last = start // block_size, min(end, len(self.token_ids)) // block_size
        if seed is None or first >= last:
            return []
        while len(hashes) < last:
            begin = len(hashes) * block_size
            parent = hashes[-1] if hashes else seed
            hashes.append(next_hash(parent, self.token_ids[begin : begin + block_size]))
        return self.blocks.register(hashes, first, last)

    def fork(self, key: SchedulingKey) -> Sequence:
        """A sequence with the same tokens and computed state: it holds every block of this one once more,
        the partly filled last one too, and whichever writes there first takes a copy."""
        return Sequence(
            key=key,
            request=self.request,
            choice_index=self.choice_index,
            seed=self.seed,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            blocks=self.blocks.fork(),
            text=self.text,
            block_hashes=list(self.block_hashes),
            num_computed_tokens=self.num_computed_tokens,
            status=self.status,
            restart_length=self.restart_length,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request: what was asked, the sequences that answer it, and its stream.

    Attributes:
        request_id: unique in the engine.
        prompt: the prompt's text, ``None`` if it came as ids.
        eos_token_ids: ids that end a sequence unless ``params.ignore_eos``.
        max_total_tokens: a sequence of this length, prompt included, ends with reason ``"length"``.
        num_logprobs: likeliest tokens that the runner reports per sampled one; ``None`` for none.
        logprobs_mode: which values it reports.
        rules: what ``params`` add to the logits and forbid among them, if anything.
        adapter: the LoRA adapter that it asks for, if any.
        prompt_logprobs: those of the prompt's tokens, if asked for.
        embedding: that of the prompt, if the request is for one.
        prompt_only: the sequences end when the prompt is computed, with reason ``"length"`` (``"stop"`` if
            that gave the embedding).
        prompt_counted: whether the prompt is in the engine's counters.
        hash_seed: parent of the first block's hash; ``None`` without prefix cache.
        beams: the search, if this is a beam search: ``sequences`` are then its live beams, in its order.
        beam_reports: candidates of those beams that have computed their last token, by sequence id.
        num_cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
        admitted: whether it has been scheduled once.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_total_tokens: int
    metrics: RequestMetrics
    stream: RequestStream
    num_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    rules: TokenRules | None = None
    adapter: LoraAdapter | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: Embedding | None = None
    prompt_only: bool = False
    prompt_counted: bool = False
    hash_seed: bytes | None = None
    beams: BeamSearch | None = None
    sequences: list[Sequence] = field(default_factory=list)
    beam_reports: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    num_cached_tokens: int = 0
    admitted: bool = False


@dataclass(slots=True)
class SequenceUpdate:
    """What a step gave one sequence.

    Attributes:
        token_ids: new ids, in order.
        logprobs: one entry per new id where asked for.
        finish_reason: set if the sequence ended with these tokens, with ``stop_reason``.
        ended_by_id: whether the last of them is EOS or a stop token, and so no text.
        error: why the sequence failed, for ``finish_reason == "error"``.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    ended_by_id: bool = False
    error: str | StreamLLMError | None = None


class Ending(NamedTuple):
    """How a token ended its sequence.

    Attributes:
        by_id: it is EOS or a stop token, and no text.
    """

    finish_reason: str
    stop_reason: int | None = None
    by_id: bool = False


def ending(sequence: Sequence, token_id: int) -> Ending | None:
    """How the token just appended ends the sequence, if it does.

    With a grammar EOS ends the text whatever ``ignore_eos`` and ``min_tokens`` say: it was allowed only
    because the text is complete.
    """
    request, params, grammar = sequence.request, sequence.request.params, sequence.grammar
    length = len(sequence.token_ids)
    num_output = length - sequence.num_prompt_tokens
    if token_id in request.eos_token_ids and (
        grammar is not None or (num_output >= params.min_tokens and not params.ignore_eos)
    ):
        return Ending("stop", by_id=True)
    if params.stop_token_ids and num_output >= params.min_tokens and token_id in params.stop_token_ids:
        return Ending("stop", token_id, by_id=True)
    if grammar is not None and grammar.accept(token_id):
        return Ending("stop")
    if params.max_tokens is not None and num_output >= params.max_tokens:
        return Ending("length")
    if length >= request.max_total_tokens:
        return Ending("length")
    return None
