"""The gateway in front of real servers over the fake model, and of replicas that die."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from helpers.replica_cluster import FixedReplicas, breaking_replica, gateway, real_replica, wait_for

from streamllm.deploy.replicas import Replica

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
NOBODY = Replica("nobody", "127.0.0.1", 1, 0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two replicas."""
    folder = tmp_path_factory.mktemp("replicas")
    with real_replica(0, folder) as (first, _), real_replica(1, folder) as (second, _):
        yield [first, second]


@pytest.fixture
def pair(two: list[Replica]) -> FixedReplicas:
    """Two replicas, and a router that knows nothing yet."""
    return FixedReplicas(two)


def test_the_openai_client_streams_as_from_one_server(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        whole = client.chat.completions.create(model="fake-model", **CHAT)
        chunks = list(client.chat.completions.create(model="fake-model", stream=True, **CHAT))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [model.id for model in client.models.list()] == ["fake-model"]


def test_requests_with_one_beginning_go_to_one_replica(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        for prefix in ("a long beginning " * 40, "another beginning " * 40):
            answers = [
                httpx.post(f"{url}/v1/completions", json={"prompt": f"{prefix}{number}", "max_tokens": 1})
                for number in range(6)
            ]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.headers["x-streamllm-replica"] for answer in answers}) == 1
    # Everything was said to have ended.
    assert all(pair.ledger.load(replica.id) == 0 for replica in pair.all())


def test_a_request_that_is_wrong_is_refused_as_by_one_server(pair: FixedReplicas) -> None:
    with gateway(pair, max_body_bytes=4096) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": -1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        assert httpx.get(f"{url}/v1/nothing").status_code == 404
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 5000})
        assert answer.status_code == 413


