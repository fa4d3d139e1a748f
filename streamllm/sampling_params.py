"""Sampling parameters with vLLM's names, defaults and ranges (``vllm.SamplingParams``).

Every rule is checked when the object is made; a broken one raises :class:`InvalidRequestError` (a
``ValueError``) that names the field and the range. What depends on the model (ids inside the vocabulary, the
context's limit) is checked by the engine at admission.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamllm.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 256
MAX_STOP_STRING_LENGTH = 4096
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream holds: everything so far, the news, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, got {_show(value)}.", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    below = number <= low if low_open else number < low
    if not math.isfinite(number) or below or number > high:
        bracket = "(" if low_open else "["
        upper = "inf)" if high == math.inf else f"{high:g}]"
        raise InvalidRequestError(
            f"{name} must be a finite number in {bracket}{low:g}, {upper}, got {_show(value)}.", param=name
        )
    return number


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {_show(value)}.", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}.", param=name)
    return value


def _show(value: Any) -> str:
    """The value as its sender would recognise it, short and in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the next tokens are chosen and when generation ends.

    Attributes:
        n: choices per prompt, 1 to 128. Allowed at temperature 0 too (the choices are then equal).
        best_of: choices to generate, of which the ``n`` with the highest logprob per token are returned;
            at least ``n``, not in a stream of deltas.
        temperature: >= 0, at most 2; below 1e-5 is greedy.
        top_p: nucleus, in (0, 1].
        top_k: -1 or 0 is off; else the k likeliest tokens (ties at the edge are all kept).
        min_p: in [0, 1]: tokens less likely than ``min_p`` times the likeliest are dropped.
        seed: 64-bit integer, or ``None`` (fresh randomness). A seeded request gives the same tokens alone
            and in any batch.
        stop: string or list of non-empty strings that end generation and are not part of the text.
        stop_token_ids: ids that end generation like EOS.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: do not stop at EOS.
        max_tokens: tokens to generate at most, ``None`` for what the context leaves.
        min_tokens: EOS, stop ids and stop strings are held back until then.
        logprobs: number of likeliest tokens to report per position (0: only the sampled one), or ``None``.
        detokenize, skip_special_tokens, spaces_between_special_tokens: text assembly.
        output_kind: what each output of a stream holds.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            self.best_of = self._check_best_of(self.best_of)
        self.temperature = _number("temperature", self.temperature, 0.0, 2.0)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        self.top_k = max(_integer("top_k", self.top_k, -1, 2**31 - 1), 0)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            if self.seed == -1:
                self.seed = None
        self.stop = self._check_stop(self.stop)
        self.stop_token_ids = self._check_stop_token_ids(self.stop_token_ids)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.",
                param="min_tokens",
            )
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens",
                     "spaces_between_special_tokens"):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} must be true or false, got {_show(getattr(self, name))}.", param=name
                )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize to be true.", param="stop")

    def _check_best_of(self, best_of: Any) -> int:
        best_of = _integer("best_of", best_of, 1, MAX_N)
        if best_of < self.n:
            raise InvalidRequestError(
                f"best_of must be at least n ({self.n}), got {best_of}.", param="best_of"
            )
        if best_of > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise InvalidRequestError(
                f"best_of above n ({self.n}) cannot be streamed: which choices are best is known at the end.",
                param="best_of",
            )
        return best_of

    @staticmethod
    def _check_stop(stop: Any) -> list[str]:
        if stop is None:
            return []
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, (list, tuple)):
            raise InvalidRequestError(
                f"stop must be a string or a list of strings, got {_show(stop)}.", param="stop"
            )
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop"
            )
        for string in strings:
            if not isinstance(string, str):
                raise InvalidRequestError(f"stop must hold strings, got {_show(string)}.", param="stop")
            if not string:
                raise InvalidRequestError("stop must not hold an empty string.", param="stop")
            if len(string) > MAX_STOP_STRING_LENGTH:
                raise InvalidRequestError(
                    f"a stop string has {len(string)} characters; "
                    f"at most {MAX_STOP_STRING_LENGTH} are allowed.",
                    param="stop",
                )
        return list(strings)

    @staticmethod
    def _check_stop_token_ids(ids: Any) -> list[int]:
        if ids is None:
            return []
        if not isinstance(ids, (list, tuple)):
            raise InvalidRequestError(
                f"stop_token_ids must be a list of token ids, got {_show(ids)}.", param="stop_token_ids"
            )
        return list(dict.fromkeys(_integer("stop_token_ids", i, 0, 2**31 - 1) for i in ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """Choices to generate."""
        return self.best_of or self.n

    @property
    def selects_best(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.num_sequences > self.n

    @property
    def num_reported_logprobs(self) -> int | None:
        """Likeliest tokens that the model must report per position; 0 is the sampled one alone."""
        return 0 if self.selects_best and self.logprobs is None else self.logprobs

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; the rules are checked again."""
        return replace(self, **changes)


MAX_BEAM_WIDTH = 16
MIN_LENGTH_PENALTY, MAX_LENGTH_PENALTY = -10.0, 10.0


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search (``vllm.BeamSearchParams``; scores and stopping as in Transformers).

    Attributes:
        beam_width: beams kept, and hypotheses returned, 1 to 16.
        max_tokens: tokens to generate at most, ``None`` for what the context leaves.
        ignore_eos: EOS ends no beam.
        temperature: must be 0: beams are not sampled.
        length_penalty: a hypothesis's summed logprob is divided by its generated length to this power.
        early_stopping: ``True`` ends at ``beam_width`` finished hypotheses; ``False`` when no running beam is
            likely to beat the worst of them; ``"never"`` when none can.
        include_stop_str_in_output: accepted for vLLM's sake; beams have no stop strings.
        output_kind: what each output holds; there is only one, at the end.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    @property
    def num_sequences(self) -> int:
        """Hypotheses returned."""
        return self.beam_width

    def __post_init__(self) -> None:
        self.beam_width = _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if _number("temperature", self.temperature, 0.0, 2.0) >= GREEDY_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature must be 0 with beam search, got {self.temperature}.", param="temperature"
            )
        self.length_penalty = _number(
            "length_penalty", self.length_penalty, MIN_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {_show(self.early_stopping)}.',
                param="early_stopping",
            )
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"ignore_eos must be true or false, got {_show(self.ignore_eos)}.", param="ignore_eos"
            )
