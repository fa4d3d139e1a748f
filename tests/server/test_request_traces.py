"""Why a request was slow: the routes that say so, live and afterwards."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import run_server
from test_errors import check_error

SECRET = "a text that no trace may show"
MESSAGES = [{"role": "user", "content": "hi"}]


def trace_of(server, name):
    """The only request behind a trace."""
    answer = httpx.get(f"{server.url}/v1/requests/{name}/trace")
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == name
    (trace,) = answer.json()["requests"]
    return trace


def kinds(trace):
    return [event["event"] for event in trace["events"]]


def test_a_finished_request(server):
    headers = {"x-request-id": "mine/1"}
    body = {"prompt": SECRET * 6, "max_tokens": 20}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers).json()
    trace = trace_of(server, answer["id"])
    assert trace == trace_of(server, "mine/1") == trace_of(server, trace["id"])
    prompt = answer["usage"]["prompt_tokens"]
    assert (trace["state"], trace["finish_reason"]) == ("finished", "length")
    assert (trace["prompt_tokens"], trace["generated_tokens"]) == (prompt, 20)
    assert trace["cached_tokens"] + trace["computed_tokens"] == prompt
    # Steps of 64 tokens.
    chunks = [event["tokens"] for event in trace["events"] if event["event"] == "prefill"]
    assert sum(chunks) == prompt and max(chunks) <= 64 and len(chunks) >= 3
    assert kinds(trace) == ["queued", "scheduled", *["prefill"] * len(chunks), "first_token", "finished"]
    assert trace["waited_ms"].keys() == {"next_step"}
    times = trace["times_ms"]
    stages = sum(times[name] for name in ("tokenize", "queue", "prefill", "decode"))
    assert stages == pytest.approx(times["total"], abs=0.1)
    assert times["queue"] == pytest.approx(sum(trace["waited_ms"].values()), abs=0.01)
    assert sum(step["steps"] for step in trace["steps"]) == len(chunks) + 19
    assert trace["steps"][0]["prompt_tokens"] == 64 and trace["steps"][-1]["prompt_tokens"] == 0
    assert str(prompt) in trace["summary"] and SECRET not in json.dumps(trace)


def test_the_cache_and_several_prompts(server):
    body = {"prompt": ["z" * 40, "y" * 40], "max_tokens": 2}
    assert server.post("/v1/completions", body).status_code == 200
    answer = server.post("/v1/completions", body).json()
    found = httpx.get(f"{server.url}/v1/requests/{answer['id']}/trace").json()["requests"]
    assert [trace["id"] for trace in found] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert [(trace["cached_tokens"], trace["computed_tokens"]) for trace in found] == [(32, 8)] * 2


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "store": False}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "model": "fake-model"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)  # fmt: skip
def test_the_ids_of_every_route(server, path, body):
    answer = server.post(path, body).json()
    trace = trace_of(server, answer["id"])
    assert (trace["response_id"], trace["path"]) == (answer["id"], path)


def test_embeddings(server):
    answer = httpx.post(
        server.url + "/v1/embeddings", json={"input": "a" * 10}, headers={"x-request-id": "e"}
    )
    assert answer.status_code == 200
    trace = trace_of(server, "e")
    assert (trace["computed_tokens"], trace["finish_reason"]) == (10, "stop")
    assert trace["times_ms"]["time_to_first_token"] is None


def test_live_requests_and_what_they_wait_for():
    with run_server(step_seconds=0.01, max_num_seqs=1) as server:
        body = {"prompt": SECRET, "max_tokens": 3000, "stream": True}
        first, second = {"x-request-id": "first"}, {"x-request-id": "second"}
        url = server.url + "/v1/completions"
        with (
            httpx.stream("POST", url, json=body, headers=first) as running,
            httpx.stream("POST", url, json={**body, "max_tokens": 1}, headers=second) as waiting,
        ):
            server.wait_for(lambda: server.stats().num_waiting == 1)
            lines = running.iter_lines()
            next(lines)
            rows = httpx.get(server.url + "/v1/requests").json()["data"]
            states = {row["x_request_id"]: row["state"] for row in rows}
            assert states["second"] == "queued" and states["first"] in ("prefill", "decoding")
            trace = trace_of(server, "second")
            assert trace["state"] == "queued" and trace["finish_reason"] is None and trace["steps"] == []
            assert trace["waited_ms"]["slots"] > 0 and "slots" in trace["summary"]
            # Long against the step before the first that could have taken it, whose time is nobody's.
            server.wait_for(lambda: trace_of(server, "second")["waited_ms"]["slots"] > 500)
            running.close()
            assert waiting.read()
        server.wait_idle()
        trace = trace_of(server, "second")
        assert trace["waited_ms"]["slots"] > 0.9 * trace["times_ms"]["queue"]
        assert trace_of(server, "first")["finish_reason"] == "abort"
        rows = httpx.get(server.url + "/v1/requests?limit=1").json()["data"]
        assert [(row["x_request_id"], row["state"]) for row in rows] == [("second", "finished")]
        assert SECRET not in json.dumps(rows)


def test_preemptions_are_shown():
    with run_server(step_seconds=0.001, engine_settings={"num_blocks": 20}) as server:
        headers = {"x-request-id": "victims"}
        body = {"prompt": ["a" * 20, "b" * 20, "c" * 20], "max_tokens": 120}
        answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=20)
        assert answer.status_code == 200
        traces = httpx.get(server.url + "/v1/requests/victims/trace").json()["requests"]
    victim = max(traces, key=lambda trace: trace["preemptions"])
    assert victim["preemptions"] == kinds(victim).count("preempted") > 0
    lost = [event["lost_tokens"] for event in victim["events"] if event["event"] == "preempted"]
    assert sum(lost) > 0 and kinds(victim).count("scheduled") == len(lost) + 1
    assert victim["waited_ms"]["kv_blocks"] > 0 and "preempted" in victim["summary"]


def test_refused(server):
    assert check_error(httpx.get(server.url + "/v1/requests/nobody/trace"), 404)["param"] == "id"
    for query in ("limit=0", "limit=x", "limit=1001", "limit="):
        assert check_error(httpx.get(f"{server.url}/v1/requests?{query}"), 400)["param"] == "limit"
    for query in ("seconds=0", "seconds=nan", "seconds=-1", "seconds=1e9"):
        assert check_error(httpx.get(f"{server.url}/debug/perfetto?{query}"), 400)["param"] == "seconds"


def test_perfetto():
    with run_server(step_seconds=0.002) as server:
        for _ in range(2):
            server.post("/v1/completions", {"prompt": SECRET * 6, "max_tokens": 20})
        answer = httpx.get(server.url + "/debug/perfetto")
        assert "attachment" in answer.headers["content-disposition"] and SECRET not in answer.text
        rows = answer.json()["traceEvents"]
        assert httpx.get(server.url + "/debug/perfetto?seconds=0.001").json()["traceEvents"][4:] == []
    by_kind: dict[str, list[dict]] = {}
    for row in rows:
        by_kind.setdefault(row["ph"], []).append(row)
    assert by_kind.keys() == {"M", "X", "C", "i"}
    tracks = {(row["pid"], row["tid"]) for row in by_kind["M"] if row["name"] == "thread_name"}
    slices = by_kind["X"]
    assert {(row["pid"], row["tid"]) for row in slices} <= tracks
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in slices)
    names = {row["name"] for row in slices if row["pid"] == 1}
    assert names >= {"schedule", "submit", "wait", "update", "deliver", "step"}
    assert {row["name"] for row in slices if row["pid"] == 2} >= {"queue", "prefill", "decode"}
    # Slices of one track lie side by side, or within each other.
    for track in tracks:
        on_track = sorted(
            (r for r in slices if (r["pid"], r["tid"]) == track), key=lambda r: (r["ts"], -r["dur"])
        )
        open_ends: list[float] = []
        for row in on_track:
            end = row["ts"] + row["dur"]
            while open_ends and open_ends[-1] <= row["ts"] + 0.2:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.2, row
            open_ends.append(end)


def test_perfetto_is_for_administrators():
    with run_server(api_key=("key",), admin_api_key=("root",)) as server:
        for key, status in (("key", 403), ("root", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(server.url + "/debug/perfetto", headers=headers).status_code == status
            assert httpx.get(server.url + "/v1/requests", headers=headers).status_code == 200
