"""Values of the load generator's flags, each with an error that says what is allowed."""

from __future__ import annotations

import argparse
import math

from streamllm.settings import parse_quantity


def count(text: str) -> int:
    """A whole number of at least 0; 8k is 8,000 and 8K is 8,192."""
    return _whole_number(text, 0)


def positive_count(text: str) -> int:
    """A whole number of at least 1; 8k is 8,000 and 8K is 8,192."""
    return _whole_number(text, 1)


def number(text: str) -> float:
    """A finite number."""
    value = _float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def share(text: str) -> float:
    """A number from 0 up to, but not including, 1."""
    value = _float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


def rate(text: str) -> float:
    """A number above 0, or ``inf``."""
    value = _float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or inf; got {text!r}")
    return value


def temperature(text: str) -> float:
    """A number from 0 to 2."""
    value = _float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"must be between 0 and 2, got {text!r}")
    return value


def _whole_number(text: str, low: int) -> int:
    try:
        value = parse_quantity(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
