"""Byte-level BPE (GPT-2 and most families since): how each of them cuts text before merging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamllm.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """How one family cuts text before merging.

    Attributes:
        patterns: applied one after the other; matches and what lies between them become pieces.
        nfc: text is normalised to Unicode NFC first.
        ignore_merges: a piece that is a token as a whole is taken as it is.
        adds_bos: what the family does where its files do not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Words of capitals, small letters, or capitals that small letters follow.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITAL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SYMBOLS_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = PreTokenizer((_GPT2_PATTERN,))
GPT_NEOX = PreTokenizer((_GPT2_PATTERN,), nfc=True)
QWEN2 = PreTokenizer((_CONTRACTION + _WORDS + r"\p{N}" + _SYMBOLS_AND_SPACES,), nfc=True)

_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_PATTERN))
_CL100K = PreTokenizer((_CONTRACTION + _WORDS + r"\p{N}{1,3}" + _SYMBOLS_AND_SPACES,))
_LLAMA3 = PreTokenizer(_CL100K.patterns, ignore_merges=True, adds_bos=True)
_QWEN35 = PreTokenizer(
    (
        _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    nfc=True,
)
_TEKKEN = PreTokenizer(
    (rf"{_SMALL_WORD}|{_CAPITAL_WORD}|\p{{N}}{_SYMBOLS_AND_SLASHES}",), ignore_merges=True, adds_bos=True
)
_O200K = PreTokenizer(
    (
        rf"{_SMALL_WORD}{_CONTRACTION}?|{_CAPITAL_WORD}{_CONTRACTION}?"
        rf"|\p{{N}}{{1,3}}{_SYMBOLS_AND_SLASHES}",
    )
)
_DEEPSEEK_CODER = PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

GGUF_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "gigachat", "granite-docling", "mellum"), GPT2),
    "mpt": GPT_NEOX,
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    "command-r": PreTokenizer(_SINGLE_DIGITS.patterns, nfc=True),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(
        ("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
"""By GGUF's ``tokenizer.ggml.pre``. The names are llama.cpp's (src/llama-vocab.cpp), the patterns those of
the models' own tokenizer.json files: ``refact`` is Granite 3's too, ``dbrx`` that of Phi-4, OLMo 2 and
Granite 4, ``gpt-4o`` that of gpt-oss and Phi-4-mini, ``llama-bpe`` SmolLM3's too."""


def build_backend(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], rules: PreTokenizer
) -> tokenizers.Tokenizer:
    """The encoder without its added tokens.

    Args:
        vocabulary: token, written in GPT-2's alphabet of bytes, to id.
        merges: best first.
        rules: of the family.

    Raises:
        ModelLoadError: a merge needs a token that the vocabulary lacks.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"The vocabulary and the merges do not fit together: {error}.") from error
    backend = tokenizers.Tokenizer(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
