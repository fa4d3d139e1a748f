"""What the metrics say after a mixed run is what its clients saw."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import run_server
from test_metrics import scrape

from streamllm.errors import ConfigError
from streamllm.server.metrics import full_prefix

CHAT = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 20}
SHARED = "the same beginning of many prompts, three blocks long at least; " * 2
"""Found in the prefix cache by whoever comes second."""

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason{reason=capacity}",
    "num_requests_waiting_by_reason{reason=deferred}",
    "kv_cache_usage_perc",
    "kv_cache_waste_perc",
    "kv_cache_sharing_perc",
)


def mixed_requests() -> list[tuple[str, dict]]:
    """Requests that compete for few KV blocks; every fifth is refused."""
    requests: list[tuple[str, dict]] = []
    for number in range(8):
        requests += [
            ("/v1/completions", {"prompt": f"{number} {SHARED}", "max_tokens": 60, "n": 3}),
            ("/v1/completions", {"prompt": [SHARED + str(number), "b"], "max_tokens": 30}),
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": f"{number}" * 40, "max_tokens": 90}),
            ("/v1/completions", {"prompt": "a", "temperature": -1}),
        ]
    return requests


def num_sequences(body: dict) -> int:
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    return prompts * body.get("n", 1)


def test_counters_equal_what_clients_saw():
    requests = mixed_requests()
    with run_server(step_seconds=0.0005, engine_settings={"num_blocks": 40}) as server:
        with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=server.url, timeout=30) as client:
            answers = list(pool.map(lambda request: client.post(request[0], json=request[1]), requests))
        served = [(body, a.json()) for (_, body), a in zip(requests, answers, strict=True) if a.is_success]
        assert len(served) == 32 and {a.status_code for a in answers} == {200, 400}
        server.wait_idle()
        samples = scrape(server)

        prompt = sum(answer["usage"]["prompt_tokens"] for _, answer in served)
        generated = sum(answer["usage"]["completion_tokens"] for _, answer in served)
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in served)
        count = 32 + 8  # eight of them have two prompts
        sequences = sum(num_sequences(body) for body, _ in served)
        assert cached > 0 and samples["num_preemptions_total"] > 0
        assert samples["prompt_tokens_total"] == samples["request_prompt_tokens_sum"] == prompt
        assert samples["generation_tokens_total"] == samples["request_generation_tokens_sum"] == generated
        assert samples["prompt_tokens_cached_total"] == samples["prefix_cache_hits_total"] == cached
        assert samples["prefix_cache_queries_total"] == prompt
        assert samples["prompt_tokens_by_source_total{source=local_cache_hit}"] == cached
        assert samples["prompt_tokens_by_source_total{source=local_compute}"] == prompt - cached
        assert samples["request_prefill_kv_computed_tokens_sum"] == prompt - cached
        assert samples["request_success_total{finished_reason=length}"] == count
        for name in (
            "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
            "request_prefill_time_seconds", "request_decode_time_seconds", "request_params_n",
            "request_time_per_output_token_seconds", "request_params_max_tokens",
        ):  # fmt: skip
            assert samples[f"{name}_count"] == samples[f"{name}_bucket{{le=+Inf}}"] == count, name
        # One gap a token but the first of its sequence, whatever preemptions lie between.
        assert samples["inter_token_latency_seconds_count"] == generated - sequences
        assert samples["request_params_n_sum"] == sequences
        # Each step computes a token for each that it draws, and what was lost once more.
        assert samples["iteration_tokens_total_sum"] >= prompt - cached + generated - sequences
        stages = sum(samples[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
        assert stages <= samples["e2e_request_latency_seconds_sum"]
        steps = samples["iteration_tokens_total_count"]
        for phase in ("schedule", "submit", "mask", "wait", "update", "deliver"):
            assert samples[f"step_time_seconds_count{{phase={phase}}}"] == steps
        assert [samples[name] for name in GAUGES] == [0] * len(GAUGES)


def test_gauges_return_to_zero_when_all_leave():
    with run_server(step_seconds=0.002, max_num_seqs=4, engine_settings={"num_blocks": 64}) as server:
        body = {"prompt": "x" * 50, "max_tokens": 900, "stream": True, "n": 2}
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body))
            server.wait_for(lambda: server.stats().num_running == 4)
            samples = scrape(server)
            reasons = [
                samples[f"num_requests_waiting_by_reason{{reason={r}}}"] for r in ("capacity", "deferred")
            ]
            assert sum(reasons) == samples["num_requests_waiting"]
            # Some may just have been preempted.
            assert samples["num_requests_waiting"] + samples["num_requests_running"] == 20
        server.wait_idle(timeout=1.0)
        samples = scrape(server)
        assert [samples[name] for name in GAUGES] == [0] * len(GAUGES)
        assert samples["e2e_request_latency_seconds_count"] == 10
        assert samples["request_success_total{finished_reason=abort}"] == 10
        # Stages that a request did not reach are not counted as zero.
        reached = samples["time_to_first_token_seconds_count"]
        assert samples["request_prefill_time_seconds_count"] == reached < 10


def test_label_sets_are_bounded():
    def series():
        text = client.get("/metrics").text
        return {line.rpartition(" ")[0] for line in text.splitlines() if line[:1] != "#"}

    def some_requests(number):
        for path in (f"/v1/models/{number}", f"/nowhere/{number}", f"/v1/requests/{number}/trace"):
            client.get(path)
        client.request(("SEARCH", "LOCK", "PROPFIND")[number % 3], "/v1/models")
        client.post("/v1/completions", json={"prompt": "a", "model": f"model-{number}"})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1 + number})

    with run_server() as server, httpx.Client(base_url=server.url) as client:
        some_requests(0)
        series()
        before = series()
        for number in range(1, 8):
            some_requests(number)
        assert series() == before
        assert 'http_requests_total{handler="none",method="GET",status="4xx"}' in before
        assert 'http_requests_total{handler="/v1/models/{name}",method="GET",status="4xx"}' in before
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}' in before
        assert 'http_requests_total{handler="/v1/models",method="OTHER",status="4xx"}' in before


def test_http_requests_are_measured():
    with run_server() as server:
        body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
        size = len(server.post("/v1/completions", body).content)
        answer = httpx.get(server.url + "/metrics").text
    samples = {
        (sample.name, sample.labels.get("handler")): sample.value
        for family in text_string_to_metric_families(answer)
        for sample in family.samples
    }
    assert samples["http_requests_total", "/v1/completions"] == 1
    assert samples["http_request_duration_seconds_count", "/v1/completions"] == 1
    assert samples["http_request_size_bytes_sum", "/v1/completions"] == len(body)
    assert samples["http_response_size_bytes_sum", "/v1/completions"] == size
    assert samples["http_request_duration_highr_seconds_count", None] == 1


@pytest.mark.parametrize("prefix, full", [("vllm", "vllm:"), ("vllm:", "vllm:"), ("llm_", "llm_")])
def test_the_prefix_is_a_setting(prefix, full):
    assert full_prefix(prefix) == full
    with run_server(metrics_prefix=prefix) as server:
        assert scrape(server, full)["num_requests_running"] == 0


@pytest.mark.parametrize("prefix", ["", "1a", "a-b", "a b", "a::", "é"])
def test_a_prefix_that_no_metric_can_have(prefix):
    with pytest.raises(ConfigError, match="--metrics-prefix must be"):
        full_prefix(prefix)


def exposition(prefix="streamllm"):
    """What a server that has answered a request exposes."""
    with run_server(metrics_prefix=prefix) as server:
        server.post("/v1/completions", {"prompt": "a"})
        return httpx.get(server.url + "/metrics").text


def test_every_query_of_the_dashboard_matches_a_metric():
    exported = {
        sample.name for family in text_string_to_metric_families(exposition()) for sample in family.samples
    }
    dashboard = json.loads(resources.files("streamllm.server").joinpath("grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    assert len(queries) > 30
    functions_and_labels = {
        "sum", "avg", "rate", "increase", "histogram_quantile", "by", "le", "phase", "handler", "status",
        "reason", "finished_reason", "model_name", "label_values",
    }  # fmt: skip
    for query in queries:
        bare = re.sub(r"\[\$__rate_interval\]|\"[^\"]*\"", "", query)
        names = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - functions_and_labels
        assert names and names <= exported, query


def test_promtool_is_content():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    # The names are vLLM's, two of whose customs promtool would not have: the colon behind the prefix, which
    # is a setting, and one histogram called like a counter.
    text = exposition("streamllm_")
    check = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True)
    complaints = [line for line in check.stderr.splitlines() if "iteration_tokens_total" not in line]
    assert complaints == []
