"""Stream chunks of answers whose text is read: reasoning, content and tool calls as deltas of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from streamllm.outputs import CompletionOutput
from streamllm.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from streamllm.server.chunks import ChoiceProgress, ChunkWriter
from streamllm.server.conversation import AnswerReader


class ConversationChunks(ChunkWriter):
    """Writes the chunks of a chat whose answers are read.

    Args:
        make_reader: makes what reads one choice's text.
        options: as :class:`ChunkWriter` takes them.
    """

    def __init__(self, *args: Any, make_reader: Callable[[], AnswerReader], **options: Any) -> None:
        super().__init__(*args, **options)
        # No token's text is known to be content before it has been read.
        self._is_plain = False
        self._make_reader = make_reader
        self._readers: dict[int, AnswerReader] = {}

    def _choice(
        self, output: CompletionOutput, progress: ChoiceProgress, prompt_token_ids: list[int], end: bytes
    ) -> bytes:
        number, first, prompt_ids = progress.number, b"", b""
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = self._make_reader()
        if self._token_ids is not None:
            progress.token_ids.extend(output.token_ids)
            if not progress.begun:
                prompt_ids = b',"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
        if output.logprobs:
            progress.entries.extend(output.logprobs)
        if not progress.begun:
            progress.begun = True
            role = b'"delta":{"role":"assistant","content":null},"logprobs":null,"finish_reason":null'
            first = self._frame(number, role, prompt_ids, end)
        deltas = list(_deltas(reader.read(output)))
        finished = output.finish_reason is not None
        if finished:
            # Content is null only in an answer that consists of calls.
            deltas.append({} if reader.has_content_or_calls else {"content": ""})
        if not deltas:
            return first
        pieces = [b'"delta":' + orjson.dumps(delta) for delta in deltas]
        # What belongs to tokens rather than to parts of the text goes with the first of them.
        details = [b',"logprobs":null'] * len(pieces)
        if self._format_logprobs is not None:
            formatted = self._format_logprobs(progress.entries, output, progress)
            details[0], progress.entries = b',"logprobs":' + orjson.dumps(formatted), []
        endings = [b',"finish_reason":null'] * len(pieces)
        if finished:
            endings[-1] = b',"finish_reason":"%s","stop_reason":' % reader.finish_reason(output).encode()
            endings[-1] += orjson.dumps(output.stop_reason)
        if self._token_ids is not None:
            endings[0] += b',"token_ids":' + orjson.dumps(progress.token_ids)
            progress.token_ids = []
        frames = [
            self._frame(number, piece + detail + ending, b"", end)
            for piece, detail, ending in zip(pieces, details, endings, strict=True)
        ]
        return first + b"".join(frames)


def _deltas(events: Iterable[Event]) -> Iterable[dict[str, Any]]:
    for event in events:
        if isinstance(event, Content):
            yield {"content": event.text}
        elif isinstance(event, Reasoning):
            yield {"reasoning": event.text, "reasoning_content": event.text}
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            yield {"tool_calls": [call]}
        elif isinstance(event, ToolCallArguments):
            yield {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
