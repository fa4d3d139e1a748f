"""A request and the sequences that it owns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamllm.outputs import RequestMetrics
from streamllm.runner.messages import TokenLogprobs
from streamllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamllm.engine.block_table import BlockTable
    from streamllm.engine.output_processor import SequenceText
    from streamllm.engine.stream import RequestStream


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, where they are computed, and how it ended.

    Attributes:
        sequence_id: unique in the engine, rising with arrival.
        token_ids: prompt and output.
        num_computed_tokens: leading tokens whose K and V are in the cache (or will be when the step in
            flight returns).
        slot: place in the runner's state while running.
        num_sent_tokens, num_sent_blocks: what the runner has been told of ``token_ids`` and the block table.
        in_flight: whether the step now running reads or writes its blocks.
    """

    sequence_id: int
    request: Request
    choice_index: int
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_table: BlockTable
    text: SequenceText
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    in_flight: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """One request: what was asked, the sequences that answer it, and its stream.

    Attributes:
        request_id: unique in the engine.
        prompt: the prompt's text, ``None`` if it came as ids.
        eos_token_ids: ids that end a sequence unless ``params.ignore_eos``.
        max_total_tokens: a sequence of this length, prompt included, ends with reason ``"length"``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_total_tokens: int
    metrics: RequestMetrics
    stream: RequestStream
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class SequenceUpdate:
    """What a step gave one sequence.

    Attributes:
        token_ids: new ids, in order.
        logprobs: one entry per new id where asked for.
        finish_reason: set if the sequence ended with these tokens, with ``stop_reason``.
        error: why the sequence failed, for ``finish_reason == "error"``.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
