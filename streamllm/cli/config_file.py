"""``--config FILE.yaml``: a file of flags, read before the command line is, which wins."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from streamllm.errors import ConfigError
from streamllm.vllm_compat import check_other_setting


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="flags as lines `max-num-seqs: 64`; those of the command line win",
    )


def expand_config(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments with the file's that ``--config`` names in front, without those that are given anyway.

    Raises:
        ConfigError: the file cannot be read or is no mapping, a key is no flag of ``parser`` (the nearest one
            is named), or a value cannot be written as one.
    """
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "-h" in flags or "--help" in flags:  # for which the parser needs its defaults
        return arguments
    given = _given(arguments, parser)
    path = given.get("config")
    if path is None:
        return arguments
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    taken = set(given) | ({"model"} if "model_positional" in given else set())
    expanded: list[str] = []
    seen: dict[str, str] = {}
    for key, value in _read(path).items():
        flag = "--" + str(key).replace("_", "-")
        action = actions.get(flag)
        if action is None:
            _check_unknown(key, flag, value, path, actions)
            continue
        if action.dest in ("config", "help"):
            raise ConfigError(f"{path}: {key} has no place in a config file.")
        if action.dest in seen:
            raise ConfigError(f"{path}: {key} and {seen[action.dest]} are the same setting; leave one out.")
        seen[action.dest] = str(key)
        if action.dest not in taken and value is not None:
            expanded += _as_arguments(flag, action, value, f"{path}: {key}")
    return expanded + arguments


def _given(arguments: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What the arguments name themselves: no default, and nothing that must be there."""
    saved = [(action, action.default, action.required) for action in parser._actions]
    defaults = parser._defaults
    parser._defaults = {}
    for action, _, _ in saved:
        action.default, action.required = argparse.SUPPRESS, False
    try:
        return vars(parser.parse_args(arguments))
    finally:
        parser._defaults = defaults
        for action, default, required in saved:
            action.default, action.required = default, required


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path} cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"--config {path} is no YAML:{place} {problem}.") from None
    except (ValueError, RecursionError) as error:  # such as a date that is none
        raise ConfigError(f"--config {path} is no YAML: {error}.") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} must hold lines like `max-num-seqs: 64`.")
    return settings


def _check_unknown(key: Any, flag: str, value: Any, path: str, actions: dict[str, argparse.Action]) -> None:
    """
    Raises:
        ConfigError: unless it is a setting of vLLM's that changes nothing here.
    """
    try:
        if check_other_setting(flag[2:].replace("-", "_"), value):
            return
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    known = [name[2:] for name in actions if name.startswith("--")]
    close = difflib.get_close_matches(flag[2:], known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{path}: unknown key {key}.{hint}")


def _as_arguments(flag: str, action: argparse.Action, value: Any, place: str) -> list[str]:
    """One ``--flag=value`` for each value, so that none can be taken for something else."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{place} must be true or false, got {value!r}.")
        if isinstance(action, argparse.BooleanOptionalAction):
            name = flag.removeprefix("--").removeprefix("no-")
            return [f"--{name}" if value != flag.startswith("--no-") else f"--no-{name}"]
        return [flag] if value else []
    if action.nargs == "+":
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ConfigError(f"{place} is an empty list; leave it out.")
    else:
        values = [value]
    return [f"{flag}={_as_text(each)}" for each in values]


def _as_text(value: Any) -> str:
    if isinstance(value, (bool, dict, list)):
        return json.dumps(value)
    return str(value)
