"""Sampling parameters with vLLM's names, defaults and ranges (``vllm.SamplingParams``).

Every rule is checked when the object is made; a broken one raises :class:`InvalidRequestError` (a
``ValueError``) that names the field and the range. What depends on the model (ids inside the vocabulary, the
context's limit) is checked by the engine at admission.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamllm.checks import (
    check_flag,
    check_integer,
    check_number,
    check_strings,
    check_token_ids,
    show_value,
)
from streamllm.errors import InvalidRequestError
from streamllm.structured_outputs import StructuredOutputsParams, Thinking

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 256
MAX_STOP_STRING_LENGTH = 4096
MAX_LOGIT_BIAS = 4096
MAX_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_LOGITS_PROCESSORS = 16
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream holds: everything so far, the news, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the next tokens are chosen and when generation ends.

    Attributes:
        n: choices per prompt, 1 to 128. Allowed at temperature 0 too (the choices are then equal).
        best_of: choices to generate, of which the ``n`` with the highest logprob per token are returned;
            at least ``n``, not in a stream of deltas.
        presence_penalty: in [-2, 2], subtracted from the logit of every token that the output holds.
        frequency_penalty: in [-2, 2], subtracted once for each time that the output holds it.
        repetition_penalty: > 0; the logit of a token that prompt or output holds is divided by it if
            positive, else multiplied (CTRL, Keskar et al. 2019).
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
        prompt_logprobs: the same for the tokens of the prompt; with the first output of a stream.
        detokenize, skip_special_tokens, spaces_between_special_tokens: text assembly.
        kept_special_tokens: ids of special tokens that stay in the text although others are skipped.
        logit_bias: token id -> what is added to its logit, clamped to [-100, 100].
        allowed_token_ids: the only ids that may be generated.
        bad_words: texts that are not generated, at the start of a word or inside one.
        structured_outputs: what the text must look like.
        thinking: what may come before that, and how much of it.
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; -1: as many as the context
            holds.
        logits_processors: names of registered processors (:mod:`streamllm.logits_processors`), called in
            this order.
        extra_args: what those processors are told.
        output_kind: what each output of a stream holds.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    kept_special_tokens: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking: Thinking | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: Sequence[str] | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.n = check_integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            self.best_of = self._check_best_of(self.best_of)
        self.temperature = check_number("temperature", self.temperature, 0.0, 2.0)
        self.top_p = check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        self.top_k = max(check_integer("top_k", self.top_k, -1, 2**31 - 1), 0)
        self.min_p = check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, -(2**63), 2**64 - 1)
            if self.seed == -1:
                self.seed = None
        self.stop = self._check_stop(self.stop)
        self.stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids or [])
        if self.max_tokens is not None:
            self.max_tokens = check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.",
                param="min_tokens",
            )
        self.logprobs = self._check_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = self._check_logprobs("prompt_logprobs", self.prompt_logprobs)
        self._check_token_rules()
        self.truncate_prompt_tokens = self._check_truncation(self.truncate_prompt_tokens)
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize to be true.", param="stop")

    def _check_token_rules(self) -> None:
        """Penalties, bias and bans."""
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, check_number(name, getattr(self, name), -2.0, 2.0))
        self.repetition_penalty = check_number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True
        )
        self.logit_bias = self._check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty: no token could be generated.", param="allowed_token_ids"
                )
        self.bad_words = check_strings(
            "bad_words",
            [] if self.bad_words is None else self.bad_words,
            max_count=MAX_BAD_WORDS,
            max_length=MAX_BAD_WORD_LENGTH,
        )
        self.logits_processors = check_strings(
            "logits_processors",
            [] if self.logits_processors is None else self.logits_processors,
            max_count=MAX_LOGITS_PROCESSORS,
            max_length=MAX_BAD_WORD_LENGTH,
        )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidRequestError(
                f"extra_args must be an object, got {show_value(self.extra_args)}.", param="extra_args"
            )
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, StructuredOutputsParams
        ):
            raise InvalidRequestError(
                "structured_outputs must be a StructuredOutputsParams, "
                f"got {show_value(self.structured_outputs)}.",
                param="structured_outputs",
            )

        if self.thinking is not None and not isinstance(self.thinking, Thinking):
            raise InvalidRequestError(
                f"thinking must be a Thinking, got {show_value(self.thinking)}.", param="thinking"
            )

    @staticmethod
    def _check_logprobs(name: str, count: Any) -> int | None:
        if isinstance(count, bool):
            return 1 if count else None
        return None if count is None else check_integer(name, count, 0, MAX_LOGPROBS)

    def _check_best_of(self, best_of: Any) -> int:
        best_of = check_integer("best_of", best_of, 1, MAX_N)
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
                f"stop must be a string or a list of strings, got {show_value(stop)}.", param="stop"
            )
        return check_strings("stop", strings, max_count=MAX_STOP_STRINGS, max_length=MAX_STOP_STRING_LENGTH)

    @staticmethod
    def _check_logit_bias(bias: Any) -> dict[int, float] | None:
        """Keys may be strings of digits, as JSON has them; values are clamped to [-100, 100], as in vLLM."""
        if bias is None:
            return None
        if not isinstance(bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must be an object of token id to bias, got {show_value(bias)}.",
                param="logit_bias",
            )
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias holds {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
                param="logit_bias",
            )
        checked = {}
        for key, value in bias.items():
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
                key = int(key)
            if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
                raise InvalidRequestError(
                    f"logit_bias must have token ids as keys, got {show_value(key)}.", param="logit_bias"
                )
            number = check_number("logit_bias", value, -math.inf, math.inf)
            checked[key] = min(max(number, -MAX_BIAS), MAX_BIAS)
        return checked

    @staticmethod
    def _check_truncation(count: Any) -> int | None:
        if count is None or count == -1:
            return count
        return check_integer("truncate_prompt_tokens", count, 1, 2**31 - 1)

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
        self.beam_width = check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.max_tokens is not None:
            self.max_tokens = check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if check_number("temperature", self.temperature, 0.0, 2.0) >= GREEDY_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature must be 0 with beam search, got {self.temperature}.", param="temperature"
            )
        self.length_penalty = check_number(
            "length_penalty", self.length_penalty, MIN_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {show_value(self.early_stopping)}.',
                param="early_stopping",
            )
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"ignore_eos must be true or false, got {show_value(self.ignore_eos)}.", param="ignore_eos"
            )
