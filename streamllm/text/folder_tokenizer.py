"""A tokenizer from a Hugging Face model folder.

tokenizer.json, or an older file in its place (:mod:`streamllm.text.folder_backend`), says how text is cut.
tokenizer_config.json (older folders: special_tokens_map.json and added_tokens.json) names the special tokens,
may add tokens, and holds the chat template unless a file of its own does. Its ``add_bos_token`` has no effect
beside a tokenizer.json, as in Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.errors import ModelLoadError
from streamllm.text.folder_backend import FolderBackend, load_backend
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, equal to the one Transformers builds.

    Raises:
        ModelLoadError: the tokenizer's files are missing, damaged, contradict each other or are of a kind
            that is not supported.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    model_type = _read_json(folder / "config.json").get("model_type")
    try:
        backend = load_backend(folder, config, model_type)
        tokens = {**backend.special_tokens, **{name: config[name] for name in NAMED_TOKENS if name in config}}
        named = {name: text for name, token in tokens.items() if (text := _token_text(token)) is not None}
        _add_tokens(backend, folder, config, [*tokens.values(), *_extra_special_tokens(config)])
        if not backend.is_complete:
            _set_bos_and_eos(backend, config, named)
        return Tokenizer(
            backend.encoder,
            special_token_strings=named,
            eos_tokens=[named["eos_token"]] if "eos_token" in named else [],
            chat_template=_chat_template(folder, config),
        )
    except ModelLoadError as error:
        message = str(error)
        raise ModelLoadError(message if str(folder) in message else f"{folder}: {message}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'} is not as Transformers writes it: {error!r}."
        ) from error


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


def _extra_special_tokens(config: Mapping[str, Any]) -> list[Any]:
    tokens: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name) or []
        tokens.extend(value.values() if isinstance(value, dict) else value)
    return tokens


def _add_tokens(backend: FolderBackend, folder: Path, config: dict[str, Any], special: list[Any]) -> None:
    """Adds what the folder lists beyond the vocabulary, and makes the named tokens special.

    A named token that the vocabulary lacks is not added: the model has no embedding for it.
    """
    encoder = backend.encoder
    known = encoder.get_added_tokens_decoder()
    special_texts = {text for token in special if (text := _token_text(token)) is not None}
    if "added_tokens_decoder" in config:
        path = folder / "tokenizer_config.json"
        listed = {int(token_id): token for token_id, token in config["added_tokens_decoder"].items()}
    else:
        path = folder / "added_tokens.json"
        listed = {
            token_id: {
                "content": text,
                "special": text in special_texts,
                "normalized": text not in special_texts,
            }
            for text, token_id in _read_json(path).items()
            if token_id not in known
        }
    for token_id, token in sorted(listed.items()):
        added = _added_token(token, backend)
        if repr(added) != repr(known.get(token_id)):
            encoder.add_tokens([added])
        if not backend.is_complete and encoder.token_to_id(added.content) != token_id:
            raise ModelLoadError(
                f"{path} gives the token {added.content!r} the id {token_id}, where the vocabulary beside it "
                f"leads to {encoder.token_to_id(added.content)}. Fetch the folder again."
            )
    _make_special(backend, special)


def _make_special(backend: FolderBackend, special: Iterable[Any]) -> None:
    encoder = backend.encoder
    known = {added.content: added for added in encoder.get_added_tokens_decoder().values()}
    for token in special:
        text = _token_text(token)
        added = known.get(text) if text is not None else None
        if added is not None and not added.special:
            added.special = True
            encoder.add_special_tokens([added])
        elif added is None and text is not None and encoder.token_to_id(text) is not None:
            flags = token if isinstance(token, dict) else {"normalized": False}
            known[text] = _added_token({**flags, "content": text, "special": True}, backend)
            encoder.add_special_tokens([known[text]])


def _added_token(token: Mapping[str, Any], backend: FolderBackend) -> tokenizers.AddedToken:
    """A token as the files describe it: its text under ``content``, and flags."""
    from tokenizers import AddedToken

    flags = {flag: token[flag] for flag in _FLAGS if flag in token}
    if backend.matches_raw_text:
        flags["normalized"] = False
    return AddedToken(token["content"], **flags)


def _set_bos_and_eos(backend: FolderBackend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Makes the encoder put these tokens before and after every text where the configuration says so."""
    from tokenizers import processors

    wanted = {
        "bos_token": config.get("add_bos_token", backend.adds_bos),
        "eos_token": config.get("add_eos_token", False),
    }
    ids: dict[str, int] = {}
    for name, is_wanted in wanted.items():
        if not is_wanted or name not in named:
            continue
        token_id = backend.encoder.token_to_id(named[name])
        if token_id is None:
            raise ModelLoadError(
                f"The {name} {named[name]!r} goes with every text but is not in the vocabulary."
            )
        ids[name] = token_id
    backend.encoder.post_processor = processors.TemplateProcessing(
        single=[*(named[name] for name in ids if name == "bos_token"), "$A"]
        + [named[name] for name in ids if name == "eos_token"],
        special_tokens=list({named[name]: token_id for name, token_id in ids.items()}.items()),
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
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
