"""The tools that a chat request offers the model (OpenAI's ``tools``, ``tool_choice`` and
``parallel_tool_calls``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from streamllm.parsers.tools import Tool
from streamllm.server.protocol import ChatRequest, describe_kind, wrong_value

MAX_TOOLS = 512
MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[a-zA-Z0-9_.\-]+")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools.

    Attributes:
        functions: those that may be called.
        mode: whether the model calls none of them, may, or must.
        named: it must call the only one, which the request names.
        parallel: an answer may hold several calls.
    """

    functions: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    named: bool = False
    parallel: bool = True

    @property
    def may_call(self) -> bool:
        return bool(self.functions) and self.mode != "none"

    @property
    def must_call(self) -> bool:
        return self.mode == "required"

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar decides what calls look like."""
        return self.must_call or (self.may_call and any(function.strict for function in self.functions))


def read_tools(request: ChatRequest) -> ToolUse:
    """What a request says about tools, checked.

    Raises:
        InvalidRequestError: a malformed, repeated or unknown tool, or a choice that needs tools without any;
            ``param`` is its place, such as ``tools[1].function.name``.
    """
    functions = read_functions(request.tools or [])
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if functions else "none"
    if isinstance(choice, str):
        if choice not in _MODES:
            raise wrong_value(
                "tool_choice", f'must be "none", "auto", "required" or an object, got "{choice[:40]}"'
            )
        _check_there_are_tools(functions, choice)
        return ToolUse(tuple(functions.values()), choice, parallel=parallel)  # type: ignore[arg-type]
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, functions, parallel)
    function = _known(choice, functions, "tool_choice")
    return ToolUse((function,), "required", named=True, parallel=parallel)


def read_functions(tools: list[dict[str, Any]]) -> dict[str, Tool]:
    """The functions among a request's tools by name.

    Raises:
        InvalidRequestError: one is malformed or repeated.
    """
    if len(tools) > MAX_TOOLS:
        raise wrong_value("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    functions: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = _function(tool, place)
        if function.name in functions:
            raise wrong_value(
                f"{place}.function.name", f'repeats "{function.name}"; every tool needs its own name'
            )
        functions[function.name] = function
    return functions


def _function(tool: dict[str, Any], place: str) -> Tool:
    if tool.get("type", "function") != "function":
        shown = str(tool["type"])[:40]
        raise wrong_value(
            f"{place}.type", f'must be "function", got "{shown}"; other kinds of tools do not run here'
        )
    declared = tool.get("function")
    place = f"{place}.function"
    if not isinstance(declared, dict):
        raise wrong_value(place, f"must be an object, got {describe_kind(declared)}")
    name = declared.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise wrong_value(
            f"{place}.name",
            f"must be 1 to {MAX_NAME_LENGTH} letters, digits, underscores, dashes or dots",
        )
    description = declared.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong_value(f"{place}.description", f"must be a string, got {describe_kind(description)}")
    strict = declared.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_value(f"{place}.strict", f"must be true or false, got {describe_kind(strict)}")
    parameters = _parameters(declared.get("parameters"), f"{place}.parameters")
    return Tool(name, parameters, bool(strict))


def _parameters(schema: Any, place: str) -> dict[str, Any]:
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise wrong_value(place, f"must be a JSON schema, got {describe_kind(schema)}")
    if schema.get("type", "object") != "object":
        raise wrong_value(f"{place}.type", 'must be "object": arguments have names')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise wrong_value(f"{place}.properties", f"must be an object, got {describe_kind(properties)}")
    return {"type": "object", **schema}


def _allowed_tools(choice: dict[str, Any], functions: dict[str, Tool], parallel: bool) -> ToolUse:
    """OpenAI's way to offer all tools in the prompt and to allow some of them."""
    allowed = choice.get("allowed_tools", choice)
    place = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise wrong_value(
            place, 'must hold a mode ("auto" or "required") and tools (a list of some of the tools)'
        )
    chosen = [_known(tool, functions, f"{place}.tools[{index}]") for index, tool in enumerate(tools)]
    return ToolUse(tuple({function.name: function for function in chosen}.values()), mode, parallel=parallel)


def _known(choice: Any, functions: dict[str, Tool], place: str) -> Tool:
    """The function that ``{"type": "function", "function": {"name"}}`` names (Responses: without the inner
    object)."""
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        raise wrong_value(place, 'must be an object with the type "function" and a function\'s name')
    if not isinstance(name, str):
        raise wrong_value(place, "must name a function")
    if name not in functions:
        known = ", ".join(functions) or "none at all"
        raise wrong_value(
            f"{place}.function.name", f'is "{name[:100]}", which is not among the tools: {known}'
        )
    return functions[name]


def _check_there_are_tools(functions: dict[str, Tool], choice: str) -> None:
    if choice == "required" and not functions:
        raise wrong_value("tool_choice", '"required" needs tools, and there are none')
