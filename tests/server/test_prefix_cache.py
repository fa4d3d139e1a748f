"""The prefix cache seen from outside: cached_tokens, counters, salts, and the call that forgets it."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import events, run_server
from test_metrics import scrape

PROMPT = "".join(f"{number:04}" for number in range(20)) + "!"
"""81 tokens: five full blocks and one token."""

CACHED = 80


@pytest.fixture
def cold(server):
    server.post("/reset_prefix_cache", b"")
    return server


def ask(server, *, stream: bool, **fields) -> dict:
    """The usage of a request for ``PROMPT``."""
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": stream, **fields}
    if not stream:
        return server.post("/v1/completions", body).json()["usage"]
    body["stream_options"] = {"include_usage": True}
    return events(server.post("/v1/completions", body))[-1]["usage"]


def cached(usage: dict) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens(cold, stream):
    before = scrape(cold)
    assert [cached(ask(cold, stream=stream)) for _ in range(3)] == [0, CACHED, CACHED]
    assert cached(ask(cold, stream=stream, n=3)) == CACHED  # a prompt counts once
    assert cached(ask(cold, stream=stream, prompt=PROMPT[:-1])) == 64  # the last token is computed again
    assert cached(ask(cold, stream=stream, prompt=PROMPT[:70])) == 64
    assert cached(ask(cold, stream=stream, prompt="-" + PROMPT)) == 0
    assert cached(ask(cold, stream=stream, prompt=[PROMPT, PROMPT])) == 2 * CACHED
    after = scrape(cold)
    risen = {name: after[name] - before[name] for name in before}
    assert risen["prefix_cache_hits_total"] == risen["prompt_tokens_cached_total"] == 5 * CACHED + 2 * 64
    assert risen["prefix_cache_queries_total"] == risen["prompt_tokens_total"]


def test_chat_reports_them_too(cold):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    usages = [cold.post("/v1/chat/completions", body).json()["usage"] for _ in range(2)]
    assert cached(usages[0]) == 0
    assert cached(usages[1]) == usages[1]["prompt_tokens"] // 16 * 16 > 64


def test_running_usage_reports_them(cold):
    ask(cold, stream=False)
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    usages = [chunk["usage"] for chunk in events(cold.post("/v1/completions", body))]
    assert {cached(usage) for usage in usages} == {CACHED}


def test_salts_keep_requests_apart(cold):
    asked = [None, "a", "b", None, "a", "b", "A"]
    salted = [{"cache_salt": salt} if salt else {} for salt in asked]
    found = [cached(ask(cold, stream=False, **fields)) for fields in salted]
    assert found == [0, 0, 0, CACHED, CACHED, CACHED, 0]


@pytest.mark.parametrize("salt", ["", "x" * 129, 5, True, ["a"], {"a": 1}])
@pytest.mark.parametrize("stream", [False, True])
def test_salts_that_are_refused(server, salt, stream):
    response = server.post("/v1/completions", {"prompt": "a", "cache_salt": salt, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "cache_salt" in error["message"]
    server.canary()


@pytest.mark.parametrize("salt", ["x", "x" * 128, "漢字", None])
def test_salts_that_are_accepted(server, salt):
    assert server.post("/v1/completions", {"prompt": "a", "cache_salt": salt}).status_code == 200


def test_reset_forgets_the_cache(cold):
    ask(cold, stream=False)
    assert cold.stats().memory.cached_blocks > 0
    response = cold.post("/reset_prefix_cache", b"")
    assert (response.status_code, response.content) == (200, b"")
    assert cold.stats().memory.cached_blocks == 0
    assert cached(ask(cold, stream=False)) == 0
    assert httpx.get(cold.url + "/reset_prefix_cache").status_code == 405


def test_reset_while_a_request_runs():
    with run_server(step_seconds=0.005) as server:
        body = {"prompt": PROMPT, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.post("/reset_prefix_cache", b"").status_code == 200
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        server.canary()


def test_without_prefix_cache():
    with run_server(engine_settings={"enable_prefix_caching": False}) as server:
        assert [cached(ask(server, stream=stream)) for stream in (False, True, False)] == [0, 0, 0]
        samples = scrape(server)
        assert samples["prefix_cache_hits_total"] == 0
