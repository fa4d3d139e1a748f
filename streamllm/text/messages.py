"""A client's chat messages, brought into the one shape that chat templates handle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.text.chat_template import RESERVED_VARIABLES, ChatTemplate

# The part types that hold text, and the key it is under.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def normalise_messages(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages as the template is to see them; the client's own are left untouched.

    - Keys whose value is null are dropped, and so is an empty ``tool_calls``: the same as absent.
    - Absent content is the empty string.
    - A list of parts is joined by newlines for a template that takes strings. A template that loops over
      parts gets them as they are, and a plain string as one text part unless it takes strings too.
    - The arguments of a tool call, JSON text in OpenAI's form, become the object that templates print.
    - ``reasoning`` is also given as ``reasoning_content``, the name that templates read.

    Args:
        messages: OpenAI's chat messages.
        template: decides about content parts.

    Raises:
        InvalidRequestError: a message of the wrong shape, or a content part that is not text; ``param`` is
            its place, such as ``messages[1].content[0].type``.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of messages.", param="messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [
        _normalise_message(message, template, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's ``chat_template_kwargs``, fit to be passed on to :meth:`ChatTemplate.render`.

    Raises:
        InvalidRequestError: a key that has a field of its own.
    """
    for name in kwargs or ():
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name}.", param=f"chat_template_kwargs.{name}"
            )
    return dict(kwargs or {})


def _normalise_message(message: Any, template: ChatTemplate, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{place} must be an object with role and content.", param=place)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{place}.role must be a non-empty string.", param=f"{place}.role")
    normal = {name: value for name, value in message.items() if value is not None}
    normal["content"] = _normalise_content(message.get("content"), template, f"{place}.content")
    if "tool_calls" in normal:
        tool_calls = _normalise_tool_calls(normal.pop("tool_calls"), f"{place}.tool_calls")
        if tool_calls:
            normal["tool_calls"] = tool_calls
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal["reasoning"])
    return normal


def _normalise_content(content: Any, template: ChatTemplate, place: str) -> str | list[dict[str, Any]]:
    format = template.content_format
    if content is None:
        return ""
    if isinstance(content, str):
        return content if format.string else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(f"{place} must be a string, null or a list of content parts.", param=place)
    parts = [_normalise_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
    return parts if format.parts else "\n".join(part["text"] for part in parts)


def _normalise_part(part: Any, place: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{place} must be an object with type and text.", param=place)
    key = _TEXT_PARTS.get(part["type"]) if isinstance(part.get("type"), str) else None
    if key is None:
        raise InvalidRequestError(
            f"{place}.type is {json.dumps(part.get('type'), default=str)[:40]}; this model reads text only, "
            'so that it must be "text".',
            param=f"{place}.type",
        )
    if not isinstance(part.get(key), str):
        raise InvalidRequestError(f"{place}.{key} must be a string.", param=f"{place}.{key}")
    return {**part, "type": "text", "text": part[key]}


def _normalise_tool_calls(tool_calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, (str, bytes)):
        raise InvalidRequestError(f"{place} must be a list of tool calls.", param=place)
    return [_normalise_tool_call(call, f"{place}[{index}]") for index, call in enumerate(tool_calls)]


def _normalise_tool_call(call: Any, place: str) -> dict[str, Any]:
    """A call cut off by a length limit has arguments that do not parse: they stay text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{place} must be an object with a function.", param=place)
    place = f"{place}.function"
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError(f"{place}.name must be a non-empty string.", param=f"{place}.name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, Mapping)):
        raise InvalidRequestError(
            f"{place}.arguments must be an object, as JSON text.", param=f"{place}.arguments"
        )
    if not isinstance(arguments, Mapping):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
