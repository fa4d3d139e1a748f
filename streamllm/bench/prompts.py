"""What the load generator sends: distinct prompts of a wanted length, output lengths.

Pure functions of their arguments: the same seed gives the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Common English words; with a leading space nearly all are one token in the usual BPE vocabularies.
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy process music market
sense nation plan college interest death experience effect use class control care field development role
effort rate heart drug show leader light voice wife police mind price report decision son view relationship
town road arm difference value building action season society tax director position player record paper
space ground form event official matter center couple site project activity star table need court oil
situation cost industry figure street image phone data picture practice piece land product doctor wall
patient worker news test movie north love support technology river garden window summer winter letter
language science nature animal bird fish horse tree flower stone metal glass paint color green blue white
black small large young old early late high low long short strong simple clear open deep wide cold warm
quiet ready happy common special whole major better great good new other certain possible public free real
best true able
"""
WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load.

    Attributes:
        index: 0, 1, ... in the order of arrival.
        prompt: the prompt's text, or its token ids (completions only).
        max_tokens: tokens to generate at most; exactly as many where the server honours ``ignore_eos``.
    """

    index: int
    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokensPerWord:
    """How the server counts a prompt: ``tokens = overhead + slope * words`` (overhead: a chat template)."""

    overhead: float = 0.0
    slope: float = 1.0

    @classmethod
    def from_probes(cls, small: tuple[int, int], large: tuple[int, int]) -> TokensPerWord:
        """The line through two measured (words, tokens) pairs."""
        slope = (large[1] - small[1]) / (large[0] - small[0])
        if slope <= 0:
            return cls()
        return cls(overhead=max(small[1] - slope * small[0], 0.0), slope=slope)

    def words_for(self, tokens: int) -> int:
        """The number of words, at least 1, whose prompt comes closest to ``tokens``."""
        return max(round((tokens - self.overhead) / self.slope), 1)


def make_prompts(count: int, num_words: int, seed: int) -> list[str]:
    """``count`` prompts of ``num_words`` words each; see :func:`prompts_of_lengths`."""
    return prompts_of_lengths([num_words] * count, seed)


def prompts_of_lengths(num_words: Sequence[int], seed: int | str) -> list[str]:
    """A prompt of so many random words for each length, each with its own beginning: no prefix is shared.

    The first words spell the prompt's number in base ``len(WORDS)`` over a shuffled alphabet, lowest digit
    first: up to ``len(WORDS)`` prompts differ in their first word already.
    """
    rng = random.Random(f"prompts {seed}")
    alphabet = rng.sample(WORDS, len(WORDS))
    num_digits = 1
    while len(WORDS) ** num_digits < len(num_words):
        num_digits += 1
    prompts = []
    for number, length in enumerate(num_words):
        digits = [alphabet[number // len(WORDS) ** place % len(WORDS)] for place in range(num_digits)]
        words = digits + rng.choices(WORDS, k=max(length - num_digits, 0))
        prompts.append(" ".join(words[:length]))
    return prompts


def output_lengths(count: int, low: int, high: int, seed: int) -> list[int]:
    """``count`` output lengths; see :func:`uniform_lengths`."""
    return uniform_lengths(count, low, high, seed, "output")


def uniform_lengths(count: int, low: int, high: int, seed: int, what: str) -> list[int]:
    """``count`` lengths of ``what``, uniform between ``low`` and ``high``, both included."""
    rng = random.Random(f"{what} lengths {seed}")
    return [rng.randint(low, high) for _ in range(count)]