@pytest.mark.parametrize(
    ("target", "status"),
    [(b"/v1/\xff", 400), (b"/v1/a\x7fb?x=\xe9", 400), (b"/v1/responses/" + b"x" * 60_000, 404), (b"*", 400)],
)
def test_paths_that_are_none_are_nobodys_fault(pair: FixedReplicas, target: bytes, status: int) -> None:
    with gateway(pair) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=10) as sock:
            sock.sendall(b"OPTIONS" if target == b"*" else b"GET")
            sock.sendall(b" " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = sock.makefile("rb").readline()
    assert int(answer.split()[1]) == status


def test_an_id_that_fits_into_no_url_is_not_found(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        body = {"model": "fake-model", "input": "x", "previous_response_id": "é" * 70_000}
        answer = httpx.post(f"{url}/v1/responses", json=body)
    assert answer.status_code == 404 and "error" in answer.json()


def test_keys_are_asked_for_before_a_replica_is(tmp_path: Path) -> None:
    with real_replica(0, tmp_path, api_key=("secret",)) as (replica, _):
        replicas = FixedReplicas([replica])
        with gateway(replicas, api_key=("secret",)) as url:
            num_before = len(replicas.requests)
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                assert httpx.get(f"{url}{path}").status_code == 401
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401
            assert len(replicas.requests) == num_before
            right = {"Authorization": "Bearer secret"}
            assert httpx.get(f"{url}/v1/models", headers=right).status_code == 200
            assert httpx.get(f"{url}/metrics", headers=right).status_code == 200
            assert httpx.get(f"{url}/health").status_code == 200


def test_headers_come_once(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        given = {"X-Request-Id": "mine", "Origin": "http://elsewhere"}
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=given)
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.headers.get_list("access-control-allow-origin") == ["*"]
        for name in ("date", "content-type", "content-length"):
            assert len(answer.headers.get_list(name)) == 1, name


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    with real_replica(0, tmp_path, step_seconds=0.02) as (replica, server):
        replicas = FixedReplicas([replica])
        with gateway(replicas) as url:
            body = {"prompt": "x", "max_tokens": 1000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                assert asyncio.run(server.load())["load"] > 0
            wait_for(lambda: asyncio.run(server.load())["load"] == 0, 2.0)
            wait_for(lambda: replicas.ledger.load(replica.id) == 0, 2.0)


# -- replicas that die -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        STREAM_HEAD,
        STREAM_HEAD + chunk(ROLE),
        STREAM_HEAD + chunk(TOKEN[:20]),
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["nothing", "head", "role", "half an event", "refusal", "half an answer"],
)
def test_what_has_said_nothing_yet_is_asked_again(tmp_path: Path, said: bytes) -> None:
    with contextlib.ExitStack() as stack:
        dead = stack.enter_context(breaking_replica(said))
        alive, _ = stack.enter_context(real_replica(1, tmp_path))
        with gateway(FixedReplicas([dead, alive], in_order=True)) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            chunks = list(client.chat.completions.create(model="fake-model", stream=True, **CHAT))
            assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 6
            metrics = httpx.get(f"{url}/metrics").text
            assert "streamllm:gateway_retries_total 1\n" in metrics
            assert "streamllm:gateway_lost_streams_total 0\n" in metrics


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'"type":"overloaded_error"'),
        ("/v1/responses", b'"type":"error"'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_an_error_event(path: str, last: bytes) -> None:
    broken = STREAM_HEAD + chunk(ROLE + TOKEN) + chunk(TOKEN + TOKEN[:20])
    with breaking_replica(broken) as dead, gateway(FixedReplicas([dead, NOBODY], in_order=True)) as url:
        data = httpx.post(f"{url}{path}", json={**CHAT, "stream": True}).content
        assert data.startswith(ROLE + TOKEN + TOKEN)
        farewell = data.removeprefix(ROLE + TOKEN + TOKEN)
        assert b"The replica that was answering is gone" in farewell
        assert last in farewell
        assert farewell.endswith(b"\n\n")
        assert "streamllm:gateway_lost_streams_total 1\n" in httpx.get(f"{url}/metrics").text


def test_the_openai_client_sees_the_error_of_a_stream(tmp_path: Path) -> None:
    broken = STREAM_HEAD + chunk(TOKEN)
    with breaking_replica(broken) as dead, gateway(FixedReplicas([dead], in_order=True)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="fake-model", stream=True, **CHAT)
        assert next(stream).choices[0].delta.content == "half"
        with pytest.raises(openai.APIError, match="The replica that was answering is gone"):
            next(stream)


def test_it_is_asked_again_once_only(tmp_path: Path) -> None:
    with (
        breaking_replica(b"") as first,
        breaking_replica(b"", 1) as second,
        real_replica(2, tmp_path) as third,
    ):
        replicas = FixedReplicas([first, second, third[0]], in_order=True)
        with gateway(replicas) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "gone" in answer.json()["error"]["message"]


def test_replicas_that_are_not_there_do_not_count_as_asked(tmp_path: Path) -> None:
    nobodies = [Replica(f"nobody{rank}", "127.0.0.1", 1, rank) for rank in range(3)]
    with contextlib.ExitStack() as stack:
        alive, _ = stack.enter_context(real_replica(3, tmp_path))
        with gateway(FixedReplicas([*nobodies, alive], in_order=True)) as url:
            assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
            # They are left alone for a while.
            answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
            assert answer.headers["x-streamllm-replica"] == alive.id
            assert "streamllm:gateway_retries_total 3\n" in httpx.get(f"{url}/metrics").text


def test_without_a_replica_a_request_is_told_to_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamllm.deploy.gateway.REPLICA_WAIT", 0.2)
    with real_replica(0, tmp_path) as (replica, _):
        replicas = FixedReplicas([replica])
        with gateway(replicas) as url:
            replicas.running.clear()
            assert httpx.get(f"{url}/health").status_code == 503
            answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]


# -- what concerns all -------------------------------------------------------------------------------------


def test_metrics_by_replica_and_together(pair: FixedReplicas) -> None:
    name = "streamllm:generation_tokens_total"
    with gateway(pair) as url:
        before = [float(line.split()[-1]) for line in _lines(url, "/metrics", name)]
        for number in range(4):
            httpx.post(f"{url}/v1/completions", json={"prompt": f"{number}" * 600, "max_tokens": 3})
        each = _lines(url, "/metrics", name)
        assert [line.partition('replica="')[2].partition('"')[0] for line in each] == ["replica0", "replica1"]
        values = [float(line.split()[-1]) for line in each]
        grown = [now - then for now, then in zip(values, before, strict=True)]
        assert sum(grown) == 12 and min(grown) > 0
        (line,) = _lines(url, "/metrics/sum", name)
        assert float(line.split()[-1]) == sum(values)
        assert httpx.get(f"{url}/load").json() == {"server_load": 0, "num_running": 0, "num_waiting": 0}


def _lines(url: str, path: str, name: str) -> list[str]:
    """The samples of a metric."""
    return [line for line in httpx.get(url + path).text.splitlines() if line.startswith(name)]


def test_stored_responses_are_found_where_they_are(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for number in range(4):
            asked = f"{number} " * 300
            first = client.responses.create(model="fake-model", input=asked, max_output_tokens=4)
            assert client.responses.retrieve(first.id).id == first.id
            second = client.responses.create(
                model="fake-model", input="and", max_output_tokens=4, previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(first.id)
        answer = httpx.get(f"{url}/v1/responses/..%2F..%2Fmetrics%0d%0aX: y")
        assert answer.status_code == 404


def test_files_are_kept_in_one_place_and_pass_through_in_pieces(pair: FixedReplicas) -> None:
    with gateway(pair, max_body_bytes=65536) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        content = b'{"custom_id": "1"}\n' * 20000
        made = client.files.create(file=("data.jsonl", content), purpose="batch")
        assert client.files.content(made.id).content == content
        assert [file.id for file in client.files.list()] == [made.id]


def test_the_cache_is_reset_everywhere_by_who_may(tmp_path: Path) -> None:
    keys = {"admin_api_key": ("admin",)}
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(real_replica(rank, tmp_path, **keys))[0] for rank in (0, 1))
        with gateway(FixedReplicas([first, second]), **keys) as url:
            assert httpx.post(f"{url}/reset_prefix_cache").status_code == 401
            right = {"Authorization": "Bearer admin"}
            assert httpx.post(f"{url}/reset_prefix_cache", headers=right).status_code == 200
            answer = httpx.post(f"{url}/v1/load_lora_adapter", headers=right, json={})
            assert answer.status_code == 501
            assert "--lora-modules" in answer.json()["error"]["message"]


def test_without_keys_nobody_changes_the_state(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        answer = httpx.post(f"{url}/reset_prefix_cache")
        assert answer.status_code == 403
        assert "--admin-api-key" in answer.json()["error"]["message"]


def test_a_replica_may_be_asked_by_its_rank(pair: FixedReplicas) -> None:
    with gateway(pair) as url:
        for rank in (0, 1):
            answer = httpx.get(f"{url}/v1/requests", params={"replica": rank})
            assert answer.headers["x-streamllm-replica"] == f"replica{rank}"
