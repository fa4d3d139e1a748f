"""Tools for models whose chat template knows none: as text, in the notation of Hermes models.

The system message says what there is and how to call it, earlier calls stand in the assistant's messages as
the model would have written them, and results come as the user's
(https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B describes the notation).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """\
You can call the functions described between <tools> and </tools>. To call one, write its name and its \
arguments as a JSON object between <tool_call> and </tool_call>; to call several, write one after the other. \
Results come back between <tool_response> and </tool_response>.
<tools>
{tools}
</tools>
A call looks like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def tools_as_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its tools, calls and results as text. Malformed messages are left to whoever
    checks them.

    Args:
        messages: OpenAI's chat messages; those without calls or results stay what they are.
        tools: ``{"type": "function", "function": {...}}`` each.
    """
    if not isinstance(messages, (list, tuple)) or not (tools or any(map(_has_calls, messages))):
        return messages
    written = list(_written(messages))
    if not tools:
        return written
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=shown)
    first = written[0] if written else {}
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        return [{**first, "content": _joined(first.get("content"), instructions)}, *written[1:]]
    return [{"role": "system", "content": instructions}, *written]


def _has_calls(message: Any) -> bool:
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def _written(messages: Iterable[Any]) -> Iterable[Any]:
    """Each message; results that follow each other become one, since many templates want turns to
    alternate."""
    results: list[str] = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "tool":
            results.append(f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), (list, tuple)):
            yield _with_calls(message)
        else:
            yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_call(call) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), "\n".join(calls))} if calls else rest


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        function = {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # One cut off by a length limit stays text.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    shown = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{shown}\n</tool_call>"


def _joined(content: Any, addition: str) -> Any:
    """Content with a text behind it, in whatever form it came."""
    if isinstance(content, (list, tuple)):
        return [*content, {"type": "text", "text": addition}]
    return f"{content}\n\n{addition}" if content else addition


def _text(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        parts = [part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content]
        return "\n".join(map(str, parts))
    return "" if content is None else str(content)
