"""How settings are declared: fields of a dataclass that are also command-line flags."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, field, fields
from typing import Any

from streamllm.errors import ConfigError

AUTO_LENGTH = -1
"""``--max-model-len auto``."""


def setting(
    default: Any,
    help: str,
    *,
    kind: str = "str",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: value when nothing is given.
        help: one sentence for ``--help`` and the documentation.
        kind: ``str``, ``int`` (accepts 4k = 4000, 4K = 4096), ``length`` (an ``int`` or auto), ``bytes``
            (accepts 2GiB, 500MB), ``float``, ``bool`` (``--flag`` and ``--no-flag``) or ``list`` (one or more
            values).
        aliases: other names of the same setting.
        choices: allowed values of a ``str``.
        low, high: inclusive range of a number.
    """
    return field(
        default=default,
        metadata={
            "help": help, "kind": kind, "aliases": aliases, "choices": choices, "low": low, "high": high,
        },
    )  # fmt: skip


class Settings:
    """Checks every field of a settings dataclass against its declaration."""

    def __post_init__(self) -> None:
        for declared in settings_of(type(self)):
            value = check_setting(declared, getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)


def settings_of(config_class: type) -> tuple[Field[Any], ...]:
    """The declared settings of a class, in order: its own, then those that it inherits."""
    inherited = {name for base in config_class.__mro__[1:] for name in getattr(base, "__annotations__", ())}
    return tuple(sorted(fields(config_class), key=lambda declared: declared.name in inherited))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


_MULTIPLIERS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30, "t": 10**12,
                "T": 2**40}  # fmt: skip
_BYTE_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
               "tib": 2**40, "b": 1}  # fmt: skip


def parse_quantity(text: str) -> int:
    """``"4096"``, ``"4k"`` (4000), ``"4K"`` (4096), ``"2GiB"``, ``"500MB"`` as an integer.

    Raises:
        ValueError: anything else, or a value that is not whole.
    """
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    unit = match[2]
    multiplier = _BYTE_UNITS.get(unit.lower()) if len(unit) > 1 or (unit in "bB" and unit) else None
    if multiplier is None:
        multiplier = _MULTIPLIERS.get(unit)
    if multiplier is None:
        raise ValueError(f"unknown unit {unit!r}")
    value = float(match[1]) * multiplier
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(match[1]) * multiplier if "." not in match[1] else int(value)


def check_setting(declared: Field[Any], value: Any) -> Any:
    """The value of one setting in its declared type.

    Raises:
        ConfigError: it has the wrong type or lies outside its range; the message names flag and range.
    """
    flag, rules = flag_of(declared.name), declared.metadata
    default = None if declared.default is MISSING else declared.default
    if value is None:
        if default is None:
            return None
        raise ConfigError(f"{flag} must not be None.")
    kind = rules["kind"]
    if kind == "length" and value == "auto":
        value = AUTO_LENGTH
    if kind in ("int", "bytes", "length"):
        value = _whole_number(flag, value)
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise ConfigError(f"{flag} must be a number, got {value!r}.")
        value = float(value)
    elif kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{flag} must be true or false, got {value!r}.")
    elif kind == "list":
        value = (value,) if isinstance(value, str) else tuple(value)
        if len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
            value = _json_list(flag, value[0])  # vLLM's way of writing one
        if not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{flag} must hold non-empty strings, got {list(value)!r}.")
    elif not isinstance(value, str):
        raise ConfigError(f"{flag} must be a string, got {value!r}.")
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(f"{flag} must be one of {', '.join(rules['choices'])}; got {value!r}.")
    low, high = rules["low"], rules["high"]
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{flag} must be between {_bound(low)} and {_bound(high)}, got {value}.")
    return value


def _json_list(flag: str, text: str) -> tuple[Any, ...]:
    try:
        return tuple(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"{flag} is not a valid JSON list: {error}.") from None


def _bound(value: float) -> str:
    """A limit as a person would type it."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _whole_number(flag: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_quantity(value)
        except ValueError as error:
            raise ConfigError(f"{flag} must be a whole number: {error}.") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{flag} must be a whole number, got {value!r}.")
    return value
