"""What the commands share that measure an engine in their own process."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from streamllm.cli.arguments import add_settings
from streamllm.cli.config_file import add_config_argument
from streamllm.config import EngineConfig
from streamllm.errors import ConfigError, StreamLLMError
from streamllm.settings import settings_of

WriteResults = Callable[[dict[str, Any]], None]


def add_engine_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """One flag for each of the engine's settings, ``--config`` and ``--output-json``.

    Args:
        without: settings that the command has flags of its own for.
    """
    parser.set_defaults(model_positional=None)
    parser.add_argument("--output-json", metavar="FILE", help="where results go, besides the terminal")
    add_config_argument(parser)
    names = [declared.name for declared in settings_of(EngineConfig) if declared.name not in without]
    add_settings(parser, EngineConfig, "engine (as for serve)", only=names)


@contextlib.contextmanager
def json_results(name: str | None) -> Iterator[WriteResults]:
    """What writes the results to the file of that name; without one, it writes nothing.

    The file is opened at once, so that hours of measuring are not lost to a folder that is missing. What it
    holds stays until there are results, and a file that was not there is not left behind empty.

    Raises:
        StreamLLMError: the file cannot be written.
    """
    if name is None:
        yield lambda results: None
        return
    path = Path(name)

    def write(results: dict[str, Any]) -> None:
        with _explained(name):
            path.write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")

    is_new = not path.exists()
    with _explained(name):
        path.open("a").close()
    try:
        yield write
    finally:
        if is_new and path.stat().st_size == 0:
            path.unlink()


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"--output-json {name} cannot be written: {error.strerror or error}."
        raise StreamLLMError(message) from None


def check_length(what: str, num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> None:
    """Refuse a sequence that the engine would cut short, so that what is measured is what was asked for.

    Args:
        what: whose lengths these are, for the error.

    Raises:
        ConfigError: prompt and output together are longer than a sequence can be.
    """
    if num_prompt_tokens + num_output_tokens > max_model_len:
        raise ConfigError(
            f"{what}: {num_prompt_tokens} prompt tokens and {num_output_tokens} output tokens are more than "
            f"the {max_model_len} of a sequence here; ask for shorter ones, or see --max-model-len."
        )
