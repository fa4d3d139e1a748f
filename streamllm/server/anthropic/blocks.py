"""A message's content blocks as they come: thinking, text and tool use."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from streamllm.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart

SIGNATURE = "c3RyZWFtbGxt"
"""Clients hand a thinking block's signature back; there is nothing in it to check."""


class BlockWriter:
    """Turns an answer's events into content blocks, and into the stream events that build them up.

    Attributes:
        blocks: those begun so far, as the whole message holds them. A tool's ``input`` is an object when its
            block has been closed.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        self._is_open = False

    def write(self, events: Iterable[Event]) -> Iterable[dict[str, Any]]:
        """The stream events for some of an answer's events."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._add("text", text, {"type": "text", "text": ""}, "text_delta")
                case Reasoning(text):
                    empty = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._add("thinking", text, empty, "thinking_delta")
                case ToolCallStart(_, call_id, name):
                    own_id = f"toolu_{call_id.removeprefix('chatcmpl-tool-')}"
                    block = {"type": "tool_use", "id": own_id, "name": name, "input": {}}
                    yield from self._begin(block)
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterable[dict[str, Any]]:
        """The stream events that end the block that is open."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        elif block["type"] == "tool_use":
            block["input"] = _parsed("".join(self._arguments))
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add(self, kind: str, text: str, empty: dict[str, Any], delta: str) -> Iterable[dict[str, Any]]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._begin(empty)
        self.blocks[-1][kind] += text
        yield self._delta({"type": delta, kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self.close()
        self.blocks.append(block)
        self._arguments, self._is_open = [], True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _parsed(arguments: str) -> Any:
    """The object in the arguments' text; of arguments that were cut off, what there is under a name of its
    own, since the API has no text here."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"__partial_json": arguments}
