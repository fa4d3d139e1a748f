"""Beam search over candidates that the batch's rows report, as Transformers defines it.

Scores are sums of logprobs; a hypothesis that ends is scored by its sum divided by
``length ** length_penalty``, its length counted in generated tokens, EOS included
(``transformers.GenerationMixin._beam_search``). Where vLLM normalises otherwise (by the length with the
prompt), Transformers' definition holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamllm.sampling_params import BeamSearchParams

Candidates = Sequence[tuple[int, float]]
"""The likeliest next tokens of one beam with their logprobs, likeliest first."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam.

    Attributes:
        token_ids: generated tokens, EOS included if it ended so.
        score: what hypotheses are ranked by.
        cumulative_logprob: the plain sum of its tokens' logprobs.
        stopped: whether EOS ended it (else its length did).
    """

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    stopped: bool


@dataclass(frozen=True)
class Continuation:
    """A beam of the next step: beam number ``parent`` of this one, and ``token_id``."""

    parent: int
    token_id: int


class BeamSearch:
    """The state of one request's search.

    Args:
        params: width, length penalty, early stopping.
        eos_token_ids: ids that end a beam.
        max_tokens: a beam of so many generated tokens ends.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self.width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._length = 0
        self._scores = [0.0]
        self._tokens: list[list[int]] = [[]]
        self._finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Candidates that each beam must report, so that ``width`` beams go on whatever ends."""
        return max(2, 1 + len(self._eos)) * self.width

    @property
    def length(self) -> int:
        """Tokens of the longest beam so far."""
        return self._length

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Take in the next tokens of every live beam, in the beams' order.

        Returns:
            The beams of the next step, best first; none when the search is over.
        """
        ranked = sorted(
            (
                (-(score + logprob), beam, token_id)
                for beam, (score, nexts) in enumerate(zip(self._scores, candidates, strict=True))
                for token_id, logprob in nexts
            )
        )[: self.num_candidates]
        self._length += 1
        last = self._length >= self._max_tokens
        going_on: list[tuple[float, Continuation]] = []
        for rank, (negative, beam, token_id) in enumerate(ranked):
            score = -negative
            if last or token_id in self._eos:
                # Only the best `width` may end here; the others are in reserve for beams that go on.
                if rank < self.width:
                    self._finish(self._tokens[beam] + [token_id], score, stopped=token_id in self._eos)
            elif len(going_on) < self.width:
                going_on.append((score, Continuation(beam, token_id)))
        if last or not going_on or not self._goes_on(going_on[0][0]):
            return []
        self._scores = [score for score, _ in going_on]
        self._tokens = [self._tokens[c.parent] + [c.token_id] for _, c in going_on]
        return [continuation for _, continuation in going_on]

    def results(self) -> list[Hypothesis]:
        """The finished hypotheses, best first."""
        return list(self._finished)

    def _finish(self, token_ids: list[int], cumulative_logprob: float, *, stopped: bool) -> None:
        score = cumulative_logprob / self._length**self._length_penalty
        self._finished.append(Hypothesis(token_ids, score, cumulative_logprob, stopped))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]

    def _goes_on(self, best_running: float) -> bool:
        """Whether a beam that goes on may still beat a finished one."""
        if len(self._finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0.0
        length = self._max_tokens if longest else self._length
        return best_running / length**self._length_penalty > self._finished[-1].score
