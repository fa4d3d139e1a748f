"""Which files of a hub repository make the model that is asked for, and no others.

Repositories hold the same weights several times over: in other frameworks' formats, in float32, as pickles
beside safetensors, as a dozen quantisations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from streamllm.errors import ModelLoadError
from streamllm.sources.model_files import gguf_quantisation, gguf_sets

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of a folder's weights, or of the stem of its shards' index, by preference."""

_SMALL = (
    "*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "vocab.txt", "merges.txt", "*.py",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_DEFAULT_QUANTISATION = "Q4_K_M"  # llama.cpp's and Ollama's where a name says none


def description_files(names: Iterable[str]) -> list[str]:
    """A folder model's files besides the weights: configs, tokenizer, chat templates, code."""
    return sorted(
        name
        for name in names
        if any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in _SMALL)
        and not (name.endswith(".index.json") and name.removesuffix(".index.json") not in WEIGHTS)
    )


def weight_index(names: Collection[str]) -> str | None:
    """The file that lists a folder model's weights: an index of shards, or the only file itself.

    ``None``: the repository has no weights that a folder can be loaded from.
    """
    for name in WEIGHTS:
        for candidate in (f"{name}.index.json", name):
            if candidate in names:
                return candidate
    return None


def choose_gguf(names: Iterable[str], wanted: str | None, repo_id: str) -> tuple[str, ...] | None:
    """The files of one GGUF model, the first one first.

    Args:
        names: of all files, with their folders.
        wanted: a file's name or a quantisation (``"Q4_K_M"``), any case; ``None``: the only one, or
            llama.cpp's default.

    Returns:
        ``None`` if there is no GGUF at all.

    Raises:
        ModelLoadError: none of that name, or several; the message lists what there is.
    """
    sets = gguf_sets(names)
    if not sets:
        return None
    found = _matching(sets, wanted or _DEFAULT_QUANTISATION)
    if wanted is None and len(sets) == 1:
        found = list(sets)
    if len(found) == 1:
        return sets[found[0]]
    listed = ", ".join(gguf_quantisation(name) or name for name in found or sets)
    if found:
        raise ModelLoadError(
            f"{repo_id}:{wanted or _DEFAULT_QUANTISATION} could be any of {', '.join(found)}. Name the file: "
            f"{repo_id}:{found[0].rsplit('/', 1)[-1]}."
        )
    if wanted is None:
        raise ModelLoadError(
            f"The hub's {repo_id} holds {len(sets)} GGUF models. Name one: {repo_id}:NAME, with NAME one of "
            f"{listed}."
        )
    raise ModelLoadError(f"The hub's {repo_id} has no GGUF {wanted}; it has {listed}.")


def _matching(sets: Mapping[str, tuple[str, ...]], wanted: str) -> list[str]:
    """The models that ``wanted`` means: by file, else by quantisation, else by the end of one."""
    wanted = wanted.lower()
    stem = re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", wanted)
    for is_meant in (
        lambda name, _: name == stem,
        lambda name, _: name.rsplit("/", 1)[-1] == stem,
        lambda _, quantisation: quantisation == wanted,
        lambda _, quantisation: quantisation.endswith(f"-{wanted}"),
    ):
        found = [name for name in sets if is_meant(name.lower(), (gguf_quantisation(name) or "").lower())]
        if found:
            return found
    return []
