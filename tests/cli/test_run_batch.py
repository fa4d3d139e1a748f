"""``streamllm run-batch``: over the real engine and a fake model in this process, and as a user starts it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.fake_engine import make_engine

from streamllm.cli.main import main
from streamllm.engine.async_engine import AsyncEngine

MODEL = "fake-model"


def line(custom_id: str, **fields) -> dict:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path, lines) -> None:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))


def results(path) -> list[dict]:
    return [json.loads(one) for one in path.read_text().splitlines()]


@pytest.fixture
def engines(monkeypatch):
    """The engines that commands have loaded, each over the fake model."""
    loaded = []

    def load(config):
        loaded.append(make_engine())
        return loaded[-1]

    monkeypatch.setattr(AsyncEngine, "from_config", load)
    return loaded


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(files, *flags: str) -> int:
    return main(["run-batch", "-i", str(files[0]), "-o", str(files[1]), *flags])


def test_all_lines_succeed(engines, files, capsys):
    urls = {"/v1/embeddings": {"input": "a"}, "/v1/responses": {"input": "a", "max_output_tokens": 2}}
    lines = [line(str(n)) for n in range(50)]
    lines += [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in urls.items()]
    write(files[0], lines)
    assert run(files) == 0
    found = results(files[1])
    assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in lines)
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    assert {one["response"]["status_code"] for one in found} == {200}
    output = capsys.readouterr()
    assert output.err == "streamllm: 52 of 52 lines answered, 0 failed\n" and not output.out  # and no bar


def test_lines_that_fail(engines, files, capsys):
    write(
        files[0],
        [line("a"), "{broken", "", line("a"), {**line("b"), "url": "/v1/x"}, line("c", model="x"),
         line("d", stream=True), line("e")],
    )  # fmt: skip
    assert run(files) == 1
    found = results(files[1])
    ok = {one["custom_id"] for one in found if one["response"] and one["response"]["status_code"] == 200}
    assert ok == {"a", "e"}
    refused = {one["custom_id"]: one["response"]["status_code"] for one in found if one["response"]}
    assert refused["c"] == 404 and refused["d"] == 400
    broken = {one["error"]["line"]: one["error"]["code"] for one in found if one["error"]}
    assert broken == {2: "invalid_json_line", 4: "duplicate_custom_id", 5: "mismatched_url"}
    told = capsys.readouterr().err.splitlines()
    assert [text.split(":")[1] for text in told[:3]] == [" line 2", " line 4", " line 5"]
    assert told[3:] == ["streamllm: 2 of 7 lines answered, 5 failed"]


def test_going_on(engines, files, capsys):
    lines = [line(str(n)) for n in range(20)]
    write(files[0], [*lines[:10], "{broken", *lines[10:]])
    assert run(files) == 1
    first = files[1].read_bytes()
    kept = first.splitlines(keepends=True)[:7]
    files[1].write_bytes(b"".join(kept) + first.splitlines()[8][:30])  # killed while writing
    capsys.readouterr()
    assert run(files) == 1
    assert "7 of 21 lines have results" in capsys.readouterr().err
    assert files[1].read_bytes().startswith(b"".join(kept))
    found = results(files[1])
    names = [one["custom_id"] or one["error"]["line"] for one in found]
    assert sorted(map(str, names)) == sorted([str(n) for n in range(20)] + ["11"])
    assert len(engines) == 2 and run(files) == 1 and len(engines) == 2  # nothing is left: no model is loaded
    assert len(results(files[1])) == 21
    assert run(files, "--overwrite") == 1 and len(engines) == 3
    assert not set(files[1].read_bytes().splitlines()) & set(first.splitlines())


def test_files_that_cannot_be_used(engines, files, capsys, tmp_path):
    source, output = files

    def refused(*names, wanted: str) -> None:
        assert main(["run-batch", "-i", str(names[0]), "-o", str(names[1])]) == 2
        told = capsys.readouterr().err
        assert told.startswith("streamllm: error: ") and told.count("\n") == 1 and wanted in told

    refused(source, output, wanted="No such file")
    source.write_text("\n \n")
    refused(source, output, wanted="holds no request")
    write(source, [line("a")])
    refused(source, tmp_path / "none" / "out", wanted="--output-file")
    refused(source, tmp_path, wanted="folder")
    refused(tmp_path, output, wanted="directory")
    refused(source, source, wanted="is the input file")
    output.write_text("hello\n")
    refused(source, output, wanted="line 1 is no result of a batch")
    assert output.read_text() == "hello\n"
    assert not engines and run(files, "--overwrite") == 0
    capsys.readouterr()
    write(source, [line("b")])
    refused(source, output, wanted='results of other requests ("a")')
    assert main(["run-batch", "-i", str(source)]) == 2
    assert "-o/--output-file" in capsys.readouterr().err


def test_pipes(engines, monkeypatch):
    data = json.dumps(line("a")).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    assert main(["run-batch", "-i", "-", "-o", "-"]) == 0
    (result,) = [json.loads(one) for one in written.getvalue().splitlines()]
    assert result["custom_id"] == "a" and result["response"]["status_code"] == 200


def test_an_engine_that_dies(monkeypatch, files, capsys):
    engine = make_engine(step_seconds=0.01)
    monkeypatch.setattr(AsyncEngine, "from_config", lambda config: engine)
    original, steps = engine._executor.submit, []

    def submit(batch):
        steps.append(batch)
        if len(steps) > 20:
            engine.fail("the test wants it")
        return original(batch)

    monkeypatch.setattr(engine._executor, "submit", submit)
    write(files[0], [line(str(n), max_tokens=100) for n in range(20)])
    assert run(files) == 1
    assert "the engine died: the test wants it" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_started_again_with_the_default_model(default_model_path, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 16, "temperature": 0}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": n}}
        for n in range(24)
    ]
    write(source, lines)
    command = [sys.executable, "-m", "streamllm.cli.main", "run-batch", "-i", str(source), "-o", str(output)]
    command += ["--max-num-seqs", "2", "--kv-cache-memory-bytes", "64MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = [one for one in output.read_bytes().split(b"\n")[:-1]]
    assert 2 <= len(before) < 24
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 24 lines have results" in done.stderr
    assert output.read_bytes().split(b"\n")[: len(before)] == before
    found = results(output)
    assert sorted(int(one["custom_id"]) for one in found) == list(range(24))
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in found} == {
        found[0]["response"]["body"]["choices"][0]["message"]["content"]
    }
