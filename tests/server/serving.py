"""A real server on a loopback port, over the real engine and a model that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_model import HIDDEN_SIZE, FakeExecutor, FakeRunner

from streamllm.config import EngineConfig, ServerConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.engine.stats import EngineStats
from streamllm.models.kv_layout import kv_layout
from streamllm.runner.messages import ScheduledBatch, StepOutput, TokenLogprobs
from streamllm.server.run import Server, make_server
from streamllm.text.chat_template import ChatTemplate

MODEL = "fake-model"
TEXT = "The ďá 漢字 😀 answer of a scripted model, long enough for every test. "

Script = Callable[[int, int], int]
"""(choice's number, output position) -> token id."""


def text_script(text: str, *, ends: bool = False) -> Script:
    """The bytes of a text, over and over, or followed by EOS; each choice starts one character later."""

    def token(choice: int, position: int) -> int:
        data = text[choice:].encode()
        if ends and position >= len(data):
            return 256
        return data[position % len(data)]

    return token


class ScriptedRunner(FakeRunner):
    """Says what the script says. Its logprobs: -0.5 for the sampled token, then -inf for as many as asked."""

    def __init__(self, script: Script) -> None:
        super().__init__(block_size=16, max_num_batched_tokens=64)
        self.script = script
        self._prompt_lengths: dict[int, int] = {}

    def _check_context(self, state: Any) -> None:
        """Nothing: quadratic in the length, and the engine's tests do it."""

    def step(self, batch: ScheduledBatch) -> StepOutput:
        for new in batch.new_sequences:
            self._prompt_lengths[new.sequence_id] = new.num_prompt_tokens
        output = super().step(batch)
        states = {state.sequence_id: state for state in self.slots.values()}
        self._prompt_lengths = {i: n for i, n in self._prompt_lengths.items() if i in states}
        for index, row in enumerate(batch.output_rows):
            state = states[row.sequence_id]
            position = len(state.token_ids) - self._prompt_lengths[row.sequence_id]
            token_id = self.script(state.choice_index, position)
            output.token_ids[index] = [token_id]
            if state.num_logprobs is not None:
                others = [(token_id + 1 + rank) % 256 for rank in range(state.num_logprobs)]
                ids, values = [token_id, *others], [-0.5, *(float("-inf") for _ in others)]
                count = state.num_logprobs
                output.logprobs[index] = [TokenLogprobs(-0.5, 1, ids[:count], values[:count])]
        return output


def events(response: httpx.Response) -> list[Any]:
    """The events of a streamed response; [DONE] must stand once, last."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]" and blocks.count("data: [DONE]") == 1
    return [json.loads(block[6:]) for block in blocks[:-1]]


def prompt_of(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    """What the model reads for a body that is answered, learnt from the engine."""
    seen = []
    original = server.engine.add_requests

    async def spy(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(bytes(prompts[0]).decode())
        return await original(prompts, *args, **kwargs)

    server.engine.add_requests = spy  # type: ignore[method-assign]
    try:
        response = server.post(path, body)
        assert response.status_code == 200, response.text
    finally:
        server.engine.add_requests = original  # type: ignore[method-assign]
    return seen[0]


class RunningServer:
    """A server in a thread of its own."""

    def __init__(self, engine: AsyncEngine, executor: FakeExecutor, config: ServerConfig) -> None:
        self.engine = engine
        self.executor = executor
        self.server: Server = make_server(engine, config)
        sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]}, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.wait_for(lambda: self.server.started)
        self._loop = self.engine._task.get_loop()

    def stop(self) -> None:
        self.server.should_exit = True
        self.join()

    def join(self, timeout: float = 10.0) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()

    @staticmethod
    def wait_for(condition: Callable[[], bool], timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def stats(self) -> EngineStats:
        """The engine's figures, read on its own loop while that runs."""
        if not self._thread.is_alive():
            return self.engine.stats()

        async def snapshot() -> EngineStats:
            return self.engine.stats()

        return asyncio.run_coroutine_threadsafe(snapshot(), self._loop).result(5)

    def is_idle(self) -> bool:
        stats = self.stats()
        return stats.num_running == stats.num_waiting == stats.num_used_blocks == 0

    def wait_idle(self, timeout: float = 1.0) -> None:
        self.wait_for(self.is_idle, timeout)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST a body: bytes as they are, anything else as JSON."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, timeout=10, **content)

    def canary(self) -> None:
        """The server still answers as ever and holds nothing."""
        self.wait_idle()
        body = {"prompt": "canary", "temperature": 0, "max_tokens": 4}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == bytes(
            self.executor.runner.script(0, position) for position in range(4)
        ).decode("utf-8", "replace")
        assert httpx.get(self.url + "/health").status_code == 200
        self.wait_idle()


def make_engine(
    *,
    script: Script | None = None,
    runner: FakeRunner | None = None,
    step_seconds: float = 0.0,
    max_num_seqs: int = 8,
    chat_template: bool = True,
    num_blocks: int = 512,
    default_sampling: dict[str, Any] | None = None,
    **engine_settings: Any,
) -> tuple[AsyncEngine, FakeExecutor]:
    """The real engine over a scripted model: 257 tokens, contexts of 4096, blocks of 16."""
    tokenizer = ByteTokenizer()
    executor = FakeExecutor(runner or ScriptedRunner(script or text_script(TEXT)), step_seconds)
    engine = AsyncEngine(
        config=EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, **engine_settings),
        model_name=MODEL,
        model_config=SimpleNamespace(
            eos_token_ids=(),
            vocab_size=257,
            hidden_size=HIDDEN_SIZE,
            kv_layout=kv_layout((None,)),
            ropes=(),
        ),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_template, {}) if chat_template else None,
        executor=executor,
        num_blocks=num_blocks,
        max_model_len=4096,
        default_sampling=default_sampling or {},
    )
    return engine, executor


@contextlib.contextmanager
def run_server(
    *,
    script: Script | None = None,
    step_seconds: float = 0.0,
    max_num_seqs: int = 8,
    chat_template: bool | str = True,
    engine_settings: dict[str, Any] | None = None,
    **server_settings: Any,
) -> Iterator[RunningServer]:
    """A server in this process; ``engine_settings`` go to :func:`make_engine`, ``server_settings`` are
    ServerConfig's."""
    if isinstance(chat_template, str):
        server_settings["chat_template"] = chat_template
    folder = tempfile.TemporaryDirectory()
    server_settings.setdefault("data_dir", folder.name)
    engine, executor = make_engine(
        script=script,
        step_seconds=step_seconds,
        max_num_seqs=max_num_seqs,
        chat_template=bool(chat_template),
        **engine_settings or {},
    )
    running = RunningServer(engine, executor, ServerConfig(**server_settings))
    running.start()
    try:
        yield running
    finally:
        running.stop()
        folder.cleanup()
