"""A response's output items as they come, and the stream events that build them up."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from streamllm.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart

StreamEvent = dict[str, Any]


class ItemWriter:
    """Turns an answer's events into output items, and into events of a stream without sequence numbers.

    Attributes:
        items: those begun so far, as the whole response holds them.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def write(self, events: Iterable[Event], logprobs: list[dict[str, Any]]) -> Iterable[StreamEvent]:
        """The stream events for some of an answer's events.

        Args:
            logprobs: of the tokens behind them; they go with the first piece of text.
        """
        for event in events:
            match event:
                case Content(text):
                    yield from self._begin_part("message", "output_text")
                    part = self.items[-1]["content"][0]
                    part["text"] += text
                    part["logprobs"] += logprobs
                    yield self._part_event("output_text.delta", delta=text, logprobs=logprobs)
                    logprobs = []
                case Reasoning(text):
                    yield from self._begin_part("reasoning", "reasoning_text")
                    self.items[-1]["content"][0]["text"] += text
                    yield self._part_event("reasoning_text.delta", delta=text)
                case ToolCallStart(_, call_id, name):
                    yield from self._begin_item(
                        {
                            "id": _make_id("fc"),
                            "type": "function_call",
                            "status": "in_progress",
                            "call_id": f"call_{call_id.removeprefix('chatcmpl-tool-')}",
                            "name": name,
                            "arguments": "",
                        }
                    )
                case ToolCallArguments(_, text):
                    self.items[-1]["arguments"] += text
                    yield self._item_event("function_call_arguments.delta", delta=text)

    def finish(self, *, is_complete: bool) -> Iterable[StreamEvent]:
        """The stream events at the answer's end; an answer of nothing is a message without text."""
        if not self.items:
            yield from self._begin_part("message", "output_text")
        yield from self._close("completed" if is_complete else "incomplete")

    def _begin_part(self, item_type: str, part_type: str) -> Iterable[StreamEvent]:
        if self._is_open and self.items[-1]["type"] == item_type:
            return
        item: dict[str, Any] = {
            "id": _make_id("msg"),
            "type": item_type,
            "status": "in_progress",
            "content": [],
        }
        part: dict[str, Any] = {"type": part_type, "text": ""}
        if item_type == "message":
            item["role"] = "assistant"
            part |= {"annotations": [], "logprobs": []}
        else:
            item |= {"id": _make_id("rs"), "summary": [], "encrypted_content": None}
        yield from self._begin_item(item)
        item["content"].append(part)
        yield self._part_event("content_part.added", part=_copied(part))

    def _begin_item(self, item: dict[str, Any]) -> Iterable[StreamEvent]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        added = {**item, "content": []} if "content" in item else dict(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": added,
        }

    def _close(self, status: str) -> Iterable[StreamEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("function_call_arguments.done", **arguments)
        else:
            part = item["content"][0]
            details = {"logprobs": list(part["logprobs"])} if item["type"] == "message" else {}
            yield self._part_event(f"{part['type']}.done", text=part["text"], **details)
            yield self._part_event("content_part.done", part=_copied(part))
        done = (
            {**item, "content": [_copied(part) for part in item["content"]]}
            if "content" in item
            else dict(item)
        )
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": done}

    def _item_event(self, event: str, /, **fields: Any) -> StreamEvent:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{event}", **place, **fields}

    def _part_event(self, event: str, /, **fields: Any) -> StreamEvent:
        return self._item_event(event, content_index=0, **fields)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _copied(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
