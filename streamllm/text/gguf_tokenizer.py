"""A tokenizer from a GGUF file's metadata (keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Two kinds of vocabulary are read: ``gpt2`` (byte-level BPE with merges; ``tokenizer.ggml.pre`` names how text
is cut before merging) and ``llama`` (SentencePiece BPE with scores, merges derived from them). Both become a
``tokenizers`` object equal to the one that the model's own tokenizer.json describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text.token_bytes import SENTENCEPIECE_SPACE
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# GGUF's token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class _PreTokenizer:
    """How one family cuts text before merging.

    Attributes:
        patterns: applied one after the other; matches and what lies between them become pieces.
        nfc: text is normalised to Unicode NFC first.
        ignore_merges: a piece that is a token as a whole is taken as it is.
        adds_bos: what the family does where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = _PreTokenizer((_GPT2_PATTERN,))
_DEFAULT = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"))
_SINGLE_DIGITS = _PreTokenizer((r"\p{N}", _GPT2_PATTERN))
_LLAMA3 = _PreTokenizer(
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SYMBOLS_AND_SPACES,), ignore_merges=True, adds_bos=True
)
_QWEN2 = _PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}" + _SYMBOLS_AND_SPACES,), nfc=True)
_TEKKEN = _PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    adds_bos=True,
)
# The names are llama.cpp's (src/llama-vocab.cpp), the patterns those of the models' own tokenizer.json files.
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}


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
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"The GGUF file has {len(tokens)} tokens but {len(types)} token types.")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens, types)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelLoadError(
            f"The GGUF tokenizer {model!r} (tokenizer.ggml.model) is not supported; supported: gpt2, llama."
        )
    _add_special_tokens(backend, tokens, types)

    def token(name: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None

    named = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
    }
    _set_bos_and_eos(
        backend,
        named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        named["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return Tokenizer(
        backend,
        special_token_strings={name: text for name, text in named.items() if text is not None},
        # Instruct models end a turn with a token of its own (eot), Llama 3.1 a tool call with another (eom).
        eos_tokens=[text for name in ("eos", "eot", "eom") if (text := token(name)) is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE, and whether the family starts texts with BOS."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    rules = _PRE_TOKENIZERS.get(name) if name is not None else None
    if rules is None:
        raise ModelLoadError(
            "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); convert the model again."
            if name is None
            else f"The GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(_PRE_TOKENIZERS)}."
        )
    # Rows that only pad the embedding matrix are no tokens.
    vocabulary = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if not (kind == _UNUSED and token.startswith("[PAD"))
    }
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    backend = tokenizers.Tokenizer(_bpe(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE as in Llama 2's tokenizer.json; it starts texts with BOS unless the file says no."""
    import tokenizers
    from tokenizers import decoders, normalizers

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not scores or len(scores) != len(tokens):
            raise ModelLoadError("The GGUF file has no score (tokenizer.ggml.scores) for each of its tokens.")
        pieces = zip(tokens, scores, types, strict=True)
        merges = merges_from_scores(
            vocabulary, {token: score for token, score, kind in pieces if kind == _NORMAL}
        )
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend = tokenizers.Tokenizer(
        _bpe(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = SENTENCEPIECE_SPACE
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(space)] if adds_space else []), normalizers.Replace(" ", space)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if adds_space else []),
        ]
    )
    return backend, True


def merges_from_scores(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges, best first, that make BPE choose as SentencePiece does by the merged piece's score.

    Each piece can arise from every way to cut it into two tokens. The order among those, which SentencePiece
    leaves to their place in the text, is the one of Transformers' converter.

    Args:
        vocabulary: token to id, every token that may be a part.
        scores: score of each token that may be the result.
    """
    candidates = []
    for piece, score in scores.items():
        splits = [
            (vocabulary[piece[:cut]], vocabulary[piece[cut:]], cut)
            for cut in range(1, len(piece))
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary
        ]
        candidates += [(score, cut, len(piece) - cut, piece) for _, _, cut in sorted(splits)]
    candidates.sort(key=lambda candidate: candidate[:3], reverse=True)
    return [(piece[:cut], piece[cut:]) for _, cut, _, piece in candidates]


def _bpe(**arguments: Any) -> tokenizers.models.BPE:
    from tokenizers import models

    try:
        return models.BPE(**arguments)
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(
            f"The GGUF file's vocabulary and merges do not fit together: {error}."
        ) from error


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: Iterable[str], types: Iterable[int]) -> None:
    """Control tokens are special, user-defined ones (such as ``<think>``) are whole but part of the text."""
    from tokenizers import AddedToken

    kinds = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if token and kind in (_CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if token and kind == _USER_DEFINED]
    )


def _set_bos_and_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes the encoder put these tokens before and after every text (``None``: nothing)."""
    from tokenizers import processors

    ends = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)],
    )
