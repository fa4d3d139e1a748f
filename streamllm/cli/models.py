"""``streamllm list`` and ``streamllm remove``: the models in the caches."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from streamllm.errors import ConfigError
from streamllm.sources.installed import InstalledModel, installed_models
from streamllm.sources.removal import find_removal

_AGES = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as streamllm list shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run_list(options: argparse.Namespace) -> int:
    """Print the models that can be loaded."""
    models = [model for model in installed_models() if _can_be_loaded(model)]
    if options.json:
        print(json.dumps([asdict(model) for model in models], indent=2))
    elif models:
        print(_table(models))
    else:
        print("No models here yet; streamllm pull MODEL fetches one.", file=sys.stderr)
    return 0


def run_remove(options: argparse.Namespace) -> int:
    """Delete a model, after asking.

    Raises:
        ConfigError: there is no terminal to ask on.
        ModelLoadError: it is not there, or in use.
    """
    from streamllm.engine.memory import gib

    removal = find_removal(options.model)
    size = gib(removal.size)
    if not options.yes and not _agreed(f"Remove {removal.name} ({size})? [y/N] "):
        print("Nothing was removed.")
        return 1
    removal.execute()
    print(f"Removed {removal.name}: {size} are free.")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("remove asks before it deletes, and there is no terminal; use -y.")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _can_be_loaded(model: InstalledModel) -> bool:
    """Whether there is a description of the model, or the Transformers backend may know it."""
    from streamllm.models.registry import GGUF_ARCHITECTURES, supported_architectures

    architecture = model.architecture or ""
    if model.kind == "gguf":
        return architecture in GGUF_ARCHITECTURES
    return architecture in supported_architectures() or architecture.endswith(("ForCausalLM", "LMHeadModel"))


def _table(models: Sequence[InstalledModel]) -> str:
    from streamllm.engine.memory import gib

    rows = [("NAME", "SIZE", "FORMAT", "ARCHITECTURE", "LAST USED")]
    rows += [
        (_shown(model), gib(model.size), model.format, model.architecture or "", _age(model.last_used))
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(model: InstalledModel) -> str:
    return model.name if model.revision is None else f"{model.name} --revision {model.revision}"


def _age(when: float) -> str:
    seconds = time.time() - when
    for size, unit in _AGES:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
