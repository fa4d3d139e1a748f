"""Bodies of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from streamllm.server.protocol import ApiRequest

_REFUSED: dict[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "previous_input_messages": ([],),
    "prompt": (),
}

_IGNORED = frozenset(
    {
        "access_programs",
        "background_options",
        "max_tool_calls",
        "personality",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
"""``max_tool_calls`` counts calls of OpenAI's own tools, which do not exist here."""

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
"""What ``include`` may ask for; reasoning is text here, and always part of the answer."""


class InputTokensRequest(ApiRequest, kw_only=True):
    """Body of ``POST /v1/responses/input_tokens``.

    ``input`` is text, or a list of messages, ``function_call``, ``function_call_output`` and ``reasoning``
    items. With ``previous_response_id`` the earlier turns come first.
    """

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED
    IGNORED: ClassVar[frozenset[str]] = _IGNORED

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """Body of ``POST /v1/responses``; its other fields are those of ``input_tokens``.

    A response is kept for ``previous_response_id`` and for retrieval unless ``store`` is false. With
    ``background`` it is answered at once and goes on by itself. ``truncation: "auto"`` drops the beginning of
    a prompt that is too long. Not OpenAI's: the fields from ``top_k`` on, as in ``/v1/chat/completions``.
    """

    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
