"""Batches as OpenAI's client sees them."""

from __future__ import annotations

import httpx
import openai
import pytest
from batch_client import CHAT, begin, chat_line, client_of, content, store, wait_for_end
from serving import MODEL, run_server, text_script


@pytest.fixture(scope="module")
def server():
    """A model that says "Hi there." and ends."""
    settings = {"max_num_queued_reqs": 4}
    with run_server(script=text_script("Hi there.", ends=True), engine_settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with client_of(server.url) as one:
        yield one


def finished(client, lines, endpoint=CHAT, **fields):
    """A batch that has ended, and the lines of its two files."""
    batch = wait_for_end(client, begin(client, lines, endpoint, **fields).id)
    return batch, content(client, batch.output_file_id), content(client, batch.error_file_id)


def failed(client, lines, endpoint=CHAT) -> list[tuple[int | None, str, str | None]]:
    """(line, code, param) of the errors of a batch that fails."""
    batch, output, errors = finished(client, lines, endpoint)
    assert batch.status == "failed" and batch.failed_at >= batch.created_at and not output and not errors
    assert batch.in_progress_at is None and batch.request_counts.total == 0
    assert all(error.message for error in batch.errors.data)
    return [(error.line, error.code, error.param) for error in batch.errors.data]


# -- life --------------------------------------------------------------------------------------------------


def test_lines_that_succeed_and_lines_that_fail(server, client):
    lines = [chat_line(f"request {n}") for n in range(40)]
    lines[3]["body"]["model"] = "nope"
    lines[7]["body"]["temperature"] = -1
    lines[8]["body"]["stream"] = True
    lines[9]["body"] = {}
    batch, output, errors = finished(client, ["", *lines[:20], "  ", *lines[20:]], metadata={"a": "b"})
    assert (batch.status, batch.object, batch.endpoint, batch.metadata) == (
        "completed", "batch", CHAT, {"a": "b"},
    )  # fmt: skip
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 36, 4)
    assert batch.errors is None and batch.expires_at == batch.created_at + 86400
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    # In the order of the input, whatever ended first.
    assert [line["custom_id"] for line in output] == [
        f"request {n}" for n in range(40) if n not in (3, 7, 8, 9)
    ]
    alone = server.post(CHAT, lines[0]["body"]).json()
    for line in output:
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        response = line["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"] == alone["choices"] and set(response["body"]) == set(alone)
    assert len({line["id"] for line in output + errors}) == 40
    assert len({line["response"]["request_id"] for line in output + errors}) == 40
    by_id = {line["custom_id"]: line["response"] for line in errors}
    assert {name: response["status_code"] for name, response in by_id.items()} == {
        "request 3": 404, "request 7": 400, "request 8": 400, "request 9": 400,
    }  # fmt: skip
    params = [response["body"]["error"]["param"] for response in by_id.values()]
    assert params == ["model", "temperature", "stream", "messages"]
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert client.files.retrieve(file_id).purpose == "batch_output"
    server.canary()


@pytest.mark.parametrize(
    "endpoint, body",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_every_endpoint(server, client, endpoint, body):
    bodies = [{"model": MODEL, **body}, {"model": "nope", **body}, {**body, "background": True}]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": endpoint, "body": body}
        for n, body in enumerate(bodies)
    ]
    _, output, errors = finished(client, lines, endpoint)
    (answer,) = [line["response"]["body"] for line in output]
    alone = server.post(endpoint, bodies[0]).json()
    for name in ("choices", "data", "content"):
        assert answer.get(name) == alone.get(name)
    assert set(answer) == set(alone)
    unknown, background = [line["response"] for line in errors]
    refusal = server.post(endpoint, bodies[1])
    assert unknown["status_code"] == refusal.status_code == 404
    assert unknown["body"]["error"] == refusal.json()["error"]
    assert set(unknown["body"]) == set(refusal.json())  # Anthropic's shape on its route
    assert "background" in background["body"]["error"]["message"]


