"""``streamllm serve --replicas 2`` on a real local Ray cluster, through the real client."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from helpers.live_replicas import LiveReplicas
from helpers.live_server import LiveServer
from helpers.replica_cluster import wait_for

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MODEL = "SmolLM2-135M-Instruct"
FLAGS = ("--threads", "1", "--access-log", "off", "--disable-log-stats", "--kv-cache-memory-bytes", "256MiB")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveReplicas]:
    with LiveReplicas(2, *FLAGS, "--api-key", KEY, headers=HEADERS) as running:
        yield running
    assert running.exit_code == 0, running.stderr


@pytest.fixture
def client(server: LiveReplicas) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(text: str, num_tokens: int) -> dict:
    message = {"role": "user", "content": text}
    return {
        "model": MODEL,
        "messages": [message],
        "max_tokens": num_tokens,
        "extra_body": {"ignore_eos": True},
    }


def wait_until_quiet(server: LiveReplicas, seconds: float = 10.0) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + seconds
    while any(values := [server.sum_of(name) for name in names]):
        assert time.monotonic() < deadline, f"still busy: {values}"
        time.sleep(0.1)


def test_the_client_streams_and_its_key_is_needed(server: LiveReplicas, client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(stream=True, temperature=0, **ask("Say hello.", 16)))
    whole = client.chat.completions.create(temperature=0, **ask("Say hello.", 16))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 8
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    answer = httpx.get(f"{server.url}/v1/models", headers={**HEADERS, "X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_a_client_that_leaves_frees_its_blocks(server: LiveReplicas, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(stream=True, **ask("Tell a long story.", 4000))
    for _, _ in zip(range(4), stream, strict=False):
        pass
    assert server.sum_of("num_requests_running") == 1
    stream.close()
    wait_until_quiet(server)


def test_metrics_name_every_replica_and_add_up(server: LiveReplicas, client: openai.OpenAI) -> None:
    before = server.sum_of("generation_tokens_total")
    for number in range(4):
        client.chat.completions.create(**ask(f"{number} " * 400, 4))
    assert server.sum_of("generation_tokens_total") - before == 16
    assert len(server.replica_ids()) == 2


async def hit_rate(url: str, metric: Callable[[str], float], *, seed: int, at_random: bool = False) -> float:
    """The share of prompt tokens found in a cache, of requests with eight long beginnings, each twice.

    Args:
        at_random: each request has one of two salts, taken at random: what routing it to one of two replicas
            at random would come to.
    """
    rng = random.Random(seed)
    words = ("river", "stone", "light", "cloud", "forest", "engine", "window", "table", "paper", "ocean")
    beginnings = [" ".join(rng.choices(words, k=400)) for _ in range(8)]
    order = [beginning for _ in range(2) for beginning in rng.sample(range(8), 8)]
    queries, hits = metric("prefix_cache_queries_total"), metric("prefix_cache_hits_total")
    gate = asyncio.Semaphore(2)
    async with httpx.AsyncClient(timeout=120, headers=HEADERS) as http:

        async def one(number: int, beginning: int) -> None:
            body = {"prompt": f"{beginnings[beginning]} {number}", "max_tokens": 4}
            if at_random:
                body["cache_salt"] = f"{seed} {rng.randrange(2)}"
            async with gate:
                (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(one(number, beginning) for number, beginning in enumerate(order)))
    queries, hits = metric("prefix_cache_queries_total") - queries, metric("prefix_cache_hits_total") - hits
    return hits / queries


async def test_shared_beginnings_are_found_as_by_one_engine(server: LiveReplicas) -> None:
    routed = await hit_rate(server.url, server.sum_of, seed=1)
    at_random = await hit_rate(server.url, server.sum_of, seed=1, at_random=True)
    with LiveServer(*FLAGS) as single:
        alone = await hit_rate(single.url, single.metric, seed=1)
    assert routed >= 0.9 * alone
    assert routed >= 1.5 * at_random


async def test_a_killed_replica_ends_its_own_streams_only_and_comes_back(server: LiveReplicas) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=240)
    before = server.wait_for_all()
    num_before = server.sum_of("generation_tokens_total")
    lost_before = server.sum_of("gateway_lost_streams_total")
    outcomes: Counter[tuple[str, str]] = Counter()

    async def stream(number: int) -> None:
        request = ask(f"{number}: tell a story.", 300)
        raw = await client.chat.completions.with_raw_response.create(stream=True, **request)
        replica, num_tokens = raw.headers["x-streamllm-replica"], 0
        try:
            async for chunk in raw.parse():
                num_tokens += bool(chunk.choices and chunk.choices[0].delta.content)
            outcomes[replica, "whole"] += 1
        except openai.APIError as error:
            assert "The replica that was answering is gone" in str(error)
            assert num_tokens > 0
            outcomes[replica, "error"] += 1

    streams = [asyncio.create_task(stream(number)) for number in range(32)]
    await asyncio.to_thread(
        wait_for, lambda: server.sum_of("generation_tokens_total") > num_before + 400, 60.0
    )
    server.kill_replica()
    killed_at = time.monotonic()
    # These have no token yet: none is lost.
    streams += [asyncio.create_task(stream(number)) for number in range(32, 40)]
    await asyncio.gather(*streams)
    after = await asyncio.to_thread(server.wait_for_all, 60.0 - (time.monotonic() - killed_at))
    (gone,) = before - after
    assert {replica for replica, outcome in outcomes if outcome == "error"} <= {gone}
    assert outcomes[gone, "whole"] == 0
    assert sum(outcomes.values()) == 40
    lost = server.sum_of("gateway_lost_streams_total") - lost_before
    assert lost == sum(count for (_, outcome), count in outcomes.items() if outcome == "error")
    wait_until_quiet(server)
