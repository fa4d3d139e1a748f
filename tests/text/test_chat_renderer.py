"""Conversations to prompts, off the event loop where they are large or the template is not the server's
own."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from helpers.byte_tokenizer import ByteTokenizer

from streamllm.errors import InvalidRequestError
from streamllm.text import chat_renderer
from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def make_renderer(source: str | None = "{{ messages[0].content }}{{ mark }}", **options) -> ChatRenderer:
    template = None if source is None else ChatTemplate(source, {})
    return ChatRenderer(
        ByteTokenizer(), template, options.pop("check_text", lambda text, **_: None), **options
    )


async def test_text_and_tokens():
    text, token_ids = await make_renderer().render(MESSAGES)
    assert text == "hello" and bytes(token_ids) == b"hello"


async def test_default_variables_can_be_overridden():
    renderer = make_renderer(default_kwargs={"mark": "!"})
    assert (await renderer.render(MESSAGES)).text == "hello!"
    assert (await renderer.render(MESSAGES, chat_template_kwargs={"mark": "?"})).text == "hello?"
    with pytest.raises(InvalidRequestError, match="messages"):
        make_renderer(default_kwargs={"messages": []})


async def test_a_template_of_the_request():
    renderer = make_renderer(None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await renderer.render(MESSAGES)
    assert (await renderer.render(MESSAGES, chat_template="<{{ messages[0].content }}>")).text == "<hello>"
    for broken in ("{% for %}", "{{", "(" * 10 + "{{ " + "(" * 5000, "x" * 300_000):
        with pytest.raises(InvalidRequestError) as refusal:
            await renderer.render(MESSAGES, chat_template=broken)
        assert refusal.value.param == "chat_template"


async def test_the_loop_runs_on_while_a_large_conversation_is_rendered():
    threads = set()
    renderer = make_renderer(check_text=lambda text, **_: threads.add(threading.current_thread()))
    await renderer.render([{"role": "user", "content": "x" * 100_000}])
    await renderer.render([{"role": "user", "content": ""}] * 1000)
    await renderer.render(MESSAGES, chat_template="x")
    assert threading.main_thread() not in threads
    await renderer.render(MESSAGES)
    assert threading.main_thread() in threads


async def test_hostile_templates_hold_up_neither_the_loop_nor_others(monkeypatch):
    monkeypatch.setattr("streamllm.text.chat_template.TIME_LIMIT", 0.3)
    renderer = make_renderer()
    hostile = [asyncio.create_task(renderer.render(MESSAGES, chat_template=ENDLESS)) for _ in range(4)]
    long = [{"role": "user", "content": "x" * 10_000}]
    for _ in range(5):
        began = time.monotonic()
        await asyncio.sleep(0.01)
        await renderer.render(long)
        assert time.monotonic() - began < 0.3
    for result in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(result, InvalidRequestError) and "too long" in str(result)


async def test_nobody_waits_for_ever_for_a_thread(monkeypatch):
    monkeypatch.setattr(chat_renderer, "WAIT_LIMIT", 0.05)
    release = threading.Event()
    renderer = make_renderer(check_text=lambda text, **_: release.wait(5))
    tasks = [asyncio.create_task(renderer.render(MESSAGES, chat_template="x")) for _ in range(3)]
    try:
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, InvalidRequestError) and "within" in str(result)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("streamllm-render") for name in names) <= 3
    finally:
        release.set()
