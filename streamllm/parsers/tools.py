"""The tools of a request, as far as parsers must know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: as the request gives it.
        parameters: the JSON schema of its arguments; ``None``: any object.
        strict: the arguments must follow the schema even where the model chooses to call.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
