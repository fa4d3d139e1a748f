"""Metrics and the log line."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, run_server

from streamllm.server.log_stats import describe, log_stats


def scrape(server, prefix="streamllm:"):
    """The engine's samples: name{labels without the model's} -> value."""
    response = httpx.get(server.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if not sample.name.startswith(prefix):
                assert sample.name.startswith(("http_", "process_"))
                continue
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == (MODEL, "0")
            labels = "".join(f"{{{key}={value}}}" for key, value in sample.labels.items())
            samples[sample.name.removeprefix(prefix) + labels] = sample.value
    return samples


def test_counters_agree_with_usage():
    with run_server(step_seconds=0.001) as server:
        assert scrape(server)["prompt_tokens_total"] == 0
        prompt = completion = 0
        for fields in ({}, {"n": 3}, {"prompt": ["a", "bc"]}, {"max_tokens": 40}):
            usage = server.post("/v1/completions", {"prompt": "hello", **fields}).json()["usage"]
            prompt, completion = prompt + usage["prompt_tokens"], completion + usage["completion_tokens"]
        assert server.post("/v1/completions", {"prompt": ""}).status_code == 400
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4000}, timeout=0.05)
        server.wait_idle()
        samples = scrape(server)
        assert samples["prompt_tokens_total"] == prompt + 1
        assert samples["generation_tokens_total"] >= completion
        assert samples["request_success_total{finished_reason=length}"] == 5
        assert samples["request_success_total{finished_reason=abort}"] == 1
        assert samples["request_success_total{finished_reason=stop}"] == 0
        assert samples["time_to_first_token_seconds_count"] == 6
        assert samples["e2e_request_latency_seconds_count"] == 6
        assert samples["time_to_first_token_seconds_bucket{le=2560.0}"] == 6
        assert samples["num_preemptions_total"] == 0


def test_gauges_follow_the_engine():
    with run_server(step_seconds=0.005, max_num_seqs=2) as server:
        body = {"prompt": "a", "max_tokens": 3000, "n": 3, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # closes the response when it is collected
            next(lines)
            samples = scrape(server)
            assert samples["num_requests_running"] == 2
            assert samples["num_requests_waiting"] == 1
            assert 0 < samples["kv_cache_usage_perc"] < 1
        server.wait_idle()
        samples = scrape(server)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "kv_cache_waste_perc", "kv_cache_sharing_perc")  # fmt: skip
        assert [samples[name] for name in names] == [0] * 5


def test_waste_and_sharing():
    with run_server(step_seconds=0.1) as server:
        body = {"prompt": "x" * 32, "max_tokens": 30, "n": 3, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            server.wait_for(lambda: server.stats().num_running == 3)
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            samples = scrape(server)
        # Two blocks of the prompt for all three, and each has begun one of its own.
        assert samples["kv_cache_sharing_perc"] == pytest.approx(1 - 5 / 9)
        assert 0.4 <= samples["kv_cache_waste_perc"] <= 3 * 15 / 80
        server.wait_idle()


def test_gauges_fall_to_zero_when_every_client_leaves():
    with run_server(step_seconds=0.005, max_num_seqs=4) as server:
        body = {"prompt": "a", "max_tokens": 3000, "stream": True}
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body))
            server.wait_for(lambda: server.stats().num_waiting == 8)
            assert scrape(server)["num_requests_waiting"] == 8
        server.wait_idle(timeout=1.0)
        samples = scrape(server)
        assert [samples[f"num_requests_{state}"] for state in ("running", "waiting")] == [0, 0]
        assert samples["request_success_total{finished_reason=abort}"] == 12


def test_log_line(server):
    before = server.stats()
    memory = dataclasses.replace(before.memory, used_blocks=before.num_blocks // 4)
    now = dataclasses.replace(
        before, prompt_tokens=before.prompt_tokens + 100, generation_tokens=before.generation_tokens + 25,
        num_running=2, num_waiting=1, memory=memory,
    )  # fmt: skip
    assert describe(before, before, 10.0) is None
    line = "prompt 10.0 tok/s, generation 2.5 tok/s, running 2, waiting 1, KV usage 25.0%"
    assert describe(before, now, 10.0) == line
    now = dataclasses.replace(
        now,
        prefix_cache_queries=before.prefix_cache_queries + 100,
        prefix_cache_hits=before.prefix_cache_hits + 48,
    )
    assert describe(before, now, 10.0) == line + ", prefix cache hits 48.0%"


async def test_log_only_while_there_is_work(server, caplog):
    idle = server.stats()

    class Engine:
        tokens = 0

        def stats(self):
            return dataclasses.replace(idle, generation_tokens=self.tokens)

    engine = Engine()
    with caplog.at_level(logging.INFO, logger="streamllm.server"):
        task = asyncio.create_task(log_stats(engine, interval=0.01))
        await asyncio.sleep(0.05)
        assert caplog.messages == []
        engine.tokens = 5
        await asyncio.sleep(0.05)
        task.cancel()
    assert len(caplog.messages) == 1 and "generation" in caplog.messages[0]
