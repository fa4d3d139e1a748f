"""What a request returns: vLLM's names and meanings (``vllm.RequestOutput``, ``vllm.CompletionOutput``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from streamllm.errors import RequestFailedError

if TYPE_CHECKING:
    import numpy as np

    from streamllm.lora.request import LoRARequest

FINISH_REASONS = ("stop", "length", "abort", "error")


class Logprob(NamedTuple):
    """One candidate token at one position.

    Attributes:
        logprob: natural logarithm of the raw (unpenalised, temperature 1) probability.
        rank: 1 for the likeliest token; ``None`` where it was not computed.
        decoded_token: the token's text where it is whole UTF-8, else with U+FFFD in place of partial bytes.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptEntry = dict[int, Logprob] | None
"""One token of a prompt: candidate id -> logprob, the token itself first; ``None`` for the first token, which
nothing precedes."""


@dataclass(slots=True)
class RequestMetrics:
    """When a request passed each stage, in seconds of ``time.monotonic()`` (``None``: not reached).

    ``arrival_time`` is before tokenising; ``last_scheduled_time`` is the last one before the first token (a
    prompt may be preempted while it is computed).
    """

    arrival_time: float
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    last_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. In a stream, ``text``, ``token_ids`` and ``logprobs`` hold what is new since
    the last delta; offline and at the end they hold everything.

    Attributes:
        index: the choice's number, 0 to ``n - 1``.
        text: generated text, without the stop string unless it was asked for.
        token_ids: generated ids, EOS or stop token included.
        cumulative_logprob: sum of the sampled tokens' logprobs so far, if logprobs were asked for.
        logprobs: per generated token, candidate id -> :class:`Logprob`; the sampled token comes first.
        finish_reason: ``None`` while running, else ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``.
        stop_reason: the stop string or stop token id that ended it; ``None`` for EOS, the end of a grammar
            and every other reason.
        ended_by_id: whether the last token is the EOS or stop token that ended it, and so no text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    ended_by_id: bool = False

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request, or one delta of its stream.

    Attributes:
        request_id: unique in the engine.
        prompt: the prompt's text, ``None`` if it came as ids.
        prompt_token_ids: the ids that the model read.
        outputs: one entry a choice; a delta holds only choices with news.
        finished: whether every choice has finished.
        metrics: time stamps of the request.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prompt_logprobs: if asked for, one entry a token of the prompt: a list from ``LLM``, from the engine
            a sequence that makes its entries when they are read. In a stream of deltas they come with the
            first output.
        embedding: of a request for one: float32 ``[dimensions]``. Its one choice then holds no text.
        lora_request: the adapter that answered, if any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptEntry] | None = None
    embedding: np.ndarray | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's embedding (``vllm.EmbeddingOutput``)."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Values of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What a request for an embedding returns (``vllm.EmbeddingRequestOutput``).

    Attributes:
        request_id: unique in the engine.
        outputs: the embedding.
        prompt_token_ids: the ids that the model read.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: always true.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def from_output(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """The same in vLLM's shape.

        Raises:
            RequestFailedError: there is no embedding: the request was aborted.
        """
        if output.embedding is None:
            raise RequestFailedError("the request was aborted.")
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(output.embedding.tolist()),
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How alike two texts are (``vllm.ScoringOutput``): the cosine of the angle between their embeddings,
    -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """What a pair of texts returns (``vllm.ScoringRequestOutput``).

    Attributes:
        request_id: of both requests, joined by an underscore.
        outputs: the score.
        prompt_token_ids: the ids that the model read: the first text's, then the second's.
        num_cached_tokens: of them, those found in the prefix cache.
        finished: always true.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One hypothesis of a beam search (``vllm.beam_search.BeamSearchSequence``).

    Attributes:
        tokens: ids of the prompt and of what was generated, EOS included.
        cum_logprob: sum of the generated tokens' logprobs.
        score: what hypotheses are ranked by: ``cum_logprob / generated tokens ** length_penalty``.
        text: all of ``tokens`` as text, special tokens too.
        finish_reason: ``"stop"`` if EOS ended it, else ``"length"``.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt's beam search, best first (``vllm.beam_search.BeamSearchOutput``)."""

    sequences: list[BeamSearchSequence]
