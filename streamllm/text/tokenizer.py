"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streamllm.errors import InvalidRequestError
from streamllm.text.token_bytes import TokenSpelling

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A model's tokenizer: encoding by the ``tokenizers`` package, decoding by a table of each token's bytes.

    Made by :meth:`from_folder` or :meth:`from_gguf`. All methods may be called from several threads at once.

    Args:
        backend: the encoder; truncation and padding are switched off in it.
        special_token_strings: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` ... as far as the
            model names them. Chat templates see them under these names.
        eos_tokens: the tokens that end a generation as far as the tokenizer itself says.
        chat_template: the model's template (Jinja), if it has one.

    Attributes:
        vocab_size: the largest token id plus one. Ids between may be missing: see :meth:`contains`.
        bos_token_id: ``None`` where the model names no beginning-of-sequence token.
        eos_token_ids: the ids of ``eos_tokens``.
        adds_bos: whether :meth:`encode` puts BOS in front.

    Raises:
        ModelLoadError: the tokens of this tokenizer cannot be mapped to bytes one by one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_token_strings: Mapping[str, str],
        eos_tokens: Iterable[str],
        chat_template: str | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_token_strings = dict(special_token_strings)
        self.chat_template = chat_template

        def known_ids(tokens: Iterable[str]) -> list[int]:
            ids = (backend.token_to_id(token) for token in dict.fromkeys(tokens))
            return [token_id for token_id in ids if token_id is not None]

        self.eos_token_ids = tuple(known_ids(eos_tokens))
        bos = self.special_token_strings.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self._special_ids = set(known_ids(self.special_token_strings.values()))

        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._spellings: list[str | None] = [None] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._spellings[token_id] = token
        decoder = backend.decoder
        self._spelling = TokenSpelling.from_decoder(json.loads(decoder.__getstate__()) if decoder else None)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        for token_id, added in backend.get_added_tokens_decoder().items():
            if added.special:
                self._special_ids.add(token_id)
                self._bytes[token_id] = added.content.encode()
            else:
                self._bytes[token_id] = self._spelling.added_token_bytes(added.content)
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder: tokenizer.json and the small files beside it.

        Raises:
            ModelLoadError: tokenizer.json is missing, damaged or of a kind that is not supported.
        """
        from streamllm.text.folder_tokenizer import load_tokenizer

        return load_tokenizer(path)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata.

        Raises:
            ModelLoadError: the file has none, or one of a kind that is not supported, by name.
        """
        from streamllm.text.gguf_tokenizer import load_tokenizer

        return load_tokenizer(path)

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The token ids of a text. The interpreter's lock is released meanwhile.

        The text of a special token becomes that token.

        Args:
            text: any text without lone surrogates; the empty text gives no ids (or BOS alone).
            add_special_tokens: put BOS (and EOS) where the model's tokenizer puts them.
            param: the field to blame in an error.

        Raises:
            InvalidRequestError: the text has a lone surrogate, which no UTF-8 can hold.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"{param} is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
                    f"at character {error.start}.",
                    param=param,
                ) from error
        # The batch form, for it computes no offsets and releases the lock throughout.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of a prompt that a chat template wrote, with exactly one BOS if the model has one.

        Templates that write BOS themselves are left alone; for those that leave it to the tokenizer it is
        put in front.

        Raises:
            InvalidRequestError: as :meth:`encode`.
        """
        token_ids = self.encode(text, add_special_tokens=False, param="messages")
        if self.adds_bos and self.bos_token_id is not None and token_ids[:1] != [self.bos_token_id]:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text: a part of a character, or several characters.

        An id without a token (:meth:`contains` says so) has none: padded vocabularies can sample such ids.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            spelling = self._spellings[token_id]
            known = b"" if spelling is None else self._spelling.token_bytes(spelling)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text by itself; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model (BOS, EOS, turn markers) rather than being part of the text."""
        return token_id in self._special_ids

    def contains(self, token_id: int) -> bool:
        """Whether the id has a token."""
        return 0 <= token_id < self.vocab_size and self._spellings[token_id] is not None

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; invalid UTF-8 shows as U+FFFD, as Python's ``"replace"`` does it.

        Where the tokenizer puts a space in front of every text (Llama 2), that space is taken off again. A
        text that continues another one is a matter for :class:`IncrementalDetokenizer`, which keeps it.
        """
        text = b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special_ids)
        ).decode("utf-8", "replace")
        for _ in range(self._spelling.leading_spaces):
            text = text.removeprefix(" ")
        return text
