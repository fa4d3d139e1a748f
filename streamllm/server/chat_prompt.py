"""A chat request's conversation as the prompt that the model reads."""

from __future__ import annotations

from typing import Any, Protocol

from streamllm.errors import InvalidRequestError
from streamllm.server.generation import ServerState, in_field
from streamllm.text.chat_renderer import Rendered


class ConversationFields(Protocol):
    """What a body says about how its conversation is rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def chat_prompt(
    server: ServerState, body: ConversationFields, messages: list[dict[str, Any]]
) -> Rendered:
    """The prompt's text and token ids.

    Raises:
        InvalidRequestError: as :meth:`ChatRenderer.render`; contradicting fields; a ``chat_template`` that
            the server does not take from requests.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    if body.chat_template is not None and not server.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is not taken from requests; start the server with --trust-request-chat-template, "
            "or leave it out.",
            param="chat_template",
        )
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    hides_tools = getattr(body, "tool_choice", None) == "none"
    hides_tools = hides_tools and server.config.exclude_tools_when_tool_choice_none
    try:
        return await server.renderer.render(
            messages,
            add_generation_prompt=adds,
            continue_final_message=continues,
            chat_template=body.chat_template,
            chat_template_kwargs=_template_kwargs(body),
            tools=None if hides_tools else body.tools,
            prompt_may_be_cut=getattr(body, "truncate_prompt_tokens", None) is not None,
        )
    except RecursionError:
        raise InvalidRequestError("messages are nested too deeply.", param="messages") from None
    except InvalidRequestError as error:
        raise in_field(error, "messages") from None


def _template_kwargs(body: ConversationFields) -> dict[str, Any]:
    """The request's variables for the template, its effort among them under the names that templates read."""
    kwargs = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise InvalidRequestError(
            f'reasoning_effort must be one of {", ".join(EFFORTS)}, got "{str(effort)[:40]}".',
            param="reasoning_effort",
        )
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}
