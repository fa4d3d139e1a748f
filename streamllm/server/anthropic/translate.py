"""From the Messages API's request to the chat request that it means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from streamllm.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from streamllm.server.protocol import ChatRequest, describe_kind, wrong_value

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The chat that a body asks for.

    Raises:
        InvalidRequestError: what it holds is malformed or cannot be honoured; ``param`` is its place.
    """
    tool_choice, parallel = _tool_choice(body.tool_choice)
    messages = list(_messages(body))
    prefilled = bool(body.messages) and messages[-1]["role"] == "assistant"
    kwargs = dict(body.chat_template_kwargs or {})
    budget = _thinking(body.thinking, kwargs)
    effort, response_format = _output_config(body)
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        tools=_tools(body.tools),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=kwargs,
        reasoning_effort=effort,
        response_format=response_format,
        thinking_token_budget=budget,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
    )
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stream = body.stream
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.cache_salt, chat.priority = body.cache_salt, body.priority
    return chat


# -- messages ----------------------------------------------------------------------------------------------


def _messages(body: CountTokensRequest) -> Iterable[dict[str, Any]]:
    if not body.messages:
        raise wrong_value("messages", "must hold at least one message")
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system")}
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield _assistant(content, f"{place}.content")
        elif role == "user":
            yield from _user(content, f"{place}.content")
        elif role == "system":
            yield {"role": "system", "content": _text(content, f"{place}.content")}
        else:
            raise wrong_value(f"{place}.role", 'must be "user", "assistant" or "system"')


def _blocks(content: Any, place: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """Type, block and place of each; a string is one block of text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_value(place, f"must be a string or a list of blocks, got {describe_kind(content)}")
    blocks = []
    for index, block in enumerate(content):
        inner = f"{place}[{index}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise wrong_value(inner, "must be an object with a type")
        blocks.append((block["type"], block, inner))
    return blocks


def _text(content: Any, place: str) -> str:
    """The text of blocks that may be nothing else."""
    pieces = []
    for kind, block, inner in _blocks(content, place):
        if kind != "text":
            raise wrong_value(f"{inner}.type", f'is "{kind[:40]}"; only "text" can be read here')
        pieces.append(_string(block, "text", inner))
    return "\n".join(pieces)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong_value(f"{place}.{name}", f"must be a string, got {describe_kind(value)}")
    return value


def _user(content: Any, place: str) -> Iterable[dict[str, Any]]:
    """Results of tools first, as a conversation in OpenAI's form has them, then what the user says."""
    texts = []
    for kind, block, inner in _blocks(content, place):
        if kind == "text":
            texts.append(_string(block, "text", inner))
        elif kind == "tool_result":
            result = _result(block, inner)
            yield {"role": "tool", "tool_call_id": _string(block, "tool_use_id", inner), "content": result}
        else:
            raise wrong_value(
                f"{inner}.type", f'is "{kind[:40]}"; this model reads "text" and "tool_result" of a user'
            )
    if texts or not content:
        yield {"role": "user", "content": "\n".join(texts)}


def _result(block: Mapping[str, Any], place: str) -> str:
    content = block.get("content")
    text = "" if content is None else _text(content, f"{place}.content")
    return f"Error: {text}" if block.get("is_error") is True else text


def _assistant(content: Any, place: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for kind, block, inner in _blocks(content, place):
        if kind == "text":
            texts.append(_string(block, "text", inner))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", inner))
        elif kind == "tool_use":
            calls.append(_call(block, inner))
        elif kind != "redacted_thinking":
            raise wrong_value(
                f"{inner}.type",
                f'is "{kind[:40]}"; this model reads "text", "thinking" and "tool_use" of an assistant',
            )
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong_value(f"{place}.input", f"must be an object, got {describe_kind(arguments)}")
    function = {"name": _string(block, "name", place), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _string(block, "id", place), "type": "function", "function": function}


# -- tools, thinking, output -------------------------------------------------------------------------------


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    translated = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            shown = str(tool["type"])[:40]
            raise wrong_value(
                f"tools[{index}].type", f'is "{shown}"; tools that run on the server do not exist here'
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        translated.append({"type": "function", "function": function})
    return translated


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """OpenAI's ``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    disabled = choice.get("disable_parallel_tool_use")
    if disabled is not None and not isinstance(disabled, bool):
        raise wrong_value("tool_choice.disable_parallel_tool_use", "must be true or false")
    parallel = None if disabled is None else not disabled
    kind = choice.get("type")
    if kind == "tool":
        name = _string(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    if kind not in _MODES:
        raise wrong_value("tool_choice.type", 'must be "auto", "any", "tool" or "none"')
    return _MODES[kind], parallel


def _thinking(thinking: dict[str, Any] | None, kwargs: dict[str, Any]) -> int | None:
    """Its budget; whether it is wanted goes to the template's variables."""
    if thinking is None:
        return None
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise wrong_value("thinking.type", 'must be "enabled", "disabled" or "adaptive"')
    kwargs.setdefault("enable_thinking", kind != "disabled")
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise wrong_value("thinking.budget_tokens", "must be a positive integer")
    return budget if kind == "enabled" else None


def _output_config(body: CountTokensRequest) -> tuple[str | None, dict[str, Any] | None]:
    """OpenAI's ``reasoning_effort`` and ``response_format``."""
    config = body.output_config or {}
    for name in config:
        if name not in ("effort", "format"):
            raise wrong_value(f"output_config.{name[:40]}", "is not supported; there are effort and format")
    effort = config.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong_value("output_config.effort", f"must be a string, got {describe_kind(effort)}")
    wanted, place = config.get("format"), "output_config.format"
    if body.output_format is not None:
        wanted, place = body.output_format, "output_format"
    if wanted is None:
        return effort, None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise wrong_value(place, 'must be an object with the type "json_schema" and a schema')
    return effort, {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}
