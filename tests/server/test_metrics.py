"""Metrics and the log line."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time

import httpx
import pytest
from helpers.fake_adapter import write_adapter
from helpers.fake_model import FakeRunner
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


BLOCK_LIVES = (
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
)


def test_block_lives_are_measured_on_demand(server):
    assert not [name for name in scrape(server) if name.startswith("kv_block_")]


def test_block_lives():
    settings = {"num_blocks": 8, "kv_cache_metrics": True, "kv_cache_metrics_sample": 1}
    with run_server(engine_settings=settings) as server:
        start = time.monotonic()
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 1}).is_success
        # Blocks that are found again, in between; none was handed out twice.
        assert [scrape(server)[f"{name}_count"] for name in BLOCK_LIVES] == [2, 2, 0]
        for letter in "bcd":
            assert server.post("/v1/completions", {"prompt": letter * 100, "max_tokens": 1}).is_success
        server.wait_idle()
        samples = scrape(server)
        elapsed = time.monotonic() - start
    lifetimes, idle, gaps = (samples[f"{name}_count"] for name in BLOCK_LIVES)
    # The prompt's two full blocks were taken up twice each, so each has one gap.
    assert lifetimes == idle > 8 and gaps == 2
    assert 0 < samples["kv_block_idle_before_evict_seconds_sum"] < samples["kv_block_lifetime_seconds_sum"]
    assert samples["kv_block_lifetime_seconds_sum"] < lifetimes * elapsed
    assert 0 < samples["kv_block_reuse_gap_seconds_sum"] < 2 * elapsed
    assert samples["kv_block_lifetime_seconds_bucket{le=1800.0}"] == lifetimes


def lora_info(server) -> list[dict[str, str]]:
    """The labels of each series of ``lora_requests_info``, whose value is the time of the scrape."""
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    (family,) = (family for family in families if family.name == "streamllm:lora_requests_info")
    assert family.type == "gauge"
    assert all(abs(sample.value - time.time()) < 5 for sample in family.samples)
    return [sample.labels for sample in family.samples]


def test_lora_requests_info(tmp_path):
    """With room for one adapter at once; ``waiting`` waits for the other one's slot."""
    settings = {"enable_lora": True, "max_loras": 1}
    settings["runner"] = FakeRunner(block_size=16, max_num_batched_tokens=64)
    with run_server(step_seconds=0.005, engine_settings=settings) as server:
        nothing = {"model_name": MODEL, "engine": "0", "max_lora": "1", "running_lora_adapters": "",
                   "waiting_lora_adapters": ""}  # fmt: skip
        assert lora_info(server) == [nothing]
        with contextlib.ExitStack() as stack:
            for number, name in enumerate((None, "runs", "runs", "waits", "waits")):
                if name is not None:
                    body = {"lora_name": name, "lora_path": write_adapter(tmp_path / name, name)}
                    server.post("/v1/load_lora_adapter", body)
                body = {"prompt": "a", "max_tokens": 3000, "stream": True, "model": name}
                stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body))
                server.wait_for(lambda n=number: (s := server.stats()).num_running + s.num_waiting == n + 1)
            server.wait_for(lambda: server.stats().num_running == 3)
            used = {"running_lora_adapters": "runs", "waiting_lora_adapters": "waits"}
            assert lora_info(server) == [{**nothing, **used}]
        server.wait_idle()
        assert lora_info(server) == [nothing]


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
