"""A tokenizer from a GGUF file's metadata (keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Three kinds of vocabulary are read: ``gpt2`` (byte-level BPE with merges; ``tokenizer.ggml.pre`` names how
text is cut before merging), ``llama`` (SentencePiece BPE with scores, merges derived from them) and ``t5``
(SentencePiece unigram). Each becomes a ``tokenizers`` object equal to the one that the model's own
tokenizer.json describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text import byte_level, sentencepiece_backend
from streamllm.text.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)
from streamllm.text.token_bytes import SENTENCEPIECE_SPACE
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_NO_TOKEN = (-1, 0xFFFFFFFF)
# Special tokens of Phi-3 that leave the white space behind them alone; its other ones swallow it, which its
# tokenizer.json says and a GGUF has no field for.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
        ModelLoadError: the file has no vocabulary, or one of a kind that is not supported, by name.
    """
    from streamllm.sources.gguf_file import GGUFFile

    metadata = GGUFFile(path).metadata
    try:
        return build_tokenizer(metadata)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata (arrays as lists).

    Raises:
        ModelLoadError: as :func:`load_tokenizer`.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("The GGUF file has no vocabulary (tokenizer.ggml.tokens).")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"The GGUF file has {len(tokens)} tokens but {len(types)} token types.")
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            backend, adds_bos = _byte_level(metadata, tokens, types)
        case "llama":
            if _is_gemma(metadata):
                tokens = [_respelled_spaces(token) for token in tokens]
            backend, adds_bos = _sentencepiece_bpe(metadata, tokens, types), True
        case "t5":
            backend, adds_bos = _sentencepiece_unigram(metadata, tokens, types), False
        case model:
            raise ModelLoadError(
                f"The GGUF tokenizer {model!r} (tokenizer.ggml.model) is not supported; supported: gpt2, "
                "llama, t5."
            )
    _add_tokens(backend, metadata, tokens, types)

    named = {
        "bos_token": _named_token(metadata, tokens, "bos"),
        "eos_token": _named_token(metadata, tokens, "eos"),
        "unk_token": _named_token(metadata, tokens, "unknown"),
        "pad_token": _named_token(metadata, tokens, "padding"),
    }
    _set_bos_and_eos(
        backend,
        named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        named["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    # Instruct models end a turn with a token of its own (eot), Llama 3.1 a tool call with another (eom).
    ends = [_named_token(metadata, tokens, name) for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        special_token_strings={name: token for name, token in named.items() if token is not None},
        eos_tokens=[token for token in ends if token is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _named_token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    """A special token by the field with its id; ``None`` where the file has no such token."""
    field = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(field)
    if token_id is None or token_id in _NO_TOKEN:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"The GGUF file's {field} is {token_id}, but it has {len(tokens)} tokens.")
    return tokens[token_id] or None


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE, and whether the family starts texts with BOS."""
    name = metadata.get("tokenizer.ggml.pre")
    rules = byte_level.GGUF_PRE_TOKENIZERS.get(name) if name is not None else None
    if rules is None:
        raise ModelLoadError(
            "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); convert the model again."
            if name is None
            else f"The GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(byte_level.GGUF_PRE_TOKENIZERS)}."
        )
    # Rows that only pad the embedding matrix are no tokens.
    vocabulary = sentencepiece_backend.vocabulary_of(
        [
            "" if kind == UNUSED and token.startswith("[PAD") else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    )
    return byte_level.build_backend(vocabulary, _merges(metadata) or [], rules), rules.adds_bos


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """The merges in the file, best first; ``None`` where it has none."""
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        return None
    # Behind the first character, for a token may start with a space.
    cuts = [merge.find(" ", 1) for merge in merges]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece BPE as in Llama 2's and Gemma's tokenizer.json."""
    merges = _merges(metadata)
    scores = [0.0] * len(tokens) if merges is not None else _scores(metadata, tokens)
    if _is_gemma(metadata):
        # Runs of spaces are merged first. Their score says nothing.
        scores = [
            float("inf") if kind == USER_DEFINED else score for score, kind in zip(scores, types, strict=True)
        ]
        types = [
            NORMAL if kind == USER_DEFINED and not token.strip(SENTENCEPIECE_SPACE) else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
    model = SentencePieceModel(
        tokens,
        scores,
        _without_user_defined(types),
        is_unigram=False,
        byte_fallback=True,
        unknown_id=types.index(UNKNOWN) if UNKNOWN in types else -1,
        adds_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        removes_extra_spaces=False,
    )
    return sentencepiece_backend.build_backend(model, merges=merges)


def _sentencepiece_unigram(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece unigram, which is what converters write for T5's kind of tokenizer."""
    model = SentencePieceModel(
        tokens,
        _scores(metadata, tokens),
        _without_user_defined(types),
        is_unigram=True,
        byte_fallback=BYTE in types,
        unknown_id=types.index(UNKNOWN) if UNKNOWN in types else -1,
        adds_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        removes_extra_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap") or ()),
    )
    return sentencepiece_backend.build_backend(model)


def _scores(metadata: Mapping[str, Any], tokens: list[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError("The GGUF file has no score (tokenizer.ggml.scores) for each of its tokens.")
    return scores


def _without_user_defined(types: list[int]) -> list[int]:
    """The types for SentencePiece's part of the work: what is user-defined becomes an added token instead."""
    return [UNUSED if kind == USER_DEFINED else kind for kind in types]


def _is_gemma(metadata: Mapping[str, Any]) -> bool:
    return str(metadata.get("general.architecture", "")).startswith("gemma")


def _respelled_spaces(token: str) -> str:
    """Gemma's tokens for runs of spaces stand in a GGUF as spaces, where its vocabulary has ``▁``."""
    return token if token.strip(" ") or len(token) < 2 else SENTENCEPIECE_SPACE * len(token)


def _add_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> None:
    """Control tokens are special, user-defined ones (such as ``<think>``) are whole but part of the text.

    Gemma's runs of ``▁`` are neither: they stand for spaces, which merging finds.
    """
    from tokenizers import AddedToken

    is_phi3 = (
        metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    )
    kinds = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=is_phi3 and token not in _PHI3_PLAIN)
            for token, kind in kinds
            if kind in (CONTROL, UNKNOWN)
        ]
    )
    is_gemma = _is_gemma(metadata)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in kinds
            if kind == USER_DEFINED and not (is_gemma and not token.strip(SENTENCEPIECE_SPACE))
        ]
    )


def _set_bos_and_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes the encoder put these tokens before and after every text (``None``: nothing)."""
    from tokenizers import processors

    ends = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)],
    )
