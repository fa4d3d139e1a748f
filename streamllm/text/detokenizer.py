"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from streamllm.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Assembles the text of one generated sequence, never cutting a character in two.

    The pieces returned by :meth:`push` and :meth:`finish`, joined, equal the joined bytes of all tokens
    decoded by ``bytes.decode("utf-8", "replace")``. Bytes that can no longer become a character are U+FFFD at
    once; an incomplete character is kept back until its next token.

    Args:
        tokenizer: gives each token's bytes.
        skip_special_tokens: special tokens add nothing to the text.
        kept_special_tokens: ids of those that do all the same.
        spaces_between_special_tokens: vLLM's field, for which there is nothing to do: tokens are joined as
            their bytes stand, so special tokens follow each other without spaces either way.
    """

    __slots__ = ("_decoder", "_kept", "_skip_special_tokens", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_tokens: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept_special_tokens
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty inside a character."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._kept:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD if the sequence ended inside a character, else nothing."""
        return self._decoder.decode(b"", True)
