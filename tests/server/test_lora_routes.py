"""LoRA adapters over HTTP: named as the model, loaded, replaced and unloaded while others are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from helpers.fake_adapter import choice_of, fake_adapter, write_adapter
from helpers.fake_model import FakeRunner, continuation
from serving import MODEL, RunningServer, run_server

from streamllm.errors import ConfigError
from streamllm.server.app import create_app

CLIENT = httpx.Client(timeout=10)
"""For all requests: to make one takes longer than what it asks for."""

PROMPT = "What is a low-rank adapter, in one sentence?"


def run_lora_server(**options):
    engine_settings = {"enable_lora": True, "max_loras": 2, **options.pop("engine_settings", {})}
    engine_settings["runner"] = FakeRunner(block_size=16, max_num_batched_tokens=64)
    return run_server(engine_settings=engine_settings, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with run_lora_server(served_model_name=("base", "base-too")) as running:
        yield running


@pytest.fixture
def server(shared) -> Iterator[RunningServer]:
    """The shared server; afterwards nothing runs and no adapter is loaded."""
    yield shared
    shared.wait_idle()
    for card in CLIENT.get(shared.url + "/v1/models").json()["data"]:
        if card["parent"] is not None:
            assert unload(shared, card["id"]).status_code == 200


def post(server, path: str, body: dict) -> httpx.Response:
    return CLIENT.post(server.url + path, json=body)


def load(server, name, path, **fields) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})


def unload(server, name) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name})


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=httpx.Client(verify=False)
    )


def answer_of(text: str | None, count: int) -> str:
    """What the fake model answers to PROMPT with the adapter that ``text`` is."""
    choice = choice_of(None if text is None else fake_adapter(text))
    return bytes(continuation(list(PROMPT.encode()), count, choice)).decode()


def ask(server, model: str | None, max_tokens: int = 8) -> str:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "model": model}
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["code"], error["param"]


def test_the_openai_client_asks_for_adapters_by_name(server, tmp_path):
    for name in ("sql", "tutor"):
        answer = load(server, name, write_adapter(tmp_path / name, name))
        assert answer.text == f"Success: LoRA adapter '{name}' added successfully."
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["base", "base-too", "sql", "tutor"]
        for model, text in (("base", None), ("sql", "sql"), ("tutor", "tutor"), ("base-too", None)):
            completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=9)
            assert completion.choices[0].text == answer_of(text, 9)
            assert completion.model == ("base" if text is None else text)
            chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=9, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == answer_of(text, 9)
            assert {chunk.model for chunk in chunks} == {completion.model}


def test_chat_and_embeddings_take_adapters(server, tmp_path):
    load(server, "sql", write_adapter(tmp_path / "sql", "sql"))
    messages = [{"role": "user", "content": PROMPT}]
    with client_of(server) as client:
        chats = [
            client.chat.completions.create(model=model, messages=messages, max_tokens=20)
            for model in ("base", "sql")
        ]
        streamed = list(
            client.chat.completions.create(model="sql", messages=messages, max_tokens=20, stream=True)
        )
        embedding = client.embeddings.create(model="sql", input=PROMPT)
    assert [chat.model for chat in chats] == ["base", "sql"]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == chats[1].choices[0].message.content
    assert {chunk.model for chunk in streamed} == {"sql"} == {embedding.model}


def test_adapters_are_listed_with_their_parent(server, tmp_path):
    path = write_adapter(tmp_path / "sql", "sql")
    load(server, "org/sql", path)
    with client_of(server) as client:
        card = client.models.retrieve("org/sql").to_dict()
        base = client.models.retrieve("base-too").to_dict()
    assert (card["root"], card["parent"]) == (path, "base")
    assert (base["root"], base["parent"]) == (MODEL, None)
    assert card["max_model_len"] == base["max_model_len"]


def test_usage_shows_that_adapters_share_no_blocks(server, tmp_path):
    load(server, "a", write_adapter(tmp_path / "a", "old"))

    def cached(model: str) -> int:
        answer = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "model": model})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    CLIENT.post(server.url + "/reset_prefix_cache")
    assert [cached(model) for model in ("base", "a", "base", "a")] == [0, 0, 32, 32]
    write_adapter(tmp_path / "a", "new")
    assert load(server, "a", tmp_path / "a", load_inplace=True).status_code == 200
    assert [cached("a"), cached("a")] == [0, 32]
    assert ask(server, "a") == answer_of("new", 8)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/chat/completions/render",
     "/v1/completions/render"],
)  # fmt: skip
def test_unknown_models_on_every_route(server, tmp_path, path):
    load(server, "sql", write_adapter(tmp_path / "sql", "sql"))
    content = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    content = {"input": "a"} if "embeddings" in path else content
    fields = {"max_tokens": 1} if "completions" in path else {}
    for name in ("nope", "", "SQL", "sql "):
        answer = post(server, path, {"model": name, **content, **fields})
        assert error_of(answer) == (404, "model_not_found", "model")
        assert '"sql"' in answer.json()["error"]["message"]
    for name in (5, ["sql"], {}):
        assert error_of(post(server, path, {"model": name, **content, **fields}))[::2] == (400, "model")
    for name in ("sql", "base", None):
        assert post(server, path, {"model": name, **content, **fields}).status_code == 200
    assert post(server, path, {**content, **fields}).status_code == 200
    assert error_of(CLIENT.get(server.url + "/v1/models/nope"))[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": 5}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/nowhere/at/all"}, "lora_path"),
        ({"lora_name": "", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": None, "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "x" * 201, "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "a\u0007", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "base", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "base-too", "lora_path": "GOOD", "load_inplace": True}, "lora_name"),
        ({"lora_name": MODEL, "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "sql", "lora_path": "GOOD"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "BROKEN"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "GOOD", "load_inplace": "yes"}, "load_inplace"),
    ],
)
def test_loads_that_are_refused(server, tmp_path, body, param):
    good = write_adapter(tmp_path / "good", "good")
    broken = write_adapter(tmp_path / "broken", "!rank 64 is above --max-lora-rank 16")
    load(server, "sql", good)
    paths = {"GOOD": good, "BROKEN": broken}
    body = {name: paths.get(value, value) if name == "lora_path" else value for name, value in body.items()}
    answer = post(server, "/v1/load_lora_adapter", body)
    assert error_of(answer)[::2] == (400, param)
    assert [card["id"] for card in CLIENT.get(server.url + "/v1/models").json()["data"]][2:] == ["sql"]
    assert ask(server, "sql") == answer_of("good", 8)


def test_unloads_that_are_refused(server, tmp_path):
    assert error_of(unload(server, "nope")) == (404, "model_not_found", "lora_name")
    assert error_of(unload(server, "base")) == (404, "model_not_found", "lora_name")
    assert error_of(post(server, "/v1/unload_lora_adapter", {}))[::2] == (400, "lora_name")
    assert CLIENT.get(server.url + "/v1/unload_lora_adapter").status_code == 405


def test_unload_while_a_stream_uses_the_adapter(tmp_path):
    with run_lora_server(step_seconds=0.005) as server:
        load(server, "sql", write_adapter(tmp_path / "sql", "sql"))
        with client_of(server) as client:
            stream = client.completions.create(model="sql", prompt=PROMPT, max_tokens=60, stream=True)
            text = next(stream).choices[0].text
            assert error_of(unload(server, "sql")) == (409, "adapter_in_use", "lora_name")
            text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == answer_of("sql", 60)
        server.wait_idle()
        answer = unload(server, "sql")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert error_of(post(server, "/v1/completions", {"prompt": "a", "model": "sql"}))[0] == 404


def test_without_lora_the_routes_say_how_to_have_it(tmp_path):
    with run_server() as server:
        answer = load(server, "a", write_adapter(tmp_path / "a", "a"))
        assert answer.status_code == 400 and "--enable-lora" in answer.json()["error"]["message"]
        server.canary()


def test_loading_needs_an_admin_key(tmp_path):
    with run_lora_server(api_key=("key",), admin_api_key=("admin",)) as server:
        body = {"lora_name": "a", "lora_path": write_adapter(tmp_path / "a", "a")}
        statuses = []
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            for key in (None, "key", "admin"):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                statuses.append(CLIENT.post(server.url + path, json=body, headers=headers).status_code)
        assert statuses == [401, 403, 200] * 2


def test_an_adapter_may_not_have_a_served_name(tmp_path):
    from serving import make_engine

    from streamllm.config import ServerConfig

    engine, _ = make_engine(enable_lora=True)
    engine.adapters.load_modules({"fine-name": write_adapter(tmp_path / "a", "a")})
    with pytest.raises(ConfigError, match="fine-name"):
        create_app(engine, ServerConfig(served_model_name=("served", "fine-name")))


# -- traffic -----------------------------------------------------------------------------------------------


def test_load_replace_and_unload_during_traffic(tmp_path):
    """Base and adapters are asked for all the time, while one adapter is replaced over and over and others
    come and go: every answer is right, and none is an error."""
    with run_lora_server(step_seconds=0.001, engine_settings={"max_cpu_loras": 4}) as server:
        for name in ("stays", "changes"):
            load(server, name, write_adapter(tmp_path / name, f"{name}-0"))
        stop = threading.Event()
        failures: list[object] = []
        num_answers = 0

        def traffic(model: str | None, texts: set[str]) -> None:
            nonlocal num_answers
            while not stop.is_set():
                try:
                    if (text := ask(server, model, max_tokens=12)) not in texts:
                        failures.append((model, text))
                except Exception as error:
                    failures.append(error)
                num_answers += 1

        versions = {answer_of(f"changes-{i}", 12) for i in range(6)}
        models = {
            None: {answer_of(None, 12)}, "stays": {answer_of("stays-0", 12)}, "changes": versions,
        }  # fmt: skip
        threads = [threading.Thread(target=traffic, args=each) for each in [*models.items()] * 2]
        for thread in threads:
            thread.start()
        for i in range(1, 6):
            path = write_adapter(tmp_path / "changes", f"changes-{i}")
            assert load(server, "changes", path, load_inplace=True).status_code == 200
            guest = f"guest-{i}"
            assert load(server, guest, write_adapter(tmp_path / "guest", guest)).status_code == 200
            assert ask(server, guest) == answer_of(guest, 8)
            assert ask(server, "changes") == answer_of(f"changes-{i}", 8)
            server.wait_for(lambda name=guest: unload(server, name).status_code == 200)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert not failures and num_answers > 10
        server.wait_idle()
        assert [adapter.name for adapter in server.engine.adapters.served()] == ["stays", "changes"]
        assert server.engine.adapters.served()[1].content == fake_adapter("changes-5").content
