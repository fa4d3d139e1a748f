"""The encoder in a Hugging Face model folder: tokenizer.json, or one of the older files that it replaced.

Those are vocab.json with merges.txt (GPT-2, OPT) and SentencePiece's tokenizer.model (Llama 2, Mistral,
Gemma). They hold a vocabulary; how text is cut around it is code in Transformers, chosen by the
``tokenizer_class`` of tokenizer_config.json. The same is built here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text import byte_level, sentencepiece_backend
from streamllm.text.sentencepiece_model import SentencePieceModel, read_model

if TYPE_CHECKING:
    import tokenizers

_BYTE_LEVEL_CLASSES = {
    "GPT2Tokenizer": byte_level.GPT2,
    "CodeGenTokenizer": byte_level.GPT2,
    "GPTNeoXTokenizer": byte_level.GPT_NEOX,
    "Qwen2Tokenizer": byte_level.QWEN2,
}
# Where no class is named, by config.json's model_type; others are GPT-2's.
_BYTE_LEVEL_FAMILIES = {"qwen2": byte_level.QWEN2, "qwen3": byte_level.QWEN2, "gpt_neox": byte_level.GPT_NEOX}
_END_OF_TEXT = "<|endoftext|>"

_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# These number the pieces otherwise than the file does.
_RENUMBERED = (
    "BarthezTokenizer", "CamembertTokenizer", "CpmTokenizer", "MBart50Tokenizer", "MBartTokenizer",
    "NllbTokenizer", "PegasusTokenizer", "XGLMTokenizer", "XLMRobertaTokenizer", "XLNetTokenizer",
)  # fmt: skip
_CLASSES_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_WITH_TRANSFORMERS = (
    "Make a tokenizer.json with Transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
)


@dataclass(frozen=True)
class FolderBackend:
    """An encoder and what its file says about special tokens.

    Attributes:
        encoder: without the tokens that tokenizer_config.json adds.
        is_complete: from tokenizer.json, which also says where BOS and EOS go; ids in other files may differ.
        special_tokens: ``bos_token`` and so on, where tokenizer_config.json does not name them.
        adds_bos: whether BOS goes in front where tokenizer_config.json does not say.
        matches_raw_text: added tokens are looked for before the text is normalised, whatever they say.
    """

    encoder: tokenizers.Tokenizer
    is_complete: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    matches_raw_text: bool = False


def load_backend(folder: Path, config: Mapping[str, Any], model_type: str | None) -> FolderBackend:
    """The encoder in ``folder``.

    Args:
        folder: holds one of the files above.
        config: tokenizer_config.json's content.
        model_type: config.json's.

    Raises:
        ModelLoadError: no such file, a damaged one, or a kind that is not supported, by name.
    """
    if (folder / "tokenizer.json").is_file():
        return FolderBackend(_from_json(folder / "tokenizer.json"), is_complete=True)
    name = config.get("tokenizer_class")
    tokenizer_class = name.removesuffix("Fast") if isinstance(name, str) else None
    sentencepiece = next((path for name in _SENTENCEPIECE_FILES if (path := folder / name).is_file()), None)
    if sentencepiece is not None and tokenizer_class not in _BYTE_LEVEL_CLASSES:
        return _from_sentencepiece(sentencepiece, config, tokenizer_class)
    if (folder / "vocab.json").is_file():
        return _from_vocabulary_and_merges(folder, config, tokenizer_class, model_type)
    other = next(
        (
            path.name
            for pattern in ("tekken.json", "*.tiktoken", "vocab.txt")
            for path in folder.glob(pattern)
        ),
        None,
    )
    if other is not None:
        raise ModelLoadError(f"{folder / other}: a tokenizer of this kind is not read. {_WITH_TRANSFORMERS}")
    raise ModelLoadError(
        f"{folder} has no tokenizer.json, nor the older tokenizer.model or vocab.json with merges.txt. "
        "Fetch it again, or copy the tokenizer's files from the model that it was made from."
    )


def _from_json(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{path} is damaged or needs a newer tokenizers package: {error}.") from error


def _from_vocabulary_and_merges(
    folder: Path, config: Mapping[str, Any], tokenizer_class: str | None, model_type: str | None
) -> FolderBackend:
    from tokenizers import models, pre_tokenizers

    rules = _byte_level_rules(folder, tokenizer_class, model_type)
    paths = folder / "vocab.json", folder / "merges.txt"
    if not paths[1].is_file():
        raise ModelLoadError(f"{folder} has a vocab.json but no merges.txt. Fetch the folder again.")
    try:
        vocabulary, merges = models.BPE.read_file(*map(str, paths))
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{paths[0]} or merges.txt beside it is damaged: {error}.") from error
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ModelLoadError(f"{paths[0]} gives one id to two tokens. Fetch the folder again.")
    try:
        encoder = byte_level.build_backend(vocabulary, merges, rules)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    if config.get("add_prefix_space") and rules is not byte_level.QWEN2:
        # The space must be there before GPT-2's pattern, which is ByteLevel's own, cuts the text.
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    names = ("eos_token", "unk_token", *(("bos_token",) if rules is not byte_level.QWEN2 else ()))
    special = dict.fromkeys(names, _END_OF_TEXT) if _END_OF_TEXT in vocabulary else {}
    return FolderBackend(encoder, special_tokens=special)


def _byte_level_rules(
    folder: Path, tokenizer_class: str | None, model_type: str | None
) -> byte_level.PreTokenizer:
    if tokenizer_class is None:
        families = (
            rules for name, rules in _BYTE_LEVEL_FAMILIES.items() if (model_type or "").startswith(name)
        )
        return next(families, byte_level.GPT2)
    rules = _BYTE_LEVEL_CLASSES.get(tokenizer_class)
    if rules is None:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and its tokenizer_class {tokenizer_class} is not one of those "
            f"that vocab.json is read for ({', '.join(_BYTE_LEVEL_CLASSES)}). {_WITH_TRANSFORMERS}"
        )
    return rules


def _from_sentencepiece(path: Path, config: Mapping[str, Any], tokenizer_class: str | None) -> FolderBackend:
    if tokenizer_class in _RENUMBERED:
        raise ModelLoadError(
            f"{path.parent} has no tokenizer.json, and its tokenizer_class {tokenizer_class} is not "
            f"supported without one. {_WITH_TRANSFORMERS}"
        )
    with open(path, "rb") as file:
        if _TIKTOKEN.match(file.read(200)):
            raise ModelLoadError(
                f"{path} is a tiktoken vocabulary, not SentencePiece's: not read. {_WITH_TRANSFORMERS}"
            )
    model = _renamed(read_model(path), config)
    if config.get("add_prefix_space") is False:
        model = replace(model, adds_space=False)
    try:
        encoder = sentencepiece_backend.build_backend(
            model, space_before_every_part=config.get("legacy") is not False
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    sentencepiece_backend.add_special_pieces(encoder, model)
    ids = {
        "bos_token": model.bos_id,
        "eos_token": model.eos_id,
        "unk_token": model.unknown_id,
        "pad_token": model.pad_id,
    }
    return FolderBackend(
        encoder,
        special_tokens={name: model.pieces[token_id] for name, token_id in ids.items() if token_id >= 0},
        adds_bos=tokenizer_class in _CLASSES_WITH_BOS or (tokenizer_class is None and not model.is_unigram),
        matches_raw_text=True,
    )


def _renamed(model: SentencePieceModel, config: Mapping[str, Any]) -> SentencePieceModel:
    """The model with the names that tokenizer_config.json gives its pieces: fine-tunes use spare ones."""
    names: dict[int, str] = {}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if int(token_id) < len(model.pieces):
            names[int(token_id)] = token["content"]
    if not names:
        return model
    pieces = [names.get(token_id, piece) for token_id, piece in enumerate(model.pieces)]
    return replace(model, pieces=pieces)
