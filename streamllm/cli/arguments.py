"""Command-line flags, made from the fields of the configuration classes."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterable
from typing import Any

from streamllm.config import EngineConfig
from streamllm.errors import ConfigError
from streamllm.settings import settings_of
from streamllm.vllm_compat import NEUTRAL, SHORT_FLAGS, UNSUPPORTED, check_other_setting


def add_settings(
    parser: argparse.ArgumentParser, config_class: type, title: str, only: Collection[str] | None = None
) -> None:
    """Add one flag per setting of ``config_class``. Flags left out stay out of the parsed namespace.

    Args:
        only: names of the settings that get one; ``None`` for all.
    """
    group = parser.add_argument_group(title)
    for declared in settings_of(config_class):
        if only is not None and declared.name not in only:
            continue
        rules = declared.metadata
        flags = ["--" + name.replace("_", "-") for name in (declared.name, *rules["aliases"])]
        flags += [f"-{short}" for short, name in SHORT_FLAGS.items() if name == declared.name]
        default = declared.default
        shown = (
            ""
            if default in (None, (), False) or "efault" in rules["help"]
            else f" Default: {_show(default)}."
        )
        options: dict[str, Any] = {
            "dest": declared.name, "default": argparse.SUPPRESS,
            "help": (rules["help"] + shown).replace("%", "%%"),
        }  # fmt: skip
        if rules["kind"] == "bool":
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif rules["kind"] == "list":
            group.add_argument(*flags, nargs="+", action="extend", metavar="VALUE", **options)
        else:
            metavar = {"int": "N", "length": "N", "bytes": "SIZE", "float": "X"}.get(rules["kind"], "VALUE")
            if rules["choices"]:
                metavar = "{" + ",".join(rules["choices"]) + "}"
            number = _number if rules["kind"] == "float" else str
            group.add_argument(*flags, metavar=metavar, type=number, **options)


def settings_from(namespace: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """The settings of ``config_class`` that were given on the command line."""
    given = vars(namespace)
    return {d.name: given[d.name] for d in settings_of(config_class) if d.name in given}


def engine_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Those of ``EngineConfig``; the model may be named by position (``model_positional``) or by flag.

    Raises:
        ConfigError: two models are named.
    """
    settings = settings_from(namespace, EngineConfig)
    named = namespace.model_positional
    if named is not None and settings.setdefault("model", named) != named:
        raise ConfigError(f"two models were named, {named} and --model {settings['model']}.")
    return settings


def drop_other_flags(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments without vLLM's flags that change nothing here.

    Raises:
        ConfigError: a flag of vLLM's that is not supported, or one that nobody knows (the nearest known one
            is suggested).
    """
    known = {flag for action in parser._actions for flag in action.option_strings}
    kept: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        index += 1
        flag, has_value, value = argument.partition("=")
        if argument == "--":
            kept.extend(arguments[index - 1 :])
            break
        is_flag = flag.startswith("-") and flag != "-" and " " not in flag and not _is_negative_number(flag)
        if not is_flag or _is_known(flag, known):
            kept.append(argument)
            continue
        name = flag.lstrip("-").replace("-", "_")
        name = SHORT_FLAGS.get(name, name)
        negated = name.startswith("no_") and name[3:] in NEUTRAL
        name = name[3:] if negated else name
        if name not in NEUTRAL and name not in UNSUPPORTED:
            raise ConfigError(f"unknown flag {flag}.{_suggestion(flag, known, parser.prog)}")
        is_switch = name in NEUTRAL and any(isinstance(v, bool) for v in NEUTRAL[name])
        if negated:
            check_other_setting(name, False)
        elif has_value:
            check_other_setting(name, _typed(name, value))
        elif is_switch:
            check_other_setting(name, True)
        else:
            value = arguments[index] if index < len(arguments) else ""
            index += 1
            check_other_setting(name, _typed(name, value))
    return kept


def _typed(name: str, text: str) -> Any:
    """The neutral value that ``text`` spells, or the text itself."""
    for neutral in NEUTRAL.get(name, ()):
        if str(neutral).lower() == text.lower():
            return neutral
    return text


def _is_known(flag: str, known: Collection[str]) -> bool:
    """Whether it is a flag of the parser's, or a one-letter one with its value (``-oFILE``)."""
    return flag in known or (flag[1] != "-" and flag.lstrip("-") not in SHORT_FLAGS and flag[:2] in known)


def _suggestion(flag: str, known: Iterable[str], program: str) -> str:
    close = difflib.get_close_matches(flag, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else f" See {program} --help."


def _is_negative_number(text: str) -> bool:
    return text[1:2].isdigit()


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _show(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
