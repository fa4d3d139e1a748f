"""Prompts whose middle is to be written: prefix and suffix between special tokens.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022).
"""

from __future__ import annotations

from typing import NamedTuple

from streamllm.text.tokenizer import Tokenizer

SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek)
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


class MiddleMarks(NamedTuple):
    """The tokens that stand before the prefix, before the suffix, and before what is generated."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, bos: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt in the order prefix, suffix, middle; BOS, if any, stays in front."""
        return [*bos, self.prefix, *prefix, self.suffix, *suffix, self.middle]


def middle_marks(tokenizer: Tokenizer) -> MiddleMarks | None:
    """The model's marks, or ``None`` if it was not trained to fill in the middle."""
    for spelling in SPELLINGS:
        prefix, suffix, middle = map(tokenizer.token_id, spelling)
        if prefix is not None and suffix is not None and middle is not None:
            return MiddleMarks(prefix, suffix, middle)
    return None
