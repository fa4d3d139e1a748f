"""The default model behind the real server, through the real clients."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
import time

import httpx
import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def test_a_chat_streams_sensible_english(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, temperature=0, max_tokens=40
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "light" in text


def test_a_stream_equals_the_answer_that_is_not_streamed(client):
    request = {"model": MODEL, "messages": QUESTION, "temperature": 0.7, "seed": 3, "max_tokens": 30,
               "logprobs": True, "top_logprobs": 2}  # fmt: skip
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    content = [entry for d in deltas if d.logprobs for entry in d.logprobs.content]
    assert content == whole.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode().startswith(whole.choices[0].message.content)


def test_the_default_model_is_served_under_its_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_stop_string_is_never_shown(client):
    request = {"model": MODEL, "prompt": "1 2 3 4 5 6 7", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**request).choices[0].text
    stop = whole[10:15]
    for stream in (False, True):
        answer = client.completions.create(**request, stop=[stop], stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_in_many_scripts_never_breaks_a_character(client):
    stream = client.completions.create(
        model=MODEL, prompt="漢字 😀👩‍👩‍👧 กำ ďá", temperature=1.5, seed=1, max_tokens=120, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    deltas = [chunk.choices[0].text for chunk in stream]
    whole = client.completions.create(
        model=MODEL, prompt="漢字 😀👩‍👩‍👧 กำ ďá", temperature=1.5, seed=1, max_tokens=120,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(deltas) == whole.choices[0].text


async def test_32_concurrent_streams_equal_the_same_requests_alone(server):
    rng = random.Random(0)
    words = ["the", "a", "red", "blue", "sea", "sky", "runs", "sings", "slowly"]
    bodies = [
        {
            "model": MODEL,
            "prompt": " ".join(rng.choices(words, k=rng.randint(2, 90))),
            "temperature": rng.choice([0, 0.8]),
            "seed": index,
            "max_tokens": rng.randint(8, 40),
            "ignore_eos": True,
        }
        for index in range(32)
    ]  # fmt: skip
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        streamed = await asyncio.gather(*(_stream_text(http, body) for body in bodies))
        for body, text in zip(bodies, streamed, strict=True):
            alone = (await http.post("/v1/completions", json=body)).json()
            assert text == alone["choices"][0]["text"]
    server.wait_until_quiet()


async def _stream_text(http: httpx.AsyncClient, body: dict) -> str:
    import orjson

    pieces = []
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces.append(orjson.loads(line[6:])["choices"][0]["text"])
    return "".join(pieces)


async def test_200_requests_cut_off_at_random_moments_leave_no_block(server):
    rng = random.Random(2)
    canary = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 16}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        before = (await http.post("/v1/completions", json=canary)).json()["choices"]

        async def cut_off(index: int) -> None:
            body = {"model": MODEL, "prompt": f"{index} " * rng.randint(1, 400), "max_tokens": 500,
                    "ignore_eos": True, "stream": rng.random() < 0.5}  # fmt: skip
            try:
                async with asyncio.timeout(rng.random() * 1.5):
                    await _drain(http, body)
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for index in range(200):
                group.create_task(cut_off(index))
        await asyncio.to_thread(server.wait_until_quiet)
        after = (await http.post("/v1/completions", json=canary)).json()["choices"]
    assert after == before


async def _drain(http: httpx.AsyncClient, body: dict) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


def test_usage_and_counters_agree(server, client):
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [server.metric(name) for name in names]
    usages = [
        client.completions.create(model=MODEL, prompt=p, n=n, max_tokens=9, temperature=1.0).usage
        for p, n in [("a b c", 1), ("one two three four", 3), ("x", 2)]
    ]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    server.wait_until_quiet()
    after = [server.metric(name) for name in names]
    prompt, generation, finished = (b - a for a, b in zip(before, after, strict=True))
    assert prompt == sum(usage.prompt_tokens for usage in usages)
    assert generation == sum(usage.completion_tokens for usage in usages)
    assert finished == len(usages)


BAD = [
    ("prompt", "", {}),
    ("prompt", [], {}),
    ("prompt", [49152], {}),
    ("prompt", [-1], {}),
    ("prompt", [1.5], {}),
    ("prompt", [True], {}),
    ("prompt", "word " * 9000, {}),
    ("temperature", "hot", {}),
    ("top_p", 0, {}),
    ("n", 10**6, {}),
    ("stop", ["a", ""], {}),
    ("max_tokens", 0, {}),
    ("stop_token_ids", [49152], {}),
    ("seed", 1.5, {}),
]


@pytest.mark.parametrize(("field", "value", "extra"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_a_400_that_names_the_field(server, field, value, extra, stream):
    body = {"model": MODEL, "prompt": "hello", "stream": stream, field: value} | extra
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split("[")[0] == field
    assert field in error["message"] or "context length" in error["message"]
    server.wait_until_quiet()


def test_serving_on_a_cpu_imports_neither_torch_nor_transformers():
    program = """
        import sys, threading, time
        import httpx, uvicorn
        from streamllm.config import EngineConfig, ServerConfig
        from streamllm.engine.async_engine import AsyncEngine
        from streamllm.server.run import make_server

        import socket
        sock = socket.socket(); sock.bind(("127.0.0.1", 0)); sock.listen()
        port = sock.getsockname()[1]
        server = make_server(AsyncEngine.from_config(EngineConfig()), ServerConfig())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}); thread.start()
        while not server.started: time.sleep(0.01)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] > 0, answer.text
        server.should_exit = True; thread.join()
        loaded = {"torch", "transformers"} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_vllms_module_path_serves_too():
    from helpers.live_server import free_port

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamllm.entrypoints.openai.api_server", "--trust-remote-code",
         "--host", "127.0.0.1", "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        transport = httpx.HTTPTransport(retries=0)
        with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(600):
                try:
                    if http.get("/v1/models", timeout=30).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
                assert process.poll() is None
            assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_a_unix_socket_serves_and_is_gone_afterwards(tmp_path):
    path = tmp_path / "streamllm.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "streamllm.cli.main", "serve", "--uds", str(path)], stderr=subprocess.PIPE
    )
    try:
        http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60
        )
        deadline = time.monotonic() + 90
        while not path.is_socket():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        # The socket listens before the model is there: early clients wait.
        body = {"messages": QUESTION, "max_tokens": 4, "stream": True}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        # Whoever stands behind a proxy on the socket is not on this machine.
        assert http.post("/reset_prefix_cache").status_code == 403
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not path.exists()
