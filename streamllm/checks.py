"""Checks of single values that users give, with messages that name the field and what it may hold."""

from __future__ import annotations

import math
from typing import Any

from streamllm.errors import InvalidRequestError

MAX_TOKEN_IDS = 300_000
"""Ids in one list: more than any vocabulary has."""


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """The value as a finite float of ``[low, high]`` (``(low, high]`` if ``low_open``).

    Raises:
        InvalidRequestError: it is something else; the message gives the range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, got {show_value(value)}.", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    below = number <= low if low_open else number < low
    if not math.isfinite(number) or below or number > high:
        bracket = "(" if low_open else "["
        upper = "inf)" if high == math.inf else f"{high:g}]"
        raise InvalidRequestError(
            f"{name} must be a finite number in {bracket}{low:g}, {upper}, got {show_value(value)}.",
            param=name,
        )
    return number


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """The value as an integer of ``[low, high]``.

    Raises:
        InvalidRequestError: it is something else (``True`` too); the message gives the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {show_value(value)}.", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}.", param=name)
    return value


def show_value(value: Any) -> str:
    """The value as its sender would recognise it, short and in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_flag(name: str, value: Any) -> bool:
    """The value, which must be a bool."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {show_value(value)}.", param=name)
    return value


def check_strings(name: str, value: Any, *, max_count: int, max_length: int) -> list[str]:
    """The value as a list of non-empty strings of at most ``max_length`` characters each.

    Raises:
        InvalidRequestError: it is something else.
    """
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of strings, got {show_value(value)}.", param=name)
    if len(value) > max_count:
        raise InvalidRequestError(
            f"{name} holds {len(value)} strings; at most {max_count} are allowed.", param=name
        )
    for string in value:
        if not isinstance(string, str):
            raise InvalidRequestError(f"{name} must hold strings, got {show_value(string)}.", param=name)
        if not string:
            raise InvalidRequestError(f"{name} must not hold an empty string.", param=name)
        if len(string) > max_length:
            raise InvalidRequestError(
                f"a string in {name} has {len(string)} characters; at most {max_length} are allowed.",
                param=name,
            )
    return list(value)


def check_token_ids(name: str, value: Any) -> list[int]:
    """The value as a list of distinct integers of 31 bits, in their order; the vocabulary is checked later.

    Raises:
        InvalidRequestError: it is something else.
    """
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {show_value(value)}.", param=name)
    if len(value) > MAX_TOKEN_IDS:
        raise InvalidRequestError(
            f"{name} holds {len(value)} ids; at most {MAX_TOKEN_IDS} are allowed.", param=name
        )
    # Whole-list checks take a few ms for 100,000 ids; the loop is only to name the culprit.
    if value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31):
        for token_id in value:
            check_integer(name, token_id, 0, 2**31 - 1)
    return list(dict.fromkeys(value))
