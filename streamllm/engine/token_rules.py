"""From a request's parameters to the rules that the sampler follows, with every id checked."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable

import numpy as np

from streamllm.errors import InvalidRequestError
from streamllm.logits_processors import make_logits_processors
from streamllm.runner.token_rules import LogitsProcessor, TokenRules
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.text.tokenizer import Tokenizer

MANY_WORDS = 16
"""Bad words from which tokenising them leaves the event loop."""


class TokenRuleMaker:
    """Makes :class:`TokenRules` for a model.

    Args:
        tokenizer: knows the vocabulary, and tokenises bad words.
        vocab_size: ids below this are sampled.
        eos_token_ids: ids that end a sequence.
        prepare_processors: makes logits processors ready for where the model is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        prepare_processors: Callable[[tuple[LogitsProcessor, ...]], tuple[LogitsProcessor, ...]] = tuple,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._prepare_processors = prepare_processors
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._known_ids = frozenset(filter(tokenizer.contains, range(vocab_size)))

    async def make(self, params: SamplingParams | BeamSearchParams) -> TokenRules | None:
        """The rules in ``params``, ``None`` if there are none (as in every beam search).

        Raises:
            InvalidRequestError: an id outside the vocabulary, an unknown processor, or rules that leave no
                token to begin with.
        """
        if isinstance(params, BeamSearchParams):
            return None
        self._check_ids(params)
        if not _has_rules(params):
            return None
        off_loop = bool(params.logits_processors) or len(params.bad_words or ()) > MANY_WORDS
        return await asyncio.to_thread(self._make, params) if off_loop else self._make(params)

    def _check_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids: Iterable[int] = getattr(params, name) or ()
            if not self._known_ids.issuperset(ids):
                unknown = next(token_id for token_id in ids if token_id not in self._known_ids)
                raise InvalidRequestError(
                    f"{name} holds {unknown}, which is not in the vocabulary (0 to {self._vocab_size - 1}).",
                    param=name,
                )

    def _make(self, params: SamplingParams) -> TokenRules:
        bias = params.logit_bias or {}
        words = self._tokenise_words(params.bad_words or ())
        held_back = self._held_back(params)
        rules = TokenRules(
            bias_ids=np.array(list(bias), np.int32),
            bias_values=np.array(list(bias.values()), np.float32),
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            banned_ids=np.array([word[0] for word in words if len(word) == 1], np.int32),
            held_back_ids=np.array(held_back, np.int32),
            min_tokens=params.min_tokens if held_back else 0,
            bad_words=_by_last_but_one(words),
            allowed_mask=self._mask(params.allowed_token_ids),
            processors=self._prepare_processors(
                make_logits_processors(params.logits_processors or (), params.extra_args, self._vocab_size)
            ),
        )
        self._check_something_is_left(params, rules)
        return rules

    def _held_back(self, params: SamplingParams) -> list[int]:
        """Ids that would end the sequence too early."""
        if not params.min_tokens:
            return []
        eos = [] if params.ignore_eos else self._eos_token_ids
        return list(dict.fromkeys([*eos, *(params.stop_token_ids or ())]))

    def _tokenise_words(self, words: Collection[str]) -> list[tuple[int, ...]]:
        """Every word as it stands inside a text and at the start of a word, as vLLM does it; but of both
        spellings always, also where they have different numbers of tokens."""
        spellings: dict[str, None] = {}
        for word in words:
            inside = word.lstrip()
            spellings.update(dict.fromkeys([inside, " " + inside] if inside else [word]))
        encode = self._tokenizer.encode
        ids = (tuple(encode(text, add_special_tokens=False, param="bad_words")) for text in spellings)
        return [word for word in dict.fromkeys(ids) if word]

    def _mask(self, allowed: Collection[int] | None) -> np.ndarray | None:
        if allowed is None:
            return None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        bits[np.array(allowed, np.int64)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _check_something_is_left(self, params: SamplingParams, rules: TokenRules) -> None:
        allowed = self._known_ids if params.allowed_token_ids is None else params.allowed_token_ids
        if not set(rules.early_bans.tolist()).issuperset(allowed):
            return
        raise InvalidRequestError(
            f"no token is left to begin with: {', '.join(rules.describe_bans())} forbid all of them.",
            param="allowed_token_ids" if params.allowed_token_ids is not None else "bad_words",
        )


def _has_rules(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.logits_processors
    )


def _by_last_but_one(words: Iterable[tuple[int, ...]]) -> dict[int, list[tuple[array[int], int]]]:
    """Bad words of two and more tokens, as :attr:`TokenRules.bad_words` has them."""
    table: dict[int, list[tuple[array[int], int]]] = {}
    for word in words:
        if len(word) > 1:
            table.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))
    return table
