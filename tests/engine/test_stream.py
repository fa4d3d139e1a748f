"""The way of a delta from the engine to the reader, past the reader's task where that is possible."""

from __future__ import annotations

import asyncio

from streamllm.engine.stream import RequestStream
from streamllm.outputs import CompletionOutput, RequestMetrics
from streamllm.sampling_params import RequestOutputKind


def make_stream(num_choices: int = 1) -> RequestStream:
    return RequestStream(
        "r",
        "prompt",
        [1, 2],
        num_choices=num_choices,
        output_kind=RequestOutputKind.DELTA,
        metrics=RequestMetrics(arrival_time=0.0),
        abort=lambda: None,
    )


def delta(text: str, token_id: int, finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=[token_id], finish_reason=finish_reason)


class Shortcut:
    """Takes what does not end a choice, unless told to refuse."""

    def __init__(self) -> None:
        self.refuses = False
        self.texts: list[str] = []

    def __call__(self, delta: CompletionOutput) -> bool:
        if self.refuses or delta.finish_reason is not None:
            return False
        self.texts.append(delta.text)
        return True


async def read_all(stream: RequestStream, into: list[str], read: asyncio.Event | None = None) -> None:
    async for output in stream:
        into.append(output.outputs[0].text)
        if read is not None:
            await read.wait()


async def test_the_shortcut_takes_deltas_while_the_reader_waits_and_they_still_count() -> None:
    stream, shortcut, read = make_stream(), Shortcut(), []
    stream.set_shortcut(shortcut)
    task = asyncio.create_task(read_all(stream, read))
    await asyncio.sleep(0)
    for number, text in enumerate("abc"):
        stream.push(delta(text, number))
    stream.push(delta("d", 3, finish_reason="stop"))
    await task
    assert shortcut.texts == ["a", "b", "c"]
    assert read == ["d"]
    assert stream.num_pushed_tokens == 4


async def test_nothing_overtakes_what_the_reader_has_not_taken() -> None:
    stream, shortcut, read, may_go_on = make_stream(), Shortcut(), [], asyncio.Event()
    stream.set_shortcut(shortcut)
    stream.push(delta("a", 0))  # nobody waits yet
    task = asyncio.create_task(read_all(stream, read, may_go_on))
    await asyncio.sleep(0)
    stream.push(delta("b", 1))  # the reader is busy with the first
    stream.push(delta("c", 2))
    may_go_on.set()
    for _ in range(3):
        await asyncio.sleep(0)
    stream.push(delta("d", 3))  # it waits again
    stream.push(delta("e", 4, finish_reason="length"))
    await task
    assert read == ["a", "bc", "e"]
    assert shortcut.texts == ["d"]


async def test_what_the_shortcut_refuses_reaches_the_reader_with_what_follows_it() -> None:
    stream, shortcut, read = make_stream(), Shortcut(), []
    stream.set_shortcut(shortcut)
    task = asyncio.create_task(read_all(stream, read))
    await asyncio.sleep(0)
    stream.push(delta("a", 0))
    shortcut.refuses = True
    stream.push(delta("b", 1))
    shortcut.refuses = False
    stream.push(delta("c", 2))  # the reader has news now: not past them
    await asyncio.sleep(0)
    stream.push(delta("d", 3, finish_reason="stop"))
    await task
    assert shortcut.texts == ["a"]
    assert "".join(read) == "bcd"


async def test_without_a_shortcut_every_delta_reaches_the_reader() -> None:
    stream, shortcut, read = make_stream(), Shortcut(), []
    stream.set_shortcut(shortcut)
    stream.set_shortcut(None)
    task = asyncio.create_task(read_all(stream, read))
    await asyncio.sleep(0)
    stream.push(delta("a", 0))
    stream.push(delta("b", 1, finish_reason="stop"))
    await task
    assert "".join(read) == "ab" and not shortcut.texts
