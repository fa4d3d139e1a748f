"""A request's stream: what the engine has produced and its reader has not yet taken."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamllm.errors import RequestFailedError, StreamLLMError
from streamllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from streamllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from streamllm.engine.embedding import Embedding
    from streamllm.engine.prompt_logprobs import PromptLogprobs
    from streamllm.lora.request import LoRARequest


Shortcut = Callable[[CompletionOutput], bool]
"""Takes a delta, or refuses it (``False``); never one that ends its choice."""


class RequestStream:
    """Async iterator over a request's :class:`RequestOutput`.

    What arrives while the reader is busy is merged, so a slow reader costs no queue: at most one pending
    output exists. With ``DELTA`` each output holds the news, with ``CUMULATIVE`` everything so far, with
    ``FINAL_ONLY`` there is one, at the end. Prompt logprobs come with the first output (cumulatively: with
    each).

    Raises (from iteration):
        RequestFailedError: the request failed after admission.
        EngineDeadError: the engine died.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        *,
        num_choices: int,
        output_kind: RequestOutputKind,
        metrics: RequestMetrics,
        abort: Callable[[], None],
        selection: Selection | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        embedding: Embedding | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._kind = output_kind
        self.metrics = metrics
        self._abort = abort
        self._selection = selection
        self._prompt_logprobs = prompt_logprobs
        self._embedding = embedding
        self.lora_request = lora_request
        self.num_choices = num_choices
        self._unfinished = dict.fromkeys(range(num_choices))
        self.num_cached_tokens = 0
        self.num_pushed_tokens = 0
        self._choices: dict[int, CompletionOutput] = {}
        self._has_news = False
        self._exhausted = False
        self._error: StreamLLMError | None = None
        self._is_ready = False
        self._reader: asyncio.Future[None] | None = None
        self._shortcut: Shortcut | None = None

    # -- the reader's side ---------------------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._exhausted:
            raise StopAsyncIteration
        if not self._is_ready:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._has_news:
            return self._take()
        self._exhausted = True
        assert self._error is not None
        raise self._error

    def set_shortcut(self, shortcut: Shortcut | None) -> None:
        """Offer each delta to ``shortcut`` first while the reader waits and so has taken all before it.

        Waking a task costs several times what it takes to write a token to a socket.
        """
        self._shortcut = shortcut

    def abort(self) -> None:
        """Give up the request: its blocks are free by the next step. Harmless when it has ended."""
        self._abort()

    @property
    def finished(self) -> bool:
        """Whether nothing more will be pushed: every choice has ended, or the request has failed."""
        return not self._unfinished or self._error is not None

    # -- the engine's side ---------------------------------------------------------------------------------

    def push(self, delta: CompletionOutput) -> None:
        """Merge a choice's news into what the reader will take next, unless the shortcut takes them."""
        if self._shortcut is not None and self._reader_waits() and self._shortcut(delta):
            self.num_pushed_tokens += len(delta.token_ids)
            return
        known = self._choices.get(delta.index)
        if known is None:
            self._choices[delta.index] = delta
        else:
            _merge(known, delta)
        self.num_pushed_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.pop(delta.index, None)
        self._has_news = True
        if self._kind is not RequestOutputKind.FINAL_ONLY or not self._unfinished:
            self._wake_reader()

    def abort_unfinished(self) -> None:
        """End every choice that has not ended."""
        for index in list(self._unfinished):
            self.push(CompletionOutput(index=index, finish_reason="abort"))

    def fail(self, error: StreamLLMError | str) -> None:
        """End the stream with an error; what was produced before it is still delivered."""
        if not self.finished:
            self._error = RequestFailedError(error) if isinstance(error, str) else error
            if self._kind is RequestOutputKind.FINAL_ONLY:
                self._has_news = False
            self._wake_reader()

    def _reader_waits(self) -> bool:
        return not self._is_ready and self._reader is not None and not self._reader.done()

    def _wake_reader(self) -> None:
        # A bare future: an Event costs every token of every stream several times as much.
        self._is_ready = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _take(self) -> RequestOutput:
        choices = list(self._choices.values())
        if len(choices) > 1:
            choices.sort(key=lambda choice: choice.index)
        finished = not self._unfinished
        if self._kind is RequestOutputKind.CUMULATIVE:
            choices = [_snapshot(choice) for choice in choices]
        else:
            self._choices = {}
        if finished and self._selection is not None:
            choices = self._selection.apply(choices)
        self._has_news = False
        self._exhausted = finished
        prompt_logprobs = self._prompt_logprobs
        if prompt_logprobs is not None and not prompt_logprobs.complete:  # it was aborted before
            prompt_logprobs = None
        if self._kind is not RequestOutputKind.CUMULATIVE:
            self._prompt_logprobs = None
        if not finished and self._error is None:
            self._is_ready = False
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=choices,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            embedding=None if self._embedding is None else self._embedding.values,
            lora_request=self.lora_request,
        )


@dataclass(frozen=True)
class Selection:
    """Which choices of ``best_of`` are returned: those with the highest logprob per token.

    Attributes:
        count: how many.
        show_logprobs: whether the client asked for logprobs.
    """

    count: int
    show_logprobs: bool

    def apply(self, choices: list[CompletionOutput]) -> list[CompletionOutput]:
        """The best choices, best first, numbered anew."""

        def logprob_per_token(choice: CompletionOutput) -> float:
            if choice.cumulative_logprob is None:  # aborted before its first token
                return -math.inf
            return choice.cumulative_logprob / len(choice.token_ids)

        best = sorted(choices, key=logprob_per_token, reverse=True)[: self.count]
        for index, choice in enumerate(best):
            choice.index = index
            if not self.show_logprobs:
                choice.logprobs = choice.cumulative_logprob = None
        return best


def _merge(known: CompletionOutput, delta: CompletionOutput) -> None:
    known.text += delta.text
    known.token_ids.extend(delta.token_ids)
    if delta.cumulative_logprob is not None:
        known.cumulative_logprob = delta.cumulative_logprob
    if delta.logprobs is not None:
        known.logprobs = [*(known.logprobs or []), *delta.logprobs]
    known.finish_reason = delta.finish_reason
    known.stop_reason = delta.stop_reason
    known.ended_by_id = delta.ended_by_id


def _snapshot(choice: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=None if choice.logprobs is None else list(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        ended_by_id=choice.ended_by_id,
    )
