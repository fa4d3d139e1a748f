"""A response on its way: from the engine's stream to the events that a client sees."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamllm.outputs import CompletionOutput, RequestOutput
from streamllm.parsers.events import Event, Reasoning
from streamllm.sampling_params import SamplingParams
from streamllm.server.conversation import Conversation
from streamllm.server.errors import body_of_failure
from streamllm.server.generation import abort_all, merged
from streamllm.server.logprobs import Entries, LogprobFormatter
from streamllm.server.responses.output_items import ItemWriter, StreamEvent
from streamllm.server.responses.protocol import ResponsesRequest

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream


def new_response(body: ResponsesRequest, conversation: Conversation, model: str) -> dict[str, Any]:
    """A response before anything has been generated, as clients see it."""
    params = conversation.params
    assert isinstance(params, SamplingParams)
    text = body.text or {}
    reasoning = body.reasoning or {}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


@dataclass(slots=True)
class _Usage:
    """Tokens of one response; those that only made reasoning count as such."""

    input_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    undecided: int = 0

    def add(self, output: RequestOutput, choice: CompletionOutput, events: Sequence[Event]) -> None:
        self.cached_tokens = output.num_cached_tokens
        self.output_tokens += len(choice.token_ids)
        self.undecided += len(choice.token_ids)
        if events:
            if all(isinstance(event, Reasoning) for event in events):
                self.reasoning_tokens += self.undecided
            self.undecided = 0

    def body(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class ResponseRun:
    """
    Args:
        response: as :func:`new_response` makes it; kept up to date.
        streams: the engine's; one, of deltas.
        formatter: of logprobs, if they were asked for.

    Attributes:
        response: see above.
        num_events: events made so far.
    """

    def __init__(
        self,
        response: dict[str, Any],
        conversation: Conversation,
        streams: Sequence[RequestStream],
        formatter: LogprobFormatter | None,
    ) -> None:
        self.response = response
        self._reader = conversation.make_reader()
        self._streams = streams
        self._formatter = formatter
        self._writer = ItemWriter()
        self._usage = _Usage(len(conversation.prompt.token_ids))
        self._entries: Entries = []
        self.num_events = 0

    def abort(self) -> None:
        abort_all(self._streams)

    def cancelled(self) -> None:
        """Say that a client has cancelled it."""
        self._end("cancelled", is_complete=False)

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """Everything that a stream shows, what comes at one time together; at the end the response is
        finished, whatever happened.

        Raises:
            GeneratorExit, CancelledError: nobody wants it any more.
        """
        queued = self.response["status"] == "queued"
        yield self._numbered([self._state("created"), *([self._state("queued")] if queued else [])])
        self.response["status"] = "in_progress"
        yield self._numbered([self._state("in_progress")])
        try:
            async with aclosing(merged(self._streams)) as outputs:
                async for _, output in outputs:
                    if news := self._read(output):
                        yield self._numbered(news)
        except Exception as error:
            yield self._numbered(self._fail(error))
        finally:
            self.abort()

    def _read(self, output: RequestOutput) -> list[StreamEvent]:
        (choice,) = output.outputs
        events = self._reader.read(choice)
        self._usage.add(output, choice, events)
        logprobs: list[dict[str, Any]] = []
        if self._formatter is not None:
            self._entries += choice.logprobs or []
            if events:
                logprobs, self._entries = self._formatter.chat(self._entries, choice)["content"], []
        news = list(self._writer.write(events, logprobs))
        self.response["output"] = self._writer.items
        if choice.finish_reason is None:
            return news
        if choice.finish_reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*news, *self._end("incomplete", is_complete=False)]
        return [*news, *self._end("completed", is_complete=True)]

    def _fail(self, error: Exception) -> list[StreamEvent]:
        details = body_of_failure(error)[1]["error"]
        self.response["error"] = {"code": "server_error", "message": details["message"]}
        return self._end("failed", is_complete=False)

    def _end(self, status: str, *, is_complete: bool) -> list[StreamEvent]:
        events = list(self._writer.finish(is_complete=is_complete)) if status != "failed" else []
        self.response["output"] = self._writer.items
        self.response |= {"status": status, "usage": self._usage.body()}
        if is_complete:
            self.response["completed_at"] = int(time.time())
        return [*events, self._state(status)]

    def _state(self, name: str) -> StreamEvent:
        """The response as it is now; its output only when nothing is added to it any more."""
        finished = name in ("completed", "incomplete", "failed", "cancelled")
        return {
            "type": f"response.{name}",
            "response": {**self.response, **({} if finished else {"output": []})},
        }

    def _numbered(self, events: list[StreamEvent]) -> list[StreamEvent]:
        for event in events:
            event["sequence_number"] = self.num_events
            self.num_events += 1
        return events
