"""Stream chunks as bytes: what repeats is serialised once a stream, so a token costs one small dump."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from streamllm.outputs import CompletionOutput, RequestOutput
from streamllm.server.generation import ResponseHead, Usage, merged, unaborted
from streamllm.server.logprobs import Entries, PromptEntries, TextOffsets
from streamllm.server.protocol import StreamOptions
from streamllm.server.sse import Write, frame

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream


@dataclass(slots=True)
class ChoiceProgress:
    """One choice of a stream.

    Attributes:
        number: among the response's choices.
        begun: its first chunk has been sent.
        entries: logprobs of tokens whose text has not come yet.
        token_ids: these tokens.
        offsets: where the next token's text begins.
    """

    number: int
    begun: bool = False
    entries: Entries = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offsets: TextOffsets = field(default_factory=TextOffsets)


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """What a choice's first chunk holds ahead of any token.

    Attributes:
        text: JSON of the text field.
        logprobs: JSON of the logprobs.
        num_characters: length of the text, where offsets into it are given.
    """

    text: bytes
    logprobs: bytes = b"null"
    num_characters: int = 0


FormatLogprobs = Callable[[Entries, CompletionOutput, ChoiceProgress], dict[str, Any]]


class ChunkWriter:
    """Writes one response's chunks.

    Args:
        head: id, time and model of the response.
        object_name: ``"chat.completion.chunk"`` or ``"text_completion"``.
        text_field: JSON text around a chunk's text: ``(b'"delta":{"content":', b'}')``.
        empty_text: what stands for no text in a choice's last chunk.
        first_chunk: choice's number -> its first chunk; ``None``, or giving ``None``, for no such chunk.
        format_logprobs: ``None`` where none were asked for.
        options: the request's ``stream_options``.
        extras: what the chunk with the usage holds besides.
        token_ids: send the answer's ids with each chunk, and the prompt's once: in its ``"choice"`` or in
            the ``"chunk"``. ``None``: do not.
        take_prompt: called with a prompt's number and its logprobs before any chunk of its choices.
    """

    def __init__(
        self,
        head: ResponseHead,
        *,
        object_name: str,
        text_field: tuple[bytes, bytes],
        empty_text: bytes,
        first_chunk: Callable[[int], FirstChunk | None] | None,
        format_logprobs: FormatLogprobs | None,
        options: StreamOptions | None,
        extras: Callable[[], dict[str, Any]] = dict,
        token_ids: Literal["choice", "chunk"] | None = None,
        take_prompt: Callable[[int, PromptEntries], Awaitable[None]] | None = None,
    ) -> None:
        self._head = head.body(object_name)
        self._start = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        self._open_text, self._close_text = text_field
        self._empty_text = empty_text
        self._first_chunk = first_chunk
        self._format_logprobs = format_logprobs
        self._extras = extras
        self._sends_usage = options is not None and bool(options.include_usage)
        self._sends_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._token_ids = token_ids
        self._take_prompt = take_prompt
        self._counts = self._sends_usage or self._sends_running_usage
        self._is_plain = format_logprobs is None and token_ids is None
        self._rest = self._close_text + b',"logprobs":null,"finish_reason":null}]'
        self._end = b',"usage":null}\n\n' if self._sends_usage else b"}\n\n"

    async def frames(
        self, streams: Sequence[RequestStream], n: int, write: Write
    ) -> AsyncGenerator[bytes, None]:
        """The whole response but ``[DONE]``; what is ready at one time goes out as one piece.

        Args:
            write: writes a piece at once, or refuses it. While the generator waits for its only stream, plain
                tokens go that way, without waking it.
        """
        usage = Usage(streams)
        progress = [ChoiceProgress(number) for number in range(len(streams) * n)]
        if len(streams) == 1:
            # Without the generator that merges: one more would cost as much as writing a token's chunk.
            (stream,) = streams
            if self._is_plain and not self._sends_running_usage:
                stream.set_shortcut(lambda delta: self._write_plain(delta, progress, usage, write))
            try:
                async for output in stream:
                    if output.prompt_logprobs is not None:
                        await self._prompt_came(0, output.prompt_logprobs)
                    if data := self._pieces(progress, unaborted(output), usage):
                        yield data
            finally:
                stream.set_shortcut(None)
        else:
            async with aclosing(merged(streams)) as outputs:
                async for index, output in outputs:
                    if output.prompt_logprobs is not None:
                        await self._prompt_came(index, output.prompt_logprobs)
                    if data := self._pieces(progress[index * n : (index + 1) * n], output, usage):
                        yield data
        if self._sends_usage:
            yield frame({**self._head, "choices": [], "usage": usage.body(), **self._extras()})

    def _write_plain(
        self, delta: CompletionOutput, progress: Sequence[ChoiceProgress], usage: Usage, write: Write
    ) -> bool:
        """Write a choice's news if they are text and nothing else."""
        choice = progress[delta.index]
        if not choice.begun or not delta.text or delta.finish_reason is not None:
            return False
        if not write(self._plain_frame(choice.number, delta.text, self._end)):
            return False
        usage.add_tokens(len(delta.token_ids))
        return True

    def _plain_frame(self, number: int, text: str, end: bytes) -> bytes:
        return self._start + b"%d," % number + self._open_text + orjson.dumps(text) + self._rest + end

    async def _prompt_came(self, index: int, logprobs: PromptEntries) -> None:
        if self._take_prompt is not None:
            await self._take_prompt(index, logprobs)

    def _pieces(self, progress: Sequence[ChoiceProgress], output: RequestOutput, usage: Usage) -> bytes:
        """Frames of one prompt's news, ``progress`` being its choices'."""
        end = self._end
        if self._counts:
            usage.add(output)
            end = self._end_with(usage)
        data = b""
        for choice in output.outputs:
            data += self._choice(choice, progress[choice.index], output.prompt_token_ids, end)
        return data

    def _end_with(self, usage: Usage) -> bytes:
        if not self._sends_running_usage:
            return self._end
        return b',"usage":' + orjson.dumps(usage.body()) + b"}\n\n"

    def _choice(
        self,
        output: CompletionOutput,
        progress: ChoiceProgress,
        prompt_token_ids: list[int],
        end: bytes,
    ) -> bytes:
        """Frames of one choice's news: none while its tokens are not text yet."""
        index = progress.number
        if self._is_plain and progress.begun and output.text and output.finish_reason is None:
            return self._plain_frame(index, output.text, end)
        first, prompt_ids = b"", b""
        if self._token_ids is not None:
            progress.token_ids.extend(output.token_ids)
            if not progress.begun:
                prompt_ids = b',"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
        chunk = None
        if not progress.begun and self._first_chunk is not None:
            chunk = self._first_chunk(index)
        if chunk is not None:
            progress.begun = True
            progress.offsets.position = chunk.num_characters
            fields = chunk.text + b',"logprobs":' + chunk.logprobs + b',"finish_reason":null'
            first, prompt_ids = self._frame(index, fields, prompt_ids, end), b""
        if output.logprobs:
            progress.entries.extend(output.logprobs)
        if not output.text and output.finish_reason is None:
            return first
        progress.begun = True
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
        fields = text + b',"logprobs":' + logprobs + b',"finish_reason":' + finish
        if self._token_ids is not None:
            fields += b',"token_ids":' + orjson.dumps(progress.token_ids)
            progress.token_ids = []
        return first + self._frame(index, fields, prompt_ids, end)

    def _frame(self, index: int, fields: bytes, prompt_ids: bytes, end: bytes) -> bytes:
        """One chunk; ``prompt_ids`` stands beside its choice's fields or beside its choices."""
        if self._token_ids == "choice":
            fields, prompt_ids = fields + prompt_ids, b""
        return self._start + b"%d," % index + fields + b"}]" + prompt_ids + end
