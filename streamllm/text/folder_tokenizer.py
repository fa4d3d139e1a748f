"""A tokenizer from a Hugging Face model folder.

tokenizer.json says how text is cut and whether BOS goes in front. tokenizer_config.json (older folders:
special_tokens_map.json) names the special tokens, may add tokens, and holds the chat template unless a file
of its own does. Its ``add_bos_token`` has no effect beside a tokenizer.json, as in Transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, equal to the one Transformers builds.

    Raises:
        ModelLoadError: tokenizer.json is missing, damaged or of a kind that is not supported.
    """
    backend = _load_backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    try:
        _add_tokens(backend, config, [*named.values(), *_extra_special_tokens(config)])
        return Tokenizer(
            backend,
            special_token_strings=named,
            eos_tokens=[named["eos_token"]] if "eos_token" in named else [],
            chat_template=_chat_template(folder, config),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'} is not as Transformers writes it: {error!r}."
        ) from error


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no tokenizer.json. Make one with Transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ModelLoadError(f"{path} is damaged or needs a newer tokenizers package: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


def _token_text(token: Any) -> str | None:
    """A token is written as a string, or as an object with its text under ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _extra_special_tokens(config: dict[str, Any]) -> list[str]:
    tokens: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name) or []
        tokens.extend(value.values() if isinstance(value, dict) else value)
    return [text for token in tokens if (text := _token_text(token)) is not None]


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: list[str]) -> None:
    """Adds what the configuration lists beyond tokenizer.json, and makes the named tokens special.

    A named token that the vocabulary lacks is not added: the model has no embedding for it.
    """
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = config.get("added_tokens_decoder") or {}
    for token_id, token in sorted((int(token_id), token) for token_id, token in listed.items()):
        added = AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
        if repr(added) != repr(known.get(token_id)):
            backend.add_tokens([added])
    known_texts = {added.content: added for added in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(special):
        known_token = known_texts.get(text)
        if known_token is None and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif known_token is not None and not known_token.special:
            known_token.special = True
            backend.add_special_tokens([known_token])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template in chat_template.jinja, chat_template.json or the configuration, in this order."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    return template
