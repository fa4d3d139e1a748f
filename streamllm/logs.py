"""Log lines on standard error, alike in all of streamllm's processes."""

from __future__ import annotations

import logging

_CONTROL_CHARACTERS = [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029]
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CONTROL_CHARACTERS}


def escape_control_characters(text: str) -> str:
    """``text`` such that it cannot steer a terminal; line ends and tabs stay."""
    return text.translate(_ESCAPES)


class EscapingFormatter(logging.Formatter):
    """Shows control characters as escapes, for what a client has sent may turn up in an error's text."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_characters(super().format(record))


def stderr_handler(who: str = "") -> logging.Handler:
    """
    Args:
        who: stands before each message: ``"worker 1: "``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter(f"%(asctime)s %(levelname)s {who}%(message)s", "%H:%M:%S"))
    return handler


def quieten_libraries() -> None:
    """Of these only warnings are news."""
    for name in ("httpx", "httpcore", "huggingface_hub", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