def test_a_response_that_a_line_stores_belongs_to_its_key():
    with run_server(script=text_script("Hi.", ends=True), api_key=("a", "b")) as server:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"input": "hi"}}
        with client_of(server.url, "a") as ours, client_of(server.url, "b") as theirs:
            batch, (answer,), _ = finished(ours, [line], "/v1/responses")
            response_id = answer["response"]["body"]["id"]
            assert ours.responses.retrieve(response_id).output_text == "Hi."
            for ask in (theirs.batches.retrieve, theirs.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    ask(batch.id)
            for ask in (theirs.responses.retrieve, theirs.files.content):
                with pytest.raises(openai.NotFoundError):
                    ask(response_id if "resp" in str(ask) else batch.output_file_id)
            assert theirs.batches.list().data == []
            assert [each.id for each in ours.batches.list()] == [batch.id]


def test_lists(client):
    ids = [begin(client, [chat_line("a")]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
    older = client.batches.list(limit=100, after=ids[1]).data
    assert older[0].id == ids[0]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_x")


# -- what is wrong -----------------------------------------------------------------------------------------


def test_batches_that_are_refused(client):
    file_id = store(client, [chat_line("a")])
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for name, value in (
        ("endpoint", "/v1/models"),
        ("endpoint", 5),
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("completion_window", "0h"),
        ("metadata", {str(n): "" for n in range(17)}),
        ("metadata", {"a": "b" * 513}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**good, name: value})
        assert caught.value.param.startswith(name), (name, value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(**{**good, "input_file_id": "file-nope"})
    assert missing.value.param == "input_file_id"
    batch, _, _ = finished(client, [chat_line("a")])
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        client.batches.create(**{**good, "input_file_id": batch.output_file_id})


def test_files_that_are_refused(client):
    line = chat_line("a")
    assert failed(client, []) == failed(client, ["", " "]) == [(None, "empty_file", None)]
    wrong = [
        line,
        '{"custom_id": ',
        {**line, "custom_id": 5},
        {name: value for name, value in line.items() if name != "custom_id"},
        {**chat_line("b"), "custom_id": ""},
        "",
        {**chat_line("c"), "method": "GET"},
        {**chat_line("d"), "url": "/v1/completions"},
        {**chat_line("e"), "body": [1]},
        "[" * 100_000,
        line,
        "[1]",
    ]
    assert failed(client, wrong) == [
        (2, "invalid_json_line", None),
        (3, "invalid_line", "custom_id"),
        (4, "invalid_line", "custom_id"),
        (5, "invalid_custom_id", "custom_id"),
        (7, "invalid_method", "method"),
        (8, "mismatched_url", "url"),
        (9, "invalid_line", "body"),
        (10, "invalid_json_line", None),
        (11, "duplicate_custom_id", "custom_id"),
        (12, "invalid_json_line", None),
    ]
    many = failed(client, ["x"] * 5000)
    assert many == [(n, "invalid_json_line", None) for n in range(1, 101)]


def test_a_line_that_is_too_long():
    with run_server(max_body_bytes=1024) as server, client_of(server.url) as client:
        lines = [chat_line("a"), chat_line("b", user="x" * 20_000), chat_line("c", user="x" * 20_000)]
        assert failed(client, lines) == [(2, "line_too_long", None), (3, "line_too_long", None)]


# -- ends --------------------------------------------------------------------------------------------------


def test_cancelling_keeps_what_has_been_answered():
    with run_server(step_seconds=0.002, max_num_seqs=4) as server, client_of(server.url) as client:
        lines = [chat_line(str(n), max_tokens=2 if n < 5 else 3000) for n in range(300)]
        batch = begin(client, lines)
        server.wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = wait_for_end(client, batch.id)
        server.wait_idle()
        assert ended.status == "cancelled" and ended.cancelling_at <= ended.cancelled_at
        assert (ended.request_counts.completed, ended.request_counts.failed) == (5, 295)
        assert [line["custom_id"] for line in content(client, ended.output_file_id)] == list("01234")
        errors = content(client, ended.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert [line["custom_id"] for line in errors] == [str(n) for n in range(5, 300)]
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert client.files.delete(batch.input_file_id).deleted
        done = wait_for_end(client, begin(client, lines[:1]).id)
        with pytest.raises(openai.ConflictError, match="completed"):
            client.batches.cancel(done.id)


@pytest.mark.slow
def test_a_batch_whose_time_is_over():
    with run_server(step_seconds=0.002, max_num_seqs=4) as server, client_of(server.url) as client:
        lines = [chat_line(str(n), max_tokens=1 if n < 2 else 4000) for n in range(20)]
        batch = begin(client, lines, completion_window="2s")
        ended = wait_for_end(client, batch.id)
        server.wait_idle()
        assert ended.status == "expired" and ended.expired_at >= ended.expires_at == ended.created_at + 2
        assert (ended.request_counts.completed, ended.request_counts.failed) == (2, 18)
        assert len(content(client, ended.output_file_id)) == 2
        assert {line["error"]["code"] for line in content(client, ended.error_file_id)} == {"batch_expired"}


# -- beside others -----------------------------------------------------------------------------------------


def test_a_full_queue_is_waited_for(server, client):
    """Four may wait; the lines of several batches are tried again until they find room."""
    lines = [chat_line(str(n), n=2, temperature=1) for n in range(60)]
    batches = [begin(client, lines) for _ in range(3)]
    for batch in batches:
        assert wait_for_end(client, batch.id).request_counts.completed == 60


@pytest.mark.slow
def test_what_can_never_find_room_fails(client):
    batch, output, errors = finished(client, [chat_line("a", n=100, temperature=1), chat_line("b")])
    assert [line["custom_id"] for line in output] == ["b"]
    assert errors[0]["response"]["status_code"] == 429
    assert batch.status == "completed"


@pytest.mark.slow
def test_live_traffic_finds_room():
    with run_server(step_seconds=0.002, max_num_seqs=32) as server, client_of(server.url) as client:
        begin(client, [chat_line(str(n), max_tokens=100) for n in range(2000)])
        server.wait_for(lambda: server.stats().num_running == 16)
        live = {"prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        running = []
        with httpx.stream("POST", server.url + "/v1/completions", json=live, timeout=30) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number % 100 == 0:
                    running.append(server.stats().num_running)
        # The lines that ran at first end; then there are the request and an eighth of the lines.
        assert running[-1] <= 1 + 16 // 8 and min(running[len(running) // 2 :]) >= 2, running
        server.wait_for(lambda: server.stats().num_running == 16)


def test_lines_are_behind_others_under_the_priority_policy():
    settings = {"scheduling_policy": "priority"}
    with run_server(engine_settings=settings) as server, client_of(server.url) as client:
        priorities = []
        original = server.engine.add_requests

        async def spy(*args, **kwargs):
            priorities.append(kwargs["priority"])
            return await original(*args, **kwargs)

        server.engine.add_requests = spy
        finished(client, [chat_line("a", max_tokens=1)])
        finished(client, [chat_line("a", max_tokens=1, priority=7)])
        server.post(CHAT, chat_line("a", max_tokens=1)["body"])
        assert priorities == [1_000_000, 7, 0]


def test_a_request_timeout_is_not_for_lines():
    settings = {"step_seconds": 0.005, "request_timeout": 0.2}
    with run_server(**settings) as server, client_of(server.url) as client:
        line = chat_line("a", max_tokens=150)
        assert server.post(CHAT, line["body"]).status_code == 504
        batch, _, _ = finished(client, [line])
        assert batch.request_counts.completed == 1


def test_keys_of_the_document(server):
    document = httpx.get(server.url + "/openapi.json").json()
    assert "requestBody" not in document["paths"]["/v1/batches"]["get"]
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["purpose", "file"]
    assert "/v1/files" in httpx.get(server.url + "/docs").text
