"""Bodies of the Batches and Files APIs."""

from __future__ import annotations

import re
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.server.protocol import ApiRequest

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
"""Routes that the lines of a file may ask."""

FILE_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86400
"""Seconds after which a file may be told to expire."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

UPLOAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": FILE_PURPOSE},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY, "maximum": MAX_EXPIRY},
    },
}
"""The form of ``POST /v1/files`` as a JSON schema."""


class BatchRequest(ApiRequest, kw_only=True):
    """Body of ``POST /v1/batches``.

    ``input_file_id`` names a file of purpose ``batch``, each line of which asks ``endpoint``.
    ``completion_window`` is OpenAI's ``"24h"``, or another number of s, m, h or d up to 30 days; what has no
    answer by then gets the error ``batch_expired``. ``output_expires_after`` says how long the files of
    results are kept: ``{"anchor": "created_at", "seconds": 3600}``.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


def check_batch_request(body: BatchRequest) -> None:
    """
    Raises:
        InvalidRequestError: a field's value is not allowed.
    """
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError(
            f'endpoint must be one of {", ".join(ENDPOINTS)}, got "{body.endpoint[:100]}".', param="endpoint"
        )
    window_seconds(body.completion_window)
    output_expiry(body)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are allowed.", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"metadata may have keys of up to {MAX_METADATA_KEY} characters and values of up to "
                f"{MAX_METADATA_VALUE}.",
                param="metadata",
            )


def window_seconds(window: str) -> int:
    """A completion window in seconds.

    Raises:
        InvalidRequestError: it is none.
    """
    match = re.fullmatch(r"([1-9]\d{0,6})([smhd])", window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= 30 * _UNITS["d"]:
        raise InvalidRequestError(
            f'completion_window must be "24h" or another number of s, m, h or d up to 30d, got '
            f'"{window[:40]}".',
            param="completion_window",
        )
    return seconds


def output_expiry(body: BatchRequest) -> int | None:
    """``output_expires_after`` in seconds.

    Raises:
        InvalidRequestError: it is malformed.
    """
    wanted = body.output_expires_after
    if wanted is None:
        return None
    return expiry_seconds("output_expires_after", wanted.get("anchor"), wanted.get("seconds"))


def expiry_seconds(field: str, anchor: Any, seconds: Any) -> int:
    """An expiration policy in seconds from a file's creation.

    Args:
        field: that the client wrote it in.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if anchor != "created_at":
        raise InvalidRequestError(f'{field}.anchor must be "created_at".', param=f"{field}.anchor")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_EXPIRY <= seconds <= MAX_EXPIRY:
        raise InvalidRequestError(
            f"{field}.seconds must be an integer between {MIN_EXPIRY} and {MAX_EXPIRY}.",
            param=f"{field}.seconds",
        )
    return seconds
