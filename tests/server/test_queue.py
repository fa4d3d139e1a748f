"""A full queue: refused at once, in OpenAI's shape, with the time to come again; and who goes first."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from serving import MODEL, run_server

from streamllm.engine.stats import RequestRecord
from streamllm.server.pace import Pace


def record(finished_time: float, reason: str = "stop") -> RequestRecord:
    return RequestRecord("a", 0.0, None, None, None, finished_time, 1, 1, 0, reason)


async def post_all(url: str, bodies: list[dict]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


async def test_what_exceeds_the_queue_is_turned_away_and_the_rest_is_served():
    with run_server(max_num_seqs=2, step_seconds=0.004, engine_settings={"max_num_queued_reqs": 4}) as server:
        bodies = [{"prompt": f"{index:04}", "max_tokens": 20, "temperature": 0} for index in range(50)]
        answers = await post_all(server.url, bodies)
        refused = [answer for answer in answers if answer.status_code == 429]
        served = [answer for answer in answers if answer.status_code == 200]
        assert len(refused) + len(served) == 50
        assert 6 <= len(served) < 25 and len(refused) > 25
        for answer in refused:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "4" in error["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert {answer.json()["choices"][0]["finish_reason"] for answer in served} == {"length"}
        server.canary()
        assert server.stats().finished["length"] == len(served) + 1


async def test_nobody_waits_to_be_refused():
    settings = {"max_num_queued_reqs": 4}
    with run_server(max_num_seqs=2, step_seconds=0.2, engine_settings=settings) as server:
        body = {"prompt": "a", "n": 6, "max_tokens": 300}
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client, asyncio.TaskGroup() as group:
            served = group.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(server.wait_for, lambda: server.stats().num_running == 2)
            rounds = [await post_all(server.url, [{"prompt": "a", "max_tokens": 1}] * 44) for _ in range(3)]
            stats = server.stats()
            server.executor.step_seconds = 0
        assert {answer.status_code for answers in rounds for answer in answers} == {429}
        assert (stats.num_running, stats.num_waiting) == (2, 4)  # for another minute
        # The best of three, for the machine may have other things to do.
        assert min(max(answer.elapsed.total_seconds() for answer in answers) for answers in rounds) < 1
        assert served.result().status_code == 200
        server.canary()


def test_every_choice_counts_and_places_return():
    with run_server(max_num_seqs=2, step_seconds=0.004, engine_settings={"max_num_queued_reqs": 4}) as server:

        def status(**fields) -> int:
            return server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}).status_code

        assert status(n=7) == status(n=7, stream=True) == status(best_of=7) == 429
        # One of many prompts too many: none of them runs.
        assert status(n=6, prompt=["a", "b"]) == 429
        assert server.is_idle()
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                body = {"prompt": "a", "n": 6, "max_tokens": 900}
                httpx.post(server.url + "/v1/completions", json=body, timeout=0.1)
            server.wait_idle()
            assert status(n=6) == 200


async def test_a_limit_of_prompt_tokens():
    with run_server(
        max_num_seqs=1, step_seconds=0.004, engine_settings={"max_num_queued_tokens": 100}
    ) as server:
        answers = await post_all(server.url, [{"prompt": "x" * 60, "max_tokens": 20}] * 5)
        codes = [answer.status_code for answer in answers]
        assert 1 <= codes.count(200) < 5 and codes.count(200) + codes.count(429) == 5
        # A prompt longer than the limit is served when nothing else is there.
        server.wait_idle()
        assert server.post("/v1/completions", {"prompt": "x" * 300, "max_tokens": 1}).status_code == 200


def test_openais_client_sees_a_rate_limit():
    with (
        run_server(max_num_seqs=1, engine_settings={"max_num_queued_reqs": 0}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError) as refusal:
            client.completions.create(model=MODEL, prompt="a", n=2)
        assert refusal.value.code == "queue_full" and "0" in refusal.value.body["message"]
        assert refusal.value.response.headers["retry-after"] == "1"


def test_the_time_to_come_again_follows_the_pace():
    now = 100.0
    pace = Pace(clock=lambda: now)
    assert pace.retry_after(50) == 1
    for second in range(10):
        pace.note(record(90.0 + second))
    # Ten in ten seconds.
    assert pace.retry_after(0) == 1
    assert pace.retry_after(7) == 7
    assert pace.retry_after(1000) == 60
    pace.note(record(99.0, "abort"))
    assert pace.retry_after(7) == 7
    now = 1000.0
    assert pace.retry_after(7) == 1


# -- priority ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 1.5, "1", [], 2**63, -(2**70)])
def test_priorities_that_are_no_integers(server, value):
    response = server.post("/v1/completions", {"prompt": "a", "priority": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority" in response.json()["error"]["message"]


@pytest.mark.parametrize("policy, first", [("priority", "urgent"), ("fcfs", "patient")])
async def test_lower_priorities_run_first(policy, first):
    settings = {"scheduling_policy": policy}
    with run_server(max_num_seqs=1, step_seconds=0.003, engine_settings=settings) as server:
        order = []

        async def ask(client, name, priority, max_tokens):
            body = {"prompt": name, "priority": priority, "max_tokens": max_tokens}
            await client.post("/v1/completions", json=body)
            order.append(name)

        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client, asyncio.TaskGroup() as group:
            group.create_task(ask(client, "running", -9, 60))
            await asyncio.to_thread(server.wait_for, lambda: server.stats().num_running == 1)
            group.create_task(ask(client, "patient", 5, 3))
            await asyncio.to_thread(server.wait_for, lambda: server.stats().num_waiting == 1)
            group.create_task(ask(client, "urgent", -1, 3))
        assert order[:2] == ["running", first]
