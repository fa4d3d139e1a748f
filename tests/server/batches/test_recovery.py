"""Batches over several lives of a server: killed, stopped, or two at once on one folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_client import begin, chat_line, client_of, content, wait_for_end
from serving import run_server, text_script

from streamllm.server.batches.runner import FolderLock

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("killable_server.py")
NUM_LINES = 120


@contextlib.contextmanager
def killable_server(data_dir: Path, step_seconds: float) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server in a process of its own, and its URL; killed at the end."""
    command = [sys.executable, str(SERVER), str(data_dir), str(step_seconds)]
    root = str(SERVER.parents[3])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def check_complete(client, batch_id: str, num_lines: int) -> None:
    """Every line has exactly one result."""
    batch = wait_for_end(client, batch_id, timeout=60)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", num_lines, 0)
    lines = content(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [str(n) for n in range(num_lines)]
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines} == {"Hi there."}
    assert len({line["id"] for line in lines}) == num_lines


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path):
    results: dict[int, bytes] = {}
    for life in range(2):
        with killable_server(tmp_path, step_seconds=0.02) as (_, url), client_of(url) as client:
            if life == 0:
                batch_id = begin(client, [chat_line(str(n)) for n in range(NUM_LINES)]).id
            done_before = len(results)
            deadline = time.monotonic() + 30
            while (batch := client.batches.retrieve(batch_id)).request_counts.completed < done_before + 15:
                assert time.monotonic() < deadline, batch
                time.sleep(0.01)
            assert batch.status == "in_progress" and batch.request_counts.completed < NUM_LINES
        with contextlib.closing(sqlite3.connect(tmp_path / "server.sqlite")) as database:
            kept = dict(database.execute("SELECT line, result FROM batch_results"))
        # What a life has kept, no later one does again.
        assert results.items() <= kept.items() and len(kept) >= done_before + 15
        results = kept
    with killable_server(tmp_path, step_seconds=0.0) as (_, url), client_of(url) as client:
        check_complete(client, batch_id, NUM_LINES)
        output = client.files.content(client.batches.retrieve(batch_id).output_file_id).content
        assert set(results.values()) <= set(output.splitlines())
        with contextlib.closing(sqlite3.connect(tmp_path / "server.sqlite")) as database:
            deadline = time.monotonic() + 5
            while database.execute("SELECT count(*) FROM batch_results").fetchone()[0]:
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_stopped_in_the_middle(tmp_path):
    """Lines that run at the end are drained or done again; the batch goes on with the next server."""
    script = text_script("Hi there.", ends=True)
    settings = {"script": script, "data_dir": str(tmp_path)}
    with run_server(step_seconds=0.01, **settings) as server, client_of(server.url) as client:
        batch_id = begin(client, [chat_line(str(n)) for n in range(NUM_LINES)]).id
        server.wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 10)
    settings["shutdown_timeout"] = 0.0
    with run_server(step_seconds=0.01, **settings) as server, client_of(server.url) as client:
        done = client.batches.retrieve(batch_id).request_counts.completed
        assert 10 <= done < NUM_LINES
        server.wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed >= done + 10)
        assert client.batches.retrieve(batch_id).status == "in_progress"
    with run_server(**settings) as server, client_of(server.url) as client:
        check_complete(client, batch_id, NUM_LINES)


@pytest.mark.parametrize("status", ["cancelling", "finalizing", "validating"])
def test_a_server_that_ended_in_another_state(tmp_path, status):
    script = text_script("Hi there.", ends=True)
    settings = {"script": script, "data_dir": str(tmp_path)}
    with run_server(step_seconds=0.02, **settings) as server, client_of(server.url) as client:
        batch_id = begin(client, [chat_line(str(n)) for n in range(30)]).id
        server.wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 4)
    change = f"json_set(batch, '$.status', '{status}', '$.{status}_at', 1, '$.expires_at', 5000000000)"
    if status == "validating":
        change = "json_set(batch, '$.status', 'validating', '$.in_progress_at', null)"
    with contextlib.closing(sqlite3.connect(tmp_path / "server.sqlite")) as database, database:
        database.execute(f"UPDATE batches SET status = '{status}', batch = {change}")
    with run_server(**settings) as server, client_of(server.url) as client:
        batch = wait_for_end(client, batch_id)
        counts = batch.request_counts
        output, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
        assert len(output) == counts.completed and len(errors) == counts.failed
        if status == "validating":
            check_complete(client, batch_id, 30)
        elif status == "cancelling":
            assert batch.status == "cancelled" and counts.completed + counts.failed == 30
            assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


def test_an_input_file_that_has_gone(tmp_path):
    with run_server(step_seconds=0.05, data_dir=str(tmp_path)) as server, client_of(server.url) as client:
        batch = begin(client, [chat_line(str(n), max_tokens=30) for n in range(30)])
    (tmp_path / "files" / batch.input_file_id).unlink()
    with run_server(data_dir=str(tmp_path)) as server, client_of(server.url) as client:
        ended = wait_for_end(client, batch.id)
        assert ended.status == "failed" and [error.code for error in ended.errors.data] == ["missing_file"]
        server.canary()


@pytest.mark.slow
def test_two_servers_on_one_folder(tmp_path):
    """One runs the batches of both; when it stops the other goes on with them."""
    script = text_script("Hi there.", ends=True)
    settings = {"script": script, "data_dir": str(tmp_path), "shutdown_timeout": 0.0}
    with run_server(**settings) as second, client_of(second.url) as client:
        with run_server(step_seconds=0.01, **settings) as first, client_of(first.url) as other:
            wait_for_end(other, begin(other, [chat_line("x")]).id)
            batch_id = begin(client, [chat_line(str(n)) for n in range(NUM_LINES)]).id
            second.wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 5)
            runs = [first.stats().num_running > 0, second.stats().num_running > 0]
            assert sum(runs) <= 1
            cancelled = begin(client, [chat_line("a", max_tokens=4000)] * 1).id
            client.batches.cancel(cancelled)
            assert wait_for_end(other, cancelled).status in ("cancelled", "completed")
        check_complete(client, batch_id, NUM_LINES)


def test_the_lock(tmp_path):
    ours, theirs = FolderLock(tmp_path / "lock"), FolderLock(tmp_path / "lock")
    assert ours.acquire() and ours.acquire() and not theirs.acquire()
    ours.release()
    assert theirs.acquire() and not ours.acquire()
    theirs.release()


def test_what_is_too_old_goes(tmp_path):
    with run_server(data_dir=str(tmp_path)) as server, client_of(server.url) as client:
        batch = wait_for_end(client, begin(client, [chat_line("a", max_tokens=1)]).id)
    orphan = tmp_path / "files" / "abandoned.part"
    orphan.write_bytes(b"x")
    os.utime(orphan, (1, 1))
    fresh = tmp_path / "files" / "under-way.part"
    fresh.write_bytes(b"x")
    with contextlib.closing(sqlite3.connect(tmp_path / "server.sqlite")) as database, database:
        database.execute("UPDATE files SET expires_at = 1")
        database.execute("UPDATE batches SET created_at = 1")
    with run_server(data_dir=str(tmp_path)) as server, client_of(server.url) as client:
        server.wait_for(lambda: list((tmp_path / "files").iterdir()) == [fresh])
        assert client.files.list().data == []
        server.wait_for(lambda: client.batches.list().data == [])
        assert batch.output_file_id is not None
