"""Stream chunks as bytes: what repeats is serialised once a stream, so a token costs one small dump."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from streamllm.outputs import CompletionOutput
from streamllm.server.generation import ResponseHead, Usage, merged
from streamllm.server.logprobs import Entries
from streamllm.server.protocol import StreamOptions
from streamllm.server.sse import frame

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream


@dataclass(slots=True)
class ChoiceProgress:
    """One choice of a stream.

    Attributes:
        begun: its first chunk has been sent.
        entries: logprobs of tokens whose text has not come yet.
        text_offset: characters sent so far.
    """

    begun: bool = False
    entries: Entries = field(default_factory=list)
    text_offset: int = 0


FormatLogprobs = Callable[[Entries, CompletionOutput, ChoiceProgress], dict[str, Any]]


class ChunkWriter:
    """Writes one response's chunks.

    Args:
        head: id, time and model of the response.
        object_name: ``"chat.completion.chunk"`` or ``"text_completion"``.
        text_field: JSON text around a chunk's text: ``(b'"delta":{"content":', b'}')``.
        empty_text: what stands for no text in a choice's last chunk.
        first_text: choice's number -> what its first chunk holds ahead of any token: bytes of
            the text field, or ``None`` for no such chunk.
        format_logprobs: ``None`` where none were asked for.
        options: the request's ``stream_options``.
    """

    def __init__(
        self,
        head: ResponseHead,
        *,
        object_name: str,
        text_field: tuple[bytes, bytes],
        empty_text: bytes,
        first_text: Callable[[int], bytes | None],
        format_logprobs: FormatLogprobs | None,
        options: StreamOptions | None,
    ) -> None:
        self._head = head.body(object_name)
        self._start = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        self._open_text, self._close_text = text_field
        self._empty_text = empty_text
        self._first_text = first_text
        self._format_logprobs = format_logprobs
        self._sends_usage = options is not None and bool(options.include_usage)
        self._sends_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._end = b'}],"usage":null}\n\n' if self._sends_usage else b"}]}\n\n"

    async def frames(self, streams: Sequence[RequestStream], n: int) -> AsyncGenerator[bytes, None]:
        """The whole response but ``[DONE]``; what is ready at one time goes out as one piece."""
        usage = Usage(streams)
        progress = [ChoiceProgress() for _ in range(len(streams) * n)]
        async with aclosing(merged(streams)) as outputs:
            async for index, output in outputs:
                usage.add(output)
                end = self._end_with(usage)
                data = b"".join(
                    self._choice(index * n + choice.index, choice, progress[index * n + choice.index], end)
                    for choice in output.outputs
                )
                if data:
                    yield data
        if self._sends_usage:
            yield frame({**self._head, "choices": [], "usage": usage.body()})

    def _end_with(self, usage: Usage) -> bytes:
        if not self._sends_running_usage:
            return self._end
        return b'}],"usage":' + orjson.dumps(usage.body()) + b"}\n\n"

    def _choice(self, index: int, output: CompletionOutput, progress: ChoiceProgress, end: bytes) -> bytes:
        """Frames of one choice's news: none while its tokens are not text yet."""
        first = b""
        if not progress.begun:
            progress.begun = True
            text = self._first_text(index)
            if text is not None:
                first = self._start + b"%d," % index + text + b',"logprobs":null,"finish_reason":null' + end
        if output.logprobs:
            progress.entries.extend(output.logprobs)
        if not output.text and output.finish_reason is None:
            return first
        text = self._empty_text
        if output.text:
            text = self._open_text + orjson.dumps(output.text) + self._close_text
        logprobs = b"null"
        if self._format_logprobs is not None:
            logprobs = orjson.dumps(self._format_logprobs(progress.entries, output, progress))
            progress.entries = []
        finish = b"null"
        if output.finish_reason is not None:
            finish = b'"%s","stop_reason":' % output.finish_reason.encode() + orjson.dumps(output.stop_reason)
        return (
            first
            + self._start
            + b"%d," % index
            + text
            + b',"logprobs":'
            + logprobs
            + b',"finish_reason":'
            + finish
            + end
        )
