from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from compare import Comparison, parse_args, select
from comparison import render
from engines import (
    Engine,
    Programs,
    ServerEngine,
    Setting,
    WorkerEngine,
    catalogue,
    program_version,
    python_version,
)
from helpers.tiny_models import VOCAB_SIZE, make_tiny_model
from loads import Load
from servers import EngineFailure, process, server

from streamllm.bench.prompts import Request


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(threads=1, max_num_seqs=4, max_model_len=256, logs=tmp_path, decode=str)


def make_load(kind: str, count: int = 6, concurrency: int = 3) -> Load:
    requests = [
        Request(i, [(7 * i + j) % (VOCAB_SIZE - 10) + 5 for j in range(12)], 9 + i % 2) for i in range(count)
    ]
    return Load(f"{kind}-{concurrency}", kind, requests, concurrency)


def test_what_is_not_installed_has_no_version(tmp_path: Path) -> None:
    assert program_version("no-such-llama-server") is None
    assert python_version(sys.executable, "no-such-distribution") is None
    assert python_version(sys.executable, "numpy", "no-such-distribution") is None
    assert python_version(str(tmp_path / "no-python"), "numpy") is None


def test_versions_of_what_is_installed() -> None:
    import numpy

    assert python_version(sys.executable, "numpy", "httpx") == numpy.__version__
    assert program_version(sys.executable) is not None


class Formats:
    """Model files that nobody loads."""

    precision = "Q4_1"

    def __getattr__(self, name: str) -> Any:
        return lambda: Path(name)


@pytest.fixture
def engines(tmp_path: Path) -> list[Engine]:
    nowhere = str(tmp_path / "nowhere")
    return catalogue(Programs(nowhere, nowhere, nowhere, nowhere), Formats())  # type: ignore[arg-type]


def test_without_peers_only_streamllm_is_there(engines: list[Engine]) -> None:
    present = [engine.name for engine in engines if engine.version() is not None]
    assert present == ["streamllm", "streamllm-generate"]
    assert len({engine.name for engine in engines}) == len(engines)
    assert all(engine.install for engine in engines)


def test_selection_by_name_and_by_beginning(engines: list[Engine]) -> None:
    def names(*wanted: str) -> list[str]:
        return [engine.name for engine in select(engines, list(wanted) or None)]

    assert names() == [engine.name for engine in engines]
    assert names("llama.cpp", "streamllm") == ["streamllm", "llama.cpp-q4_1", "llama.cpp-q4_0"]
    assert names("streamllm-") == ["streamllm-generate"]
    with pytest.raises(ValueError, match=r"no engine is called ollama; there are streamllm, "):
        names("ollama")


@pytest.mark.parametrize(
    "flags", [["--rounds", "0"], ["--streams", "0"], ["--loads", "x"], ["--threads", "-1"]]
)
def test_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse_args(flags)
    assert refusal.value.code == 2


def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('loading'); raise SystemExit('no such model')"]
    with (
        pytest.raises(EngineFailure, match=r"(?s)exit code 1.*no such model"),
        server(command, tmp_path / "log", "http://127.0.0.1:9/health"),
    ):
        pass


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="cannot be run"), process(["/no/such/program"], tmp_path / "log"):
        pass


def is_running(pid: int) -> bool:
    """Killed processes may stay as zombies where nobody waits for them."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    grandchild = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with process([sys.executable, "-c", child], tmp_path / "log", pipes=True) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        assert is_running(pid)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def ours(model: Path, engines: list[Engine]) -> list[Engine]:
    return [
        dataclasses.replace(engine, model=lambda: model)
        for engine in engines
        if isinstance(engine, ServerEngine | WorkerEngine) and engine.name.startswith("streamllm")
    ]


@pytest.mark.slow
def test_a_comparison_over_http_and_in_process(
    tiny_model: Path, engines: list[Engine], setting: Setting
) -> None:
    http, offline = ours(tiny_model, engines)
    missing = next(engine for engine in engines if engine.family == "llama.cpp")
    saved: list[int] = []
    comparison = Comparison(
        [(http, "1"), (offline, "1"), (missing, None)],
        lambda number: [make_load("streams"), make_load("offline")] if number else [make_load("warm-up", 2)],
        setting,
        {
            "date": "today", "model": "tiny", "processor": "p", "cores": 1,
            "arguments": {"threads": 1, "seed": 0, "input_len": 12, "output_len": 9},
        },
        lambda document: saved.append(len(document["runs"])),
    )  # fmt: skip
    document = comparison.run(rounds=2)
    assert document["failures"] == []
    order = [(run["round"], run["engine"], run["load"]) for run in document["runs"]]
    assert order == [
        (number, *rest)
        for number in (1, 2)
        for rest in (
            ("streamllm", "streams-3"), ("streamllm", "offline-3"), ("streamllm-generate", "offline-3"),
        )
    ]  # fmt: skip
    assert saved == [2, 3, 5, 6]
    assert document["runs"][0]["figures"].keys() == {
        "tokens_per_s", "tokens_per_s_alone", "ttft_s", "last_ttft_s", "itl_ms",
    }  # fmt: skip
    assert document["runs"][0]["client_cpu_s"] > 0
    text = render(document)
    assert "streamllm over HTTP at 3 streams reaches" in text
    assert "llama.cpp-q4_1 is not installed" in text


def test_an_engine_that_fails_is_out_and_the_others_go_on(
    tiny_model: Path, engines: list[Engine], setting: Setting, tmp_path: Path, capsys: Any
) -> None:
    (broken,) = ours(tmp_path / "no-model", engines)[1:]
    (sound,) = ours(tiny_model, engines)[1:]
    comparison = Comparison(
        [(broken, "1"), (sound, "1")],
        lambda number: [make_load("offline")],
        setting,
        {"cores": 1},
        lambda document: None,
    )
    document = comparison.run(rounds=2)
    (failure,) = document["failures"]
    assert failure["round"] == 1 and "does not exist" in failure["message"]
    assert [run["round"] for run in document["runs"]] == [1, 2]
    assert "FAILED streamllm-generate, round 1" in capsys.readouterr().err
