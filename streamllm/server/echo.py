"""``echo``: the prompt as the beginning of each choice's text, with its logprobs where they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from streamllm.outputs import CompletionOutput
from streamllm.server.chunks import FirstChunk
from streamllm.server.logprobs import LogprobFormatter, PromptEntries, TextOffsets, format_prompt

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream
    from streamllm.text.tokenizer import Tokenizer


class Echo:
    """What the choices of one response begin with.

    Args:
        tokenizer: turns prompts that came as ids, or were cut, into text.
        prompts: as the client wrote them.
        streams: of the same prompts; they know the ids.
        n: choices of each prompt.
        formatter: of the response's logprobs, ``None`` for none.
        truncated: prompts may have been cut.
        skip_special_tokens: special tokens of a prompt that came as ids are not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[str | list[int]],
        streams: Sequence[RequestStream],
        n: int,
        formatter: LogprobFormatter | None,
        *,
        truncated: bool,
        skip_special_tokens: bool,
    ) -> None:
        self._streams = streams
        self._n = n
        self._formatter = formatter
        self._texts = [
            prompt
            if isinstance(prompt, str) and not truncated
            else tokenizer.decode(stream.prompt_token_ids, skip_special_tokens=skip_special_tokens)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        self._logprobs: dict[int, dict[str, Any]] = {}

    async def take(self, prompt: int, entries: PromptEntries) -> None:
        """Take in the logprobs of the prompt with this number, before its choices' text."""
        if self._formatter is not None:
            token_ids, text = self._streams[prompt].prompt_token_ids, self._texts[prompt]
            self._logprobs[prompt] = await format_prompt(
                entries, functools.partial(self._formatter.prompt, token_ids, entries, text)
            )

    def first_chunk(self, index: int) -> FirstChunk | None:
        """The first chunk of the choice ``index`` of a stream, if there is anything to show."""
        text, logprobs = self._texts[index // self._n], self._logprobs.get(index // self._n)
        if not text and logprobs is None:
            return None
        return FirstChunk(b'"text":' + orjson.dumps(text), orjson.dumps(logprobs), len(text))

    def complete(self, output: CompletionOutput) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of a whole choice, the prompt's first."""
        prompt = output.index // self._n
        text = self._texts[prompt]
        if self._formatter is None:
            return text + output.text, None
        generated = self._formatter.completions(output.logprobs or [], output, TextOffsets(len(text)))
        logprobs = {name: values + generated[name] for name, values in self._logprobs[prompt].items()}
        return text + output.text, logprobs
