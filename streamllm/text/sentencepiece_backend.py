"""From a SentencePiece model to an encoder of the ``tokenizers`` package that gives the same ids.

Normaliser, merges, decoder and the rest are those of Transformers' conversion
(``SpmConverter.build_tokenizer_from_spm_proto``), which follows SentencePiece itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text.sentencepiece_model import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel
from streamllm.text.token_bytes import SENTENCEPIECE_SPACE as SPACE

if TYPE_CHECKING:
    import tokenizers


def build_backend(
    model: SentencePieceModel,
    *,
    merges: Sequence[tuple[str, str]] | None = None,
    space_before_every_part: bool = True,
) -> tokenizers.Tokenizer:
    """The encoder without its added tokens: see :func:`add_special_pieces`.

    Args:
        model: vocabulary and normalisation; a piece without text has no token.
        merges: best first, for BPE; otherwise derived from the scores.
        space_before_every_part: special tokens cut a text into parts, and the space that ``model.adds_space``
            speaks of stands before each of them; otherwise only at the text's start (Transformers'
            ``legacy=False``).

    Raises:
        ModelLoadError: a piece occurs twice, or vocabulary, merges and character map do not fit together.
    """
    import tokenizers
    from tokenizers import pre_tokenizers

    vocabulary = vocabulary_of(model.pieces)
    try:
        backend = tokenizers.Tokenizer(
            _unigram(model) if model.is_unigram else _bpe(model, vocabulary, merges)
        )
        backend.normalizer = _normalizer(model, model.adds_space and space_before_every_part)
    except ModelLoadError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"The SentencePiece model's parts do not fit together: {error}.") from error
    cuts: list[Any] = []
    if model.adds_space and not space_before_every_part:
        cuts.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    user_defined = [
        piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == USER_DEFINED
    ]
    if user_defined:
        # SentencePiece takes the longest of them, and never merges across.
        pattern = "|".join(re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = _decoder(model)
    return backend


def add_special_pieces(backend: tokenizers.Tokenizer, model: SentencePieceModel) -> None:
    """Makes the control pieces and the unknown one special tokens, found in a text as they stand."""
    from tokenizers import AddedToken

    backend.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind in zip(model.pieces, model.types, strict=True)
            if piece and kind in (CONTROL, UNKNOWN)
        ]
    )


def vocabulary_of(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id; an empty token has no entry.

    Raises:
        ModelLoadError: a token has two ids.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        first: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if token and first.setdefault(token, token_id) != token_id:
                raise ModelLoadError(f"The token {token!r} has two ids, {first[token]} and {token_id}.")
    vocabulary.pop("", None)
    return vocabulary


def merges_from_scores(vocabulary: Iterable[str], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges, best first, that make BPE choose as SentencePiece does by the merged piece's score.

    Each piece can arise from every way to cut it into two tokens.

    Args:
        vocabulary: all tokens.
        scores: of the pieces that merging may give, in the order of their ids, which decides among equals.
    """
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    # A vocabulary of 262,144 tokens has half a million merges. One comprehension over a set, which is denser
    # than a dictionary, finds them in well under a second.
    known = set(vocabulary)
    return [
        (left, right)
        for piece in ranked
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]


def _unigram(model: SentencePieceModel) -> tokenizers.models.Unigram:
    from tokenizers import models

    pieces = list(zip(model.pieces, model.scores, strict=True))
    unknown = model.unknown_id if model.unknown_id >= 0 else None
    return models.Unigram(pieces, unknown, model.byte_fallback)


def _bpe(
    model: SentencePieceModel, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]] | None
) -> tokenizers.models.BPE:
    from tokenizers import models

    if merges is None:
        pieces = zip(model.pieces, model.scores, model.types, strict=True)
        merges = merges_from_scores(
            vocabulary, {piece: score for piece, score, kind in pieces if kind == NORMAL}
        )
    return models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=model.pieces[model.unknown_id] if model.unknown_id >= 0 else None,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        # A user-defined piece stands alone when the model sees it, and is a token though no merge makes it.
        ignore_merges=USER_DEFINED in model.types,
    )


def _normalizer(model: SentencePieceModel, adds_space: bool) -> tokenizers.normalizers.Normalizer:
    """In SentencePiece's order.

    The package applies a character map to graphemes, where SentencePiece goes by characters: as in
    Transformers, a letter with a combining mark may lose the mark.
    """
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        # Spaces alone: other white space stays.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    space = SPACE if model.escapes_spaces else " "
    if model.escapes_spaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if adds_space:
        steps.append(normalizers.Prepend(space))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> tokenizers.decoders.Decoder:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
