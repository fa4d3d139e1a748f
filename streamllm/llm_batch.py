"""A batch of prompts through the engine: all checked first, a window of them in the engine, a bar."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from streamllm.errors import InvalidRequestError
from streamllm.llm_inputs import Input
from streamllm.outputs import RequestOutput
from streamllm.pooling_params import RequestParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stream import RequestStream

UseTqdm = bool | Callable[..., "tqdm[Any]"]
"""Whether to show a bar on a terminal, or what makes the bar (called with tqdm's arguments)."""

SMALLEST_WINDOW = 64
REFRESH_INTERVAL = 0.5
"""Seconds between two looks at the tokens of requests that have not ended."""


async def run_batch(
    engine: AsyncEngine,
    inputs: Sequence[Input],
    params: Sequence[RequestParams],
    *,
    use_tqdm: UseTqdm,
) -> list[RequestOutput]:
    """The last output of each input, in their order. Leaves nothing running, however it ends.

    Up to a window's inputs are queued at once, all or none. More are checked first, then fed as others end,
    so that what the engine knows of them takes memory for a window only.

    Args:
        params: of each input; of those that stream, ``output_kind`` must be ``FINAL_ONLY``.

    Raises:
        InvalidRequestError: an input or its parameters are wrong; nothing was generated.
        RequestFailedError: one of them failed; the others are aborted.
        EngineDeadError: the engine has stopped.
    """
    window = max(2 * engine.config.max_num_seqs, SMALLEST_WINDOW)
    progress = Progress(len(inputs), use_tqdm)
    outputs: list[RequestOutput | None] = [None] * len(inputs)
    streams: list[RequestStream] = []

    async def read(index: int, stream: RequestStream) -> None:
        with progress.watching(stream):
            outputs[index] = output = await anext(stream)
            progress.add(output)

    try:
        if len(inputs) <= window:
            await _add_all(engine, inputs, params, streams)
            await together(read(index, stream) for index, stream in enumerate(streams))
        else:
            checked = await _check_all(engine, inputs, params)
            waiting = iter(_order(engine, inputs))

            async def feed() -> None:
                for index in waiting:
                    token_ids, checked[index] = checked[index], []
                    stream = await engine.add_request(token_ids, params[index], **inputs[index].options)
                    given = inputs[index].prompt
                    stream.prompt = given if isinstance(given, str) else None
                    try:
                        await read(index, stream)
                    finally:
                        stream.abort()

            await together(feed() for _ in range(window))
    finally:
        for stream in streams:
            stream.abort()
        await progress.close()
    return [output for output in outputs if output is not None]


class Progress:
    """A bar: prompts done and prompts a second, and tokens a second as vLLM words them.

    Args:
        total: prompts.
        use_tqdm: see :data:`UseTqdm`; ``True`` shows it only where standard error is a terminal.

    Attributes:
        prompt_tokens: of the prompts that are done.
        output_tokens: likewise, of all their choices.
    """

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        from tqdm import tqdm

        self.prompt_tokens = 0
        self.output_tokens = 0
        self._start = time.monotonic()
        self._live: set[RequestStream] = set()
        make: Callable[..., tqdm[Any]] = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        # None hides the bar where standard error is no terminal.
        disable = None if use_tqdm is True else use_tqdm is False
        self._bar = make(
            total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True, disable=disable
        )
        self._refresher = None if self._bar.disable else asyncio.create_task(self._refresh())

    @contextlib.contextmanager
    def watching(self, stream: RequestStream) -> Iterator[None]:
        """Count a request's tokens while they are generated."""
        self._live.add(stream)
        try:
            yield
        finally:
            self._live.discard(stream)

    def add(self, output: RequestOutput) -> None:
        """A prompt is done."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self._bar.update()

    async def close(self) -> None:
        """The bar's last state stays on the screen."""
        if self._refresher is not None:
            self._refresher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refresher
            self._show()
        self._bar.close()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_INTERVAL)
            self._show()

    def _show(self) -> None:
        live_tokens = sum(stream.num_pushed_tokens for stream in self._live)
        seconds = max(time.monotonic() - self._start, 1e-9)
        read, written = self.prompt_tokens / seconds, (self.output_tokens + live_tokens) / seconds
        text = f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"
        self._bar.set_postfix_str(text)


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them; the first error ends the others and is raised when they are over."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _have_same_options(inputs: Sequence[Input]) -> bool:
    return all(each.options == inputs[0].options for each in inputs)


async def _add_all(
    engine: AsyncEngine,
    inputs: Sequence[Input],
    params: Sequence[RequestParams],
    streams: list[RequestStream],
) -> None:
    """Queue all inputs; their streams are in ``streams`` even if a later one is refused."""
    if _have_same_options(inputs):
        options = inputs[0].options if inputs else {}
        streams += await engine.add_requests([each.prompt for each in inputs], params, **options)
        return
    for index, (each, own) in enumerate(zip(inputs, params, strict=True)):
        try:
            streams.append(await engine.add_request(each.prompt, own, **each.options))
        except InvalidRequestError as error:
            raise error.at_index("prompt", index) from None


async def _check_all(
    engine: AsyncEngine, inputs: Sequence[Input], params: Sequence[RequestParams]
) -> list[list[int]]:
    """The token ids of all inputs, none of which is queued."""
    if _have_same_options(inputs):
        return await engine.check_requests([each.prompt for each in inputs], params, **inputs[0].options)
    checked: list[list[int]] = []
    for index, (each, own) in enumerate(zip(inputs, params, strict=True)):
        try:
            checked += await engine.check_requests([each.prompt], [own], **each.options)
        except InvalidRequestError as error:
            raise error.at_index("prompt", index) from None
    return checked


def _order(engine: AsyncEngine, inputs: Sequence[Input]) -> list[int]:
    """In which order inputs are fed: the queue can only sort what is in it."""
    order = list(range(len(inputs)))
    if engine.config.scheduling_policy == "priority":
        order.sort(key=lambda index: inputs[index].priority)
    return order
