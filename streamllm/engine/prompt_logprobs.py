"""A request's prompt logprobs: which are still to compute, and what they were."""

from __future__ import annotations

import bisect
import collections.abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, overload

from streamllm.engine.request import Sequence, SequenceUpdate
from streamllm.outputs import Logprob, PromptEntry
from streamllm.runner.messages import PromptLogprobChunk, PromptRows, ScheduledBatch

if TYPE_CHECKING:
    from streamllm.engine.scheduler import Scheduler
    from streamllm.engine.step import InFlight
    from streamllm.text.tokenizer import Tokenizer


class PromptLogprobs(collections.abc.Sequence[PromptEntry]):
    """The logprobs of a prompt's tokens, given what stands before each. They become known in order of
    position, and once: what is computed again after a preemption does not count twice.

    As a sequence: ``None`` for the first token, then candidate id -> :class:`Logprob`, the prompt's own token
    first (vLLM's form). Kept as arrays, a few bytes a candidate: as 8,000 dictionaries of 20 objects each
    they would take a second to make, and the garbage collector would stop everyone to look at them. An entry
    is made when it is read, on any thread.

    Args:
        token_ids: the prompt.
        count: likeliest tokens to report at each position.
        tokenizer: gives the candidates' texts.

    Attributes:
        num_known: leading tokens whose logprobs are known. The first token has none, and counts.
    """

    def __init__(self, token_ids: list[int], count: int, tokenizer: Tokenizer) -> None:
        self.num_known = 1
        self._token_ids = token_ids
        self._count = count
        self._tokenizer = tokenizer
        self._chunks: list[PromptLogprobChunk] = []

    @property
    def complete(self) -> bool:
        return self.num_known == len(self._token_ids)

    def rows(self, row: int, start: int, end: int) -> PromptRows | None:
        """What a chunk that computes positions ``[start, end)``, as ``row`` of its batch, can add.

        The logits at a position judge the token after it.
        """
        first = max(start + 1, self.num_known)
        token_ids = self._token_ids[first : end + 1]
        return PromptRows(row, first, token_ids, self._count) if token_ids else None

    def add(self, chunk: PromptLogprobChunk) -> None:
        """Take in what a chunk gave; it begins where the known ones end.

        Raises:
            ValueError: it begins elsewhere.
        """
        if chunk.first != self.num_known:
            raise ValueError(f"prompt logprobs from {chunk.first} on, {self.num_known} are known")
        self.num_known += len(chunk.logprobs)
        self._chunks.append(chunk)

    def __len__(self) -> int:
        return self.num_known

    @overload
    def __getitem__(self, index: int) -> PromptEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptEntry]: ...
    def __getitem__(self, index: int | slice) -> PromptEntry | list[PromptEntry]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position == 0:
            return None
        chunk = self._chunks[bisect.bisect_right(self._chunks, position, key=lambda c: c.first) - 1]
        return self._entry(chunk, position - chunk.first)

    def __iter__(self) -> Iterator[PromptEntry]:
        yield None
        for chunk in self._chunks:
            for row in range(len(chunk.logprobs)):
                yield self._entry(chunk, row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, PromptLogprobs)) and list(self) == list(other)

    def _entry(self, chunk: PromptLogprobChunk, row: int) -> dict[int, Logprob]:
        text_of = self._tokenizer.token_text
        token_id = self._token_ids[chunk.first + row]
        entry = {token_id: Logprob(float(chunk.logprobs[row]), int(chunk.ranks[row]), text_of(token_id))}
        candidates = zip(chunk.top_ids[row].tolist(), chunk.top_logprobs[row].tolist(), strict=True)
        for rank, (candidate, logprob) in enumerate(candidates, start=1):
            if candidate != token_id:
                entry[candidate] = Logprob(logprob, rank, text_of(candidate))
        return entry


def schedule(batch: ScheduledBatch, in_flight: InFlight, sequence: Sequence, row: int) -> None:
    """Ask for the logprobs that a sequence's chunk, ``batch.rows[row]``, can add to its prompt's."""
    request = sequence.request
    known, chunk = request.prompt_logprobs, batch.rows[row]
    # The prompt is computed by the first sequence; those that are forked later compute output only.
    if known is None or known.complete or sequence is not request.sequences[0]:
        return
    wanted = known.rows(row, chunk.num_computed_tokens, chunk.num_computed_tokens + chunk.num_tokens)
    if wanted is not None:
        batch.prompt_rows.append(wanted)
        in_flight.prompts.append(sequence)


def land(
    scheduler: Scheduler, in_flight: InFlight, results: list[PromptLogprobChunk | str]
) -> list[SequenceUpdate]:
    """Take in what a step gave of prompts, and end the requests that wanted no more than that.

    Returns:
        Updates of the sequences that ended, in failure or in success.
    """
    updates = []
    for sequence, result in zip(in_flight.prompts, results, strict=True):
        known = sequence.request.prompt_logprobs
        assert known is not None
        if sequence.finished:
            continue
        if isinstance(result, str):
            scheduler.finish(sequence, "error")
            updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=result))
        else:
            known.add(result)
    for sequence in in_flight.rows:
        request = sequence.request
        if not request.prompt_only or sequence.finished or sequence.in_flight:
            continue
        if not sequence.num_uncomputed_tokens:
            for choice in request.sequences:
                scheduler.finish(choice, "length")
                updates.append(SequenceUpdate(choice, [], finish_reason="length"))
    return updates
