"""The load test, run as its users run it: a subprocess against a server over loopback."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_openai_server import API_KEY, FakeServer

LOADTEST = Path(__file__).resolve().parents[2] / "loadtest"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def run(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LOADTEST / "run.py"), "--base-url", url, "--api-key", API_KEY, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def run_to_json(
    tmp_path: Path, url: str, *flags: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = tmp_path / "result.json"
    done = run(url, *flags, "--json", str(path))
    assert path.exists(), done.stderr
    return done, json.loads(path.read_text())


def test_closed_loop_measures_what_the_server_does(server: FakeServer, tmp_path: Path) -> None:
    server.first_delay, server.token_delay = 0.1, 0.02
    server.prompt_tokens = lambda words: 7 + 2 * words
    picture = tmp_path / "result.png"

    done, result = run_to_json(
        tmp_path, server.url + "/v1/",
        "--requests", "12", "--concurrency", "4", "--input-len", "47", "--output-len", "6",
        "--png", str(picture),
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert server.peak_running == 4
    assert all(body["max_tokens"] == 6 and body["ignore_eos"] for body in server.bodies)
    assert all(len(body["prompt"].split()) == 20 for body in server.bodies)  # 7 + 2 * 20 = 47 tokens
    assert len({body["prompt"].split()[0] for body in server.bodies}) == 12

    assert (result["completed"], result["failed"], result["failures"]) == (12, 0, [])
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 47, 12 * 6)
    assert result["max_concurrent_requests"] == 4
    duration = result["duration_s"]
    assert 3 * 0.2 <= duration < 3  # three rounds of 4, each 0.1 + 5 * 0.02 seconds
    assert result["request_throughput"] == pytest.approx(12 / duration)
    assert result["output_throughput"] == pytest.approx(72 / duration)
    assert result["total_token_throughput"] == pytest.approx(12 * 53 / duration)
    for name, expected_ms in {"ttft": 100, "itl": 20, "tpot": 20, "e2el": 200}.items():
        statistics_ms = result["latency_ms"][name]
        assert list(statistics_ms) == ["mean", "median", "std", "p90", "p99"]
        assert expected_ms * 0.95 <= statistics_ms["median"] < expected_ms * 2
        assert statistics_ms["median"] <= statistics_ms["p90"] <= statistics_ms["p99"]
    assert [len(row["itl_s"]) for row in result["requests"]] == [5] * 12
    for row in result["requests"]:
        assert row["ttft_s"] + sum(row["itl_s"]) == pytest.approx(row["e2e_s"], abs=0.05)
    assert result["model"] == "echo" and result["arguments"]["input_len"] == 47
    assert API_KEY not in (tmp_path / "result.json").read_text()

    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    for label in ("Successful requests: +12", "Failed requests: +0", "Total generated tokens: +72",
                  r"Output token throughput \(tok/s\): +\d", r"P99 TTFT \(ms\): +1\d\d\.\d\d"):  # fmt: skip
        assert re.search(label, done.stdout), label


def test_verify_accepts_an_honest_server(server: FakeServer, tmp_path: Path) -> None:
    server.prompt_tokens = lambda words: 30 + words
    done, result = run_to_json(
        tmp_path, server.url,
        "--requests", "8", "--endpoint", "chat", "--input-len", "40", "--output-len-range", "2", "9",
        "--verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["verify"] == {"compared": 8, "differences": [], "leaks": []}
    lengths = [body["max_tokens"] for body in server.bodies]
    assert len(set(lengths)) > 1 and all(2 <= length <= 9 for length in lengths)
    assert all(len(body["messages"][0]["content"].split()) == 10 for body in server.bodies)
    assert "8 of 8 streams equal" in done.stdout


def test_verify_finds_a_planted_difference_and_a_planted_leak(server: FakeServer, tmp_path: Path) -> None:
    server.changed = {3}
    server.leaked_usage = 0.25
    done, result = run_to_json(
        tmp_path, server.url, "--requests", "6", "--concurrency", "1", "--output-len", "4", "--verify"
    )
    assert done.returncode == 1
    (difference,) = result["verify"]["differences"]
    assert (difference["index"], difference["field"]) == (3, "text")
    assert difference["streamed"][difference["at"] :] == "PLANTED"
    (leak,) = result["verify"]["leaks"]
    assert "kv_cache_usage_perc 0.25" in leak and "num_requests" not in leak
    assert "DIFFERENCE request 3" in done.stdout and "LEAK" in done.stdout


def test_every_fault_is_reported_by_kind_and_the_rest_goes_on(server: FakeServer, tmp_path: Path) -> None:
    server.faults = {1: "http_500", 2: "hang_up", 3: "error_event", 4: "cut_short", 5: "not_json"}
    server.faults |= {6: "stall", 8: "http_500"}
    done, result = run_to_json(
        tmp_path, server.url,
        "--requests", "12", "--concurrency", "3", "--output-len", "3", "--timeout", "2", "--verify",
        "--png", str(tmp_path / "faults.png"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert (result["completed"], result["failed"]) == (5, 7)
    assert {failure["kind"]: failure["count"] for failure in result["failures"]} == {
        "HTTP 500": 2, "connection broken": 1, "error event": 1, "stream cut short": 1, "not JSON": 1,
        "timeout": 1,
    }  # fmt: skip
    assert "2 x HTTP 500: out of luck" in done.stdout
    assert "1 x error event: engine died" in done.stdout
    assert result["total_output_tokens"] == 5 * 3
    assert result["verify"] == {"compared": 5, "differences": [], "leaks": []}
    assert (tmp_path / "faults.png").exists()


def test_open_loop_sends_at_the_arrival_times(server: FakeServer, tmp_path: Path) -> None:
    server.first_delay = 0.3
    done, result = run_to_json(
        tmp_path, server.url, "--requests", "30", "--request-rate", "40", "--output-len", "2", "--seed", "5"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [row["start_s"] for row in result["requests"]]
    assert starts[0] == 0 and starts == sorted(starts)
    sent = [time - server.arrivals[0] for time in server.arrivals]
    # Arrivals do not wait for answers, which take 0.3 s and more.
    assert statistics.median(abs(a - b) for a, b in zip(sent, starts, strict=True)) < 0.1
    assert result["max_concurrent_requests"] > 5
    assert "Request rate configured (RPS):           40.00" in done.stdout


def test_without_usage_events_are_counted(server: FakeServer, tmp_path: Path) -> None:
    server.report_usage = False
    done, result = run_to_json(
        tmp_path, server.url, "--requests", "2", "--input-len", "9", "--output-len", "5", "--no-ignore-eos"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (result["total_output_tokens"], result["requests_without_usage"]) == (10, 2)
    assert len(server.bodies[0]["prompt"].split()) == 9
    assert "ignore_eos" not in server.bodies[0]
    assert "events counted as tokens" in done.stdout


def test_a_refused_probe_ends_the_run_with_one_line(server: FakeServer) -> None:
    done = run(server.url, "--requests", "1", "--api-key", "other")
    assert done.returncode == 1
    assert done.stderr == f"error: {server.url}: HTTP 401: wrong key\n"


def test_no_server_ends_the_run_with_one_line() -> None:
    done = run("http://127.0.0.1:9", "--requests", "1")
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: http://127.0.0.1:9: cannot connect") and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--requests", "0"], "--requests"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--temperature", "0.5", "--verify"], "--verify"),
        (["--output-len-range", "9", "2"], "LOW must be at most HIGH"),
        (["--json", "no-such-folder/x.json"], "no-such-folder"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str) -> None:
    done = run("http://127.0.0.1:9", *flags)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
