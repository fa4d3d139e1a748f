"""Parameters in a request's query, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from streamllm.errors import InvalidRequestError


@dataclass(frozen=True)
class Page:
    """A part of a list, as OpenAI's lists are read: ``limit``, ``after`` and ``order``.

    Attributes:
        limit: most objects.
        after: id of the object behind which the page begins; ``None`` for the first page.
        ascending: the oldest first.
    """

    limit: int
    after: str | None = None
    ascending: bool = False

    @classmethod
    def of_request(cls, request: Request, *, default: int, most: int) -> Page:
        """
        Raises:
            InvalidRequestError: a query parameter is malformed.
        """
        given = request.query_params
        limit, order = given.get("limit", str(default)), given.get("order", "desc")
        if not re.fullmatch(r"\d{1,9}", limit) or not 1 <= int(limit) <= most:
            raise InvalidRequestError(f"limit must be a whole number between 1 and {most}.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequestError('order must be "asc" or "desc".', param="order")
        return cls(int(limit), given.get("after"), order == "asc")


def query_number(request: Request, name: str, default: float, low: float, high: float) -> Any:
    """A number in the query, of the default's type.

    Raises:
        InvalidRequestError: it is none, or not within ``[low, high]``.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be a number from {low:g} to {high:g}, got {text[:40]!r}.", param=name
        )
    return value
