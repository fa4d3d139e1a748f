"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(body: Any) -> Response:
    """A whole answer, status 200."""
    return Response(orjson.dumps(body), media_type="application/json")
