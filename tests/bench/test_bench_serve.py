"""``streamllm bench serve``, run as its users run it, against a scripted server and the real engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import run as load_test
from helpers.fake_openai_server import API_KEY, FakeServer
from server.serving import run_server, text_script

from streamllm.bench import measure
from streamllm.cli.main import main


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(api_key=None) as running:
        yield running


def bench(url: str, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", url, *flags])


def saved(folder: Path, name: str = "result.json") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def to_file(tmp_path: Path) -> list[str]:
    return ["--result-dir", str(tmp_path), "--result-filename", "result.json"]


def figure(text: str, title: str) -> float:
    (value,) = re.findall(rf"^{re.escape(title)}: +([\d.]+) *$", text, re.MULTILINE)
    return float(value)


def test_the_report_and_the_result_say_what_the_server_did(
    server: FakeServer, tmp_path: Path, capsys
) -> None:
    server.first_delay, server.token_delay = 0.1, 0.02
    server.prompt_tokens = lambda words: 7 + 2 * words
    flags = ["--num-prompts", "8", "--max-concurrency", "4", "--random-input-len", "47"]
    flags += [
        "--random-output-len",
        "6",
        "--ignore-eos",
        "--goodput",
        "ttft:5000",
        "tpot:1",
        "--save-detailed",
    ]
    flags += ["--metadata", "machine=here", "--label", "mine", "--percentile-metrics", "ttft,e2el"]

    assert bench(server.url, *flags, "--metric-percentiles", "50,99", *to_file(tmp_path)) == 0

    text = capsys.readouterr().out
    assert server.peak_running == 4
    assert all(len(body["prompt"].split()) == 20 and body["ignore_eos"] for body in server.bodies)
    assert figure(text, "Successful requests") == 8 and figure(text, "Failed requests") == 0
    assert figure(text, "Total input tokens") == 8 * 47
    assert figure(text, "Total generated tokens") == 8 * 6
    assert figure(text, "Request goodput (req/s)") == 0
    assert "TPOT" not in text

    (result,) = saved(tmp_path)
    duration = result["duration"]
    assert 2 * 0.2 <= duration < 3  # two rounds of four, each 0.1 + 5 * 0.02 seconds
    assert result["request_throughput"] == pytest.approx(8 / duration)
    assert result["output_throughput"] == pytest.approx(48 / duration)
    assert result["total_token_throughput"] == pytest.approx(8 * 53 / duration)
    assert (
        result["median_ttft_ms"]
        == result["p50_ttft_ms"]
        == pytest.approx(figure(text, "Median TTFT (ms)"), abs=0.01)
    )
    assert 95 < result["median_ttft_ms"] <= result["p99_ttft_ms"] < 1000
    assert {"mean_e2el_ms", "std_e2el_ms"} <= set(result) and "mean_tpot_ms" not in result
    assert (result["completed"], result["request_rate"], result["max_concurrency"]) == (8, "inf", 4)
    assert (result["machine"], result["label"], result["model_id"]) == ("here", "mine", "echo")
    assert result["input_lens"] == [47] * 8 and result["output_lens"] == [6] * 8
    assert [len(gaps) for gaps in result["itls"]] == [5] * 8 and result["errors"] == [""] * 8
    assert all(len(text.split()) == 6 for text in result["generated_texts"])


def test_the_same_totals_and_the_same_requests_as_the_load_test(server: FakeServer, tmp_path: Path) -> None:
    """Word for word, token for token, arrival for arrival."""
    server.prompt_tokens = lambda words: 3 + 2 * words
    common = ["--base-url", server.url, "--seed", "5", "--request-rate", "200"]
    own = ["--requests", "12", "--input-len", "31", "--output-len", "4"]
    assert load_test.main([*common, *own, "--json", str(tmp_path / "load.json")]) == 0
    theirs, server.bodies = server.bodies, []
    flags = [
        "--num-prompts",
        "12",
        "--input-len",
        "31",
        "--output-len",
        "4",
        "--ignore-eos",
        "--save-detailed",
    ]
    assert main(["bench", "serve", *common, *flags, *to_file(tmp_path)]) == 0

    def key(body: dict[str, Any]) -> str:
        return json.dumps(body, sort_keys=True)

    assert sorted(map(key, server.bodies)) == sorted(map(key, theirs))
    load = json.loads((tmp_path / "load.json").read_text())
    (result,) = saved(tmp_path)
    for name in ("completed", "total_input_tokens", "total_output_tokens"):
        assert result[name] == load[name]
    assert result["start_times"] == [row["start_s"] for row in load["requests"]]


def test_what_requests_carry(server: FakeServer, monkeypatch) -> None:
    server.api_key = API_KEY
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    flags = ["--num-prompts", "2", "--input-len", "8", "--output-len", "2", "--backend", "openai-chat"]
    flags += ["--top-p", "0.9", "--top-k", "5", "--temperature", "0.5", "--logprobs", "3"]
    flags += ["--extra-body", '{"priority": 1, "temperature": 0.7}', "--header", "X-Team=a=b", "X-Two=2"]
    assert bench(server.url, *flags, "--request-id-prefix", "run-", "--served-model-name", "named") == 0
    body = server.bodies[0]
    expected = {"model": "named", "top_p": 0.9, "top_k": 5, "temperature": 0.7, "logprobs": True,
                "top_logprobs": 3, "priority": 1, "max_tokens": 2}  # fmt: skip
    assert expected.items() <= body.items() and "ignore_eos" not in body
    assert server.paths == ["/v1/chat/completions"] * 2
    assert {headers["x-request-id"] for headers in server.headers} == {"run-0", "run-1"}
    assert all((h["x-team"], h["x-two"]) == ("a=b", "2") for h in server.headers)


def test_servers_take_turns_with_the_same_requests(server: FakeServer, tmp_path: Path, capsys) -> None:
    flags = ["--num-prompts", "5", "--input-len", "12", "--output-len", "4", "--rounds", "2"]
    flags += ["--max-concurrency", "2", "--num-warmups", "2", "--save-result", *to_file(tmp_path)]
    server.token_delay = 0.02
    with FakeServer(api_key=None) as slow:
        slow.token_delay = 0.06
        assert bench(server.url, slow.url, *flags, "--png", str(tmp_path / "x.png")) == 0

    prompts = [[body["prompt"] for body in each.bodies] for each in (server, slow)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    warmups, first, second = prompts[0][:2], prompts[0][2:7], prompts[0][7:]
    assert len(set(first)) == len(set(second)) == 5 and not set(first) & set(second)
    assert {len(prompt.split()) for prompt in warmups} == {12} and not set(warmups) & set(first + second)
    assert len(second) == 5
    # A B A B: no server's round begins before the other's has been sent.
    rounds = [server.arrivals[2:7], slow.arrivals[2:7], server.arrivals[7:], slow.arrivals[7:]]
    assert all(max(before) < min(after) for before, after in pairwise(rounds))

    results = saved(tmp_path)
    assert [(r["base_url"], r["round"], r["seed"]) for r in results] == [
        (server.url, 0, 0), (slow.url, 0, 0), (server.url, 1, 1), (slow.url, 1, 1),
    ]  # fmt: skip
    table = capsys.readouterr().out.split("Comparison, medians over 2 rounds")[1]
    (row,) = re.findall(r"^Median TPOT \(ms\): +(\S+) +(\S+) +(\S+)x$", table, re.MULTILINE)
    assert 15 < float(row[0]) < float(row[1]) and 1.5 < float(row[2]) < 3.5
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_bursts_arrive_together(server: FakeServer) -> None:
    flags = ["--num-prompts", "9", "--input-len", "8", "--output-len", "1", "--seed", "3"]
    assert bench(server.url, *flags, "--request-rate", "15", "--burst-size", "3", "--burstiness", "50") == 0
    gaps = [after - before for before, after in pairwise(server.arrivals)]
    assert min(gaps[2], gaps[5]) > 0.1 > max(gaps[i] for i in (0, 1, 3, 4, 6, 7))  # 3 / 15 s apart


def test_results_are_appended_a_line_each(server: FakeServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "1", "--input-len", "8", "--output-len", "1", *to_file(tmp_path)]
    for more in (["--save-result"], ["--append-result"], ["--append-result"]):
        assert bench(server.url, *flags, *more) == 0
    assert len(saved(tmp_path)) == 3
    assert bench(server.url, *flags) == 0
    assert len(saved(tmp_path)) == 1 and "ttfts" not in saved(tmp_path)[0]


def test_a_name_of_its_own_and_the_timeline_beside_it(server: FakeServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "2", "--input-len", "8", "--output-len", "3", "--max-concurrency", "2"]
    folder = tmp_path / "made" / "here"
    assert bench(server.url, *flags, "--save-result", "--plot-timeline", "--result-dir", str(folder)) == 0
    picture, result = sorted(folder.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert re.fullmatch(r"vllm-infqps-concurrency2-echo-\d{8}-\d{6}\.json", result.name)
    assert picture.name == result.stem + ".png" and picture.read_bytes().startswith(b"\x89PNG")


def test_failed_requests_are_counted_and_make_the_exit_code_1(
    server: FakeServer, tmp_path: Path, capsys
) -> None:
    server.faults = {1: "http_500", 3: "cut_short"}
    flags = ["--num-prompts", "5", "--input-len", "8", "--output-len", "2", "--max-concurrency", "1"]
    assert bench(server.url, *flags, "--save-detailed", *to_file(tmp_path)) == 1
    text = capsys.readouterr().out
    assert "1 x HTTP 500: out of luck" in text and figure(text, "Successful requests") == 3
    (result,) = saved(tmp_path)
    assert (result["completed"], result["failed"]) == (3, 2)
    assert [bool(error) for error in result["errors"]] == [False, True, False, True, False]


def test_a_starting_server_is_waited_for_only_when_asked(server: FakeServer, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "READY_INTERVAL", 0.01)
    flags = ["--num-prompts", "1", "--input-len", "8", "--output-len", "1"]
    server.num_unready = 3
    assert bench(server.url, *flags) == 1
    assert capsys.readouterr().err == f"streamllm: error: {server.url}: HTTP 503: loading\n"
    assert bench(server.url, *flags, "--ready-check-timeout-sec", "30") == 0
    server.api_key = "another"  # what waiting does not cure
    assert bench(server.url, *flags, "--ready-check-timeout-sec", "30") == 1


def test_flags_from_a_file(server: FakeServer, tmp_path: Path, capsys) -> None:
    config = tmp_path / "bench.yaml"
    config.write_text(
        f"base-url: [{server.url}]\nnum_prompts: 3\ninput-len: 8\noutput-len: 2\n"
        "goodput: [ttft:5000, e2el:5000]\nextra-body: {priority: 2}\n"
    )
    assert main(["bench", "serve", "--config", str(config), "--num-prompts", "2"]) == 0
    assert len(server.bodies) == 2 and server.bodies[0]["priority"] == 2
    assert figure(capsys.readouterr().out, "Request goodput (req/s)") > 0
    config.write_text("num-promts: 3\n")
    assert main(["bench", "serve", "--config", str(config)]) == 2
    assert "Did you mean num-prompts?" in capsys.readouterr().err


def test_ctrl_c_reports_what_is_done(server: FakeServer) -> None:
    server.first_delay = 0.05
    flags = ["--num-prompts", "2k", "--input-len", "8", "--output-len", "1", "--max-concurrency", "1"]
    command = [sys.executable, "-m", "streamllm.cli.main", "bench", "serve", "--base-url", server.url, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(server.bodies) < 4 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    if sys.version_info >= (3, 11):  # before, asyncio.run does not cancel what it runs
        done = re.search(r"interrupted after (\d+) of 2000 requests", out)
        assert done and int(done[1]) >= 3 and figure(out, "Successful requests") == int(done[1])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_real_engine_counts_the_same(backend: str, tmp_path: Path) -> None:
    flags = ["--num-prompts", "12", "--max-concurrency", "4", "--input-len", "300", "--output-len", "20"]
    with run_server() as running:
        assert bench(running.url, *flags, "--backend", backend, *to_file(tmp_path), "--save-detailed") == 0
        running.wait_idle()
        stats = running.stats()
    (result,) = saved(tmp_path)
    assert (result["completed"], result["total_output_tokens"]) == (12, 12 * 20)
    # Bytes are the tokens; words differ in length.
    assert result["total_input_tokens"] / 12 == pytest.approx(300, rel=0.1)
    assert result["max_concurrent_requests"] == 4
    assert stats.num_running == 0


def test_a_server_that_knows_no_ignore_eos_is_measured_by_what_it_says(tmp_path: Path) -> None:
    with run_server(script=text_script("short", ends=True)) as running:
        flags = ["--num-prompts", "3", "--input-len", "60", "--output-len", "50"]
        assert bench(running.url, *flags, *to_file(tmp_path)) == 0
        (result,) = saved(tmp_path)
        assert 3 * 5 <= result["total_output_tokens"] <= 3 * 6
        assert bench(running.url, *flags, "--ignore-eos", *to_file(tmp_path)) == 0
        assert saved(tmp_path)[0]["total_output_tokens"] == 3 * 50


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 1, "http://127.0.0.1:9: cannot connect"),
        (["--base-url", "127.0.0.1:9"], 2, "--base-url 127.0.0.1:9: must begin with http:// or https://"),
        (["--base-url", "http://127.0.0.1:9"], 2, "--base-url names a server twice"),
        (["--goodput", "speed:9"], 2, "--goodput speed:9: must be METRIC:MILLISECONDS"),
        (["--num-prompts", "0"], 2, "--num-prompts: must be an integer of at least 1, got '0'"),
        (["--request-rate", "0"], 2, "--request-rate: must be a number above 0, or inf"),
        (["--burst-size", "4"], 2, "--burst-size needs a --request-rate"),
        (["--burstiness", "0.5"], 2, "--burstiness needs a --request-rate"),
        (["--ramp-up-strategy", "linear"], 2, "--ramp-up-strategy needs --ramp-up-start-rps"),
        (["--ramp-up-start-rps", "3"], 2, "need --ramp-up-strategy"),
        (["--percentile-metrics", "ttft,speed"], 2, "got 'speed'"),
        (["--metric-percentiles", "101"], 2, "numbers between 0 and 100"),
        (["--header", "nothing"], 2, "must be KEY=VALUE"),
        (["--header", "a=\xe9"], 2, "--header: what an HTTP header holds must be printable ASCII"),
        (["--api-key", "a\r\nb"], 2, "--api-key: what an HTTP header holds"),
        (["--extra-body", "[1]"], 2, "must be a JSON object"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], 2, "--backend openai-chat needs"),
        (["--max-concurency", "3"], 2, "Did you mean --max-concurrency?"),
        (["--dataset-name", "custom"], 2, "needs --dataset-path"),
        (["--png", "no-such-folder/x.png"], 1, "there is no folder"),
        (["--result-filename", "."], 1, "cannot be written: it is a folder"),
        (["--save-result", "--result-dir", "/dev/null/x"], 1, "--result-dir /dev/null/x: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, flags: list[str], code: int, words: str) -> None:
    assert bench("http://127.0.0.1:9", *flags) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("streamllm: error: ")


def test_a_broken_line_of_a_data_set_is_named(server: FakeServer, tmp_path: Path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": 2}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path)]
    assert bench(server.url, *flags) == 2
    error = capsys.readouterr().err
    assert f"{path}, line 2: " in error and error.count("\n") == 1
    assert server.bodies == []
