"""Bodies of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamllm.server.protocol import ApiRequest

_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}

_IGNORED = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""``cache_control`` among them: whatever begins alike is cached. ``context_management`` may drop old thinking
and results from long conversations: nothing is dropped, and what does not fit is refused."""


class CountTokensRequest(ApiRequest, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``.

    ``thinking`` with ``type: "disabled"`` sets ``enable_thinking`` to false in the chat template, other types
    to true; its ``budget_tokens`` ends the thinking of a model that marks the end with a token, and does
    nothing elsewhere. ``output_config`` takes ``effort`` and ``format``. Not Anthropic's: ``top_k`` counts
    like the model's other defaults, ``chat_template_kwargs``, ``cache_salt`` and ``priority`` as in
    ``/v1/chat/completions``.
    """

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED
    IGNORED: ClassVar[frozenset[str]] = _IGNORED

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of ``POST /v1/messages``; its other fields are those of ``count_tokens``."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
