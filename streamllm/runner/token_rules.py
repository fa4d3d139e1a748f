"""What a request adds to its logits and forbids among them, and how that stands after each token.

The sampler reads arrays by address (:data:`ROW_EDITS`). They change with a sequence's tokens by as little as
possible: a token more is a count or an entry more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

LogitsProcessor = Callable[[Sequence[int], Sequence[int], np.ndarray], np.ndarray]
"""(prompt ids, output ids, float32 logits ``[vocab_size]``, its own to change) -> logits of that shape."""

_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


@dataclass(slots=True, frozen=True, eq=False)
class TokenRules:
    """A request's rules; its sequences share them, and nothing changes them.

    Attributes:
        bias_ids, bias_values: int32 and float32 ``[biases]``.
        repetition_penalty, frequency_penalty, presence_penalty: as in the sampling parameters.
        banned_ids: int32, never drawn.
        held_back_ids: int32, not drawn while the output is shorter than ``min_tokens``.
        bad_words: sequences of two and more ids by their last id but one: (all but the last, the last). The
            last is not drawn where those before it are the end of prompt and output.
        allowed_mask: uint32 ``[ceil(vocab_size / 32)]``, bit ``id % 32`` of word ``id // 32`` for what may be
            drawn, or ``None`` for everything.
        processors: called one after the other on each row's logits.
        early_bans: ``banned_ids`` and ``held_back_ids``.
    """

    bias_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    bias_values: np.ndarray = field(default_factory=lambda: _NO_VALUES)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    banned_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    held_back_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    min_tokens: int = 0
    bad_words: Mapping[int, Sequence[tuple[array[int], int]]] = field(default_factory=dict)
    allowed_mask: np.ndarray | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    early_bans: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "early_bans", np.concatenate([self.banned_ids, self.held_back_ids]))

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def depend_on_output(self) -> bool:
        """Whether they ask which tokens have been generated, and not only how many."""
        return self.has_penalties or bool(self.bad_words or self.processors)

    @property
    def edits_logits(self) -> bool:
        """Whether there is more than a mask and processors."""
        return self.has_penalties or bool(len(self.bias_ids) or len(self.early_bans) or self.bad_words)

    def describe_bans(self) -> list[str]:
        """The parameters that forbid tokens."""
        names = {
            "allowed_token_ids": self.allowed_mask is not None,
            "bad_words": len(self.banned_ids) > 0 or bool(self.bad_words),
            "min_tokens": len(self.held_back_ids) > 0,
            "logits_processors": bool(self.processors),
        }
        return [name for name, given in names.items() if given]


class SequenceRules:
    """A request's rules as they stand after one sequence's last token.

    Args:
        rules: the request's.
        token_ids: prompt and output so far. The same array is passed to :meth:`refresh` as it grows.
        num_prompt_tokens: where the output begins.
        record: one element of a :data:`ROW_EDITS` array, which is kept up to date.

    Attributes:
        prompt_token_ids: the prompt, where there are processors to see it; else empty.
    """

    __slots__ = (
        "_bans",
        "_output_counts",
        "_place",
        "_record",
        "_seen_ids",
        "num_prompt_tokens",
        "prompt_token_ids",
        "rules",
    )

    def __init__(
        self, rules: TokenRules, token_ids: array[int], num_prompt_tokens: int, record: np.void
    ) -> None:
        self.rules = rules
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt_token_ids = tuple(token_ids[:num_prompt_tokens]) if rules.processors else ()
        self._record = record
        self._bans = _NO_IDS
        self._place: dict[int, int] | None = None
        record["bias_ids"], record["bias_values"] = rules.bias_ids.ctypes.data, rules.bias_values.ctypes.data
        record["num_biases"] = len(rules.bias_ids)
        record["num_seen"] = record["num_banned"] = 0
        if rules.has_penalties:
            self._start_counting(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens were added to the output."""
        place = self._place
        if place is None:
            return
        counts = self._output_counts
        for token_id in token_ids:
            index = place.get(token_id)
            if index is not None:
                counts[index] += 1
            else:
                place[token_id] = len(counts)
                counts.append(1)
                self._seen_ids.append(token_id)
                self._point_to_seen()

    def refresh(self, token_ids: array[int], length: int) -> None:
        """Before a token is drawn after ``token_ids``: sets what is forbidden now.

        Args:
            length: of the sequence, with tokens whose ids are not known yet.
        """
        rules = self.rules
        short = length - self.num_prompt_tokens < rules.min_tokens
        bans = rules.early_bans if short else rules.banned_ids
        if rules.bad_words and (endings := self._endings(token_ids)):
            bans = np.concatenate([bans, np.array(endings, np.int32)])
        if bans is not self._bans:
            self._bans = bans
            self._record["banned_ids"], self._record["num_banned"] = bans.ctypes.data, len(bans)

    def _endings(self, token_ids: array[int]) -> list[int]:
        """Ids that would complete a bad word."""
        if not token_ids:
            return []
        return [
            last
            for start, last in self.rules.bad_words.get(token_ids[-1], ())
            if token_ids[-len(start) :] == start
        ]

    def _start_counting(self, token_ids: array[int]) -> None:
        rules, record = self.rules, self._record
        ids = np.frombuffer(token_ids, np.int32).copy()  # a view would keep the array from growing
        output, counts = np.unique(ids[self.num_prompt_tokens :], return_counts=True)
        # Only repetition penalty looks at the prompt.
        seen = output if rules.repetition_penalty == 1.0 else np.unique(ids)
        output_counts = np.zeros(len(seen), np.int32)
        output_counts[np.searchsorted(seen, output)] = counts
        self._place = dict(zip(seen.tolist(), range(len(seen)), strict=True))
        self._seen_ids, self._output_counts = array("i", seen.tobytes()), array("i", output_counts.tobytes())
        self._point_to_seen()
        record["repetition_penalty"] = min(max(rules.repetition_penalty, 1e-37), 1e37)  # as float32 has them
        record["frequency_penalty"] = rules.frequency_penalty
        record["presence_penalty"] = rules.presence_penalty

    def _point_to_seen(self) -> None:
        """Arrays move when they grow."""
        record = self._record
        record["seen_ids"], record["num_seen"] = self._seen_ids.buffer_info()
        record["output_counts"] = self._output_counts.buffer_info()[0]
