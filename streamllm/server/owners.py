"""Who may see what is kept: an object is only seen with the API key that made it."""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from streamllm.server.middleware import given_key

OWNER = "streamllm.owner"
"""Key of an ASGI scope under which a request made in this process names its owner."""


def owner_of(request: Request) -> str:
    """The owner of what a request keeps and sees: a digest of its key; one for all where no keys are
    required."""
    if OWNER in request.scope:
        return str(request.scope[OWNER])
    key = given_key(request.scope)
    if key is None or not request.app.state.server.config.api_key:
        return ""
    return hashlib.sha256(key).hexdigest()
