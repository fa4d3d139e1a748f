"""Files as OpenAI's client and raw HTTP see them."""

from __future__ import annotations

import http.client
import os
import stat
import time

import httpx
import openai
import pytest
from batch_client import client_of, store
from serving import run_server

BOUNDARY = "b0undary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data") / "made" / "later"


@pytest.fixture(scope="module")
def server(folder):
    settings = {"data_dir": str(folder), "max_file_bytes": 100_000, "store_max_file_bytes": 1_000_000}
    with run_server(**settings) as running:
        yield running


@pytest.fixture
def client(server):
    with client_of(server.url) as one:
        yield one
        for file in one.files.list():
            one.files.delete(file.id)


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {named}\r\n\r\n".encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")


def refused(server, body: bytes | None, status: int = 400, headers: dict = FORM) -> dict:
    response = httpx.post(server.url + "/v1/files", content=body, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_nothing_is_on_disk_before_the_first_file(tmp_path):
    with run_server(data_dir=str(tmp_path / "data")) as server, client_of(server.url) as client:
        assert client.files.list().data == [] and client.batches.list().data == []
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve("file-x")
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_x")
        assert not (tmp_path / "data").exists()
        store(client, [{}])
        assert (tmp_path / "data").exists()


def test_a_file_comes_back_as_it_was(client, folder):
    data = os.urandom(50_000) + b"\r\n--b0undary\r\n\r\n"
    made = client.files.create(file=("a ü.jsonl", data), purpose="batch")
    assert (made.object, made.bytes, made.purpose, made.status) == ("file", len(data), "batch", "processed")
    assert made.filename == "a ü.jsonl" and 29 * 86400 < made.expires_at - time.time() < 31 * 86400
    assert client.files.retrieve(made.id) == made
    response = client.files.content(made.id)
    assert response.content == data
    assert response.response.headers["content-type"] == "application/octet-stream"
    (file,) = (folder / "files").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "files").stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert client.files.delete(made.id).deleted
    assert not list((folder / "files").iterdir())
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_lists(client):
    ids = [store(client, [{"n": n}]) for n in range(5)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == ids  # page after page
    page = client.files.list(order="asc", limit=2, after=ids[1])
    assert [file.id for file in page.data] == ids[2:4] and page.has_more
    assert [file.id for file in client.files.list(purpose="batch", limit=1).data] == ids[4:]
    assert client.files.list(purpose="batch_output").data == []
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.list(**wrong)
        assert caught.value.param == next(iter(wrong))


def test_forms_that_are_refused(server, client, folder):
    file = part("file", b"{}", "a.jsonl")
    assert refused(server, PURPOSE + END)["param"] == "file"
    assert refused(server, file + END)["param"] == "purpose"
    wrong = refused(server, part("purpose", b"fine-tune") + file + END)
    assert wrong["param"] == "purpose" and '"fine-tune"' in wrong["message"]
    assert "more than one file" in refused(server, PURPOSE + file + file + END)["message"]
    assert "multipart" in refused(server, PURPOSE + file)["message"]  # cut short
    for malformed in (b"", b"{}", b"--other\r\n\r\n", f"--{BOUNDARY}\r\n\r\nx\r\n".encode() + END):
        assert "multipart" in refused(server, malformed)["message"]
    assert "multipart" in refused(server, b"{}", 415, {"content-type": "application/json"})["message"]
    no_boundary = {"content-type": "multipart/form-data"}
    assert "boundary" in refused(server, PURPOSE + END, 415, no_boundary)["message"]
    long_boundary = {"content-type": "multipart/form-data; boundary=" + "b" * 5000}
    refused(server, PURPOSE + END, 400, long_boundary)
    refused(server, part("x", b"y" * 100_000) + END, 413)
    expiry = part("expires_after[anchor]", b"created_at")
    for seconds in (b"10", b"a", b"99999999", b""):
        error = refused(server, PURPOSE + expiry + part("expires_after[seconds]", seconds) + file + END)
        assert error["param"] == "expires_after.seconds"
    assert client.files.list().data == [] and not list((folder / "files").iterdir())


def test_when_a_file_expires(client):
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(file=("a", b"{}"), purpose="batch", expires_after=expiry)
    assert made.expires_at == made.created_at + 3600


def test_too_large(server, client, folder):
    client.files.create(file=("a", b"x" * 100_000), purpose="batch")
    announced = refused(server, PURPOSE + part("file", b"x" * 200_000, "a") + END, 413)
    assert announced["code"] == "file_too_large" and "--max-file-bytes" in announced["message"]

    def chunks():
        yield PURPOSE + part("file", b"x" * 50_000, "a")[:-2]
        yield b"x" * 50_001 + b"\r\n" + END

    assert refused(server, chunks(), 413)["code"] == "file_too_large"
    assert len(list((folder / "files").iterdir())) == 1


def test_a_client_that_leaves_in_the_middle_leaves_nothing(server, client, folder):
    store(client, [{}])
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/files")
    for name, value in {**FORM, "content-length": "90000"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(PURPOSE + part("file", b"x" * 50_000, "a"))
    server.wait_for(lambda: len(list((folder / "files").iterdir())) == 2)
    connection.close()
    server.wait_for(lambda: len(list((folder / "files").iterdir())) == 1)
    for _ in range(9):  # its room is free again
        client.files.create(file=("a", b"x" * 99_000), purpose="batch")


def test_no_room(server, client):
    body = PURPOSE + part("file", b"x" * 99_000, "a") + END
    for _ in range(10):
        assert httpx.post(server.url + "/v1/files", content=body, headers=FORM).status_code == 200
    error = refused(server, body, 413)
    assert error["code"] == "storage_full" and "--store-max-file-bytes" in error["message"]
    client.files.delete(client.files.list().data[0].id)
    assert httpx.post(server.url + "/v1/files", content=body, headers=FORM).status_code == 200


def test_keys_own_files():
    with (
        run_server(api_key=("a", "b")) as server,
        client_of(server.url, "a") as ours,
        client_of(server.url, "b") as theirs,
    ):
        file_id = store(ours, [{}])
        assert [file.id for file in ours.files.list()] == [file_id] and theirs.files.list().data == []
        for ask in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file_id)
        with pytest.raises(openai.NotFoundError):
            theirs.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
        assert ours.files.retrieve(file_id).id == file_id
