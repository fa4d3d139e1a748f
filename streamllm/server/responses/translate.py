"""From a Responses request to the chat request that it means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from streamllm.server.protocol import ChatRequest, describe_kind, wrong_value
from streamllm.server.responses.protocol import INCLUDED, InputTokensRequest, ResponsesRequest

Item = dict[str, Any]

_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "structured_outputs",
    "vllm_xargs",
    "thinking_token_budget",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "parallel_tool_calls",
)
"""Fields that mean the same in a chat request."""

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
MAX_METADATA = 16


def input_items(body: InputTokensRequest) -> list[Item]:
    """The request's own items, checked and in their full form.

    Raises:
        InvalidRequestError: one is malformed or of a kind that is not supported; ``param`` is its place.
    """
    if isinstance(body.input, str):
        return [_message("user", [{"type": "input_text", "text": body.input}])]
    return [_checked(item, f"input[{index}]") for index, item in enumerate(body.input)]


def chat_request(body: InputTokensRequest, items: Iterable[Item]) -> ChatRequest:
    """The chat that a body asks for.

    Args:
        items: the whole conversation: earlier turns, then the request's own items.

    Raises:
        InvalidRequestError: something is malformed or cannot be honoured; ``param`` is its place.
    """
    chat = ChatRequest(messages=_messages(body.instructions, items))
    for name in _SAME:
        setattr(chat, name, getattr(body, name, None))
    chat.tools = _tools(body.tools)
    chat.tool_choice = _tool_choice(body.tool_choice)
    chat.reasoning_effort = _effort(body.reasoning)
    chat.response_format = _response_format(body.text)
    if body.truncation not in (None, "auto", "disabled"):
        raise wrong_value("truncation", f'must be "auto" or "disabled", got "{body.truncation[:40]}"')
    if body.truncation == "auto":
        chat.truncate_prompt_tokens = -1
    if isinstance(body, ResponsesRequest):
        _add_output_fields(chat, body)
    return chat


def _add_output_fields(chat: ChatRequest, body: ResponsesRequest) -> None:
    # What is not streamed is collected from the same events.
    chat.stream = True
    chat.max_completion_tokens = body.max_output_tokens
    for index, name in enumerate(body.include or []):
        if name not in INCLUDED:
            raise wrong_value(f"include[{index}]", f'is "{name[:60]}"; there are {" and ".join(INCLUDED)}')
    if INCLUDED[0] in (body.include or []) or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    if len(body.metadata or {}) > MAX_METADATA:
        raise wrong_value(
            "metadata", f"has {len(body.metadata or {})} entries; at most {MAX_METADATA} are allowed"
        )
    if body.background and body.store is False:
        raise wrong_value("background", "needs store to be true")


# -- items -------------------------------------------------------------------------------------------------


def _message(role: str, content: list[dict[str, Any]]) -> Item:
    return {"type": "message", "role": role, "content": content}


def _checked(item: Any, place: str) -> Item:
    if not isinstance(item, dict):
        raise wrong_value(place, f"must be an object, got {describe_kind(item)}")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong_value(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
        part = "output_text" if role == "assistant" else "input_text"
        return {**item, "type": "message", "content": _parts(item.get("content"), f"{place}.content", part)}
    if kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            _check_string(item, name, place)
        return item
    if kind == "function_call_output":
        _check_string(item, "call_id", place)
        if not isinstance(item.get("output"), str):
            _parts(item.get("output"), f"{place}.output", "input_text")
        return item
    if kind == "reasoning":
        _parts(item.get("content") or [], f"{place}.content", "reasoning_text")
        return item
    shown = f'"{kind[:40]}"' if isinstance(kind, str) else describe_kind(kind)
    raise wrong_value(
        f"{place}.type",
        f"is {shown}; there are message, function_call, function_call_output and reasoning",
    )


def _check_string(item: Item, name: str, place: str) -> None:
    if not isinstance(item.get(name), str):
        raise wrong_value(f"{place}.{name}", f"must be a string, got {describe_kind(item.get(name))}")


def _parts(content: Any, place: str, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise wrong_value(place, f"must be a string or a list of parts, got {describe_kind(content)}")
    for index, part in enumerate(content):
        inner = f"{place}[{index}]"
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise wrong_value(
                f"{inner}.type", 'must be "input_text" or "output_text": this model reads text only'
            )
        _check_string(part, "refusal" if part["type"] == "refusal" else "text", inner)
    return content


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", part.get("refusal", "")) for part in content or [])


# -- messages ----------------------------------------------------------------------------------------------


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as a chat's messages: what an assistant thought, said and called in one turn is one message, and
    so are the system's at the beginning."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    for item in items:
        kind = item["type"]
        role = _ROLES[item["role"]] if kind == "message" else ""
        if kind in ("function_call", "reasoning") or role == "assistant":
            if turn is None or (kind == "reasoning" and ("tool_calls" in turn or turn["content"])):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item)
            continue
        turn = None
        if kind == "function_call_output":
            text = _text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif role == "system" and messages and all(each["role"] == "system" for each in messages):
            messages[-1]["content"] += "\n\n" + _text(item["content"])
        else:
            messages.append({"role": role, "content": _text(item["content"])})
    return messages


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        turn["reasoning"] = turn.get("reasoning", "") + _text(item.get("content"))
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        said = _text(item["content"])
        turn["content"] = f"{turn['content']}\n{said}" if turn["content"] else said


# -- tools, reasoning, text --------------------------------------------------------------------------------


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions are flat here: ``{"type": "function", "name", "parameters", ...}``."""
    if tools is None:
        return None
    translated = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            shown = str(tool.get("type"))[:40]
            raise wrong_value(
                f"tools[{index}].type",
                f'must be "function", got "{shown}"; other kinds of tools do not run here',
            )
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        translated.append({"type": "function", "function": function})
    return translated


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    """``summary`` asks for what is not made: reasoning is shown as it is."""
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong_value("reasoning.effort", f"must be a string, got {describe_kind(effort)}")
    return effort


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """``verbosity`` changes nothing."""
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise wrong_value("text.format", f"must be an object, got {describe_kind(wanted)}")
    if wanted.get("type") != "json_schema":
        return wanted
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
