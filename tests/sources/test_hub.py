"""Models of a hub on this machine: what is fetched, what is kept, and what its faults come to."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_hub import COMMIT, FakeHub, git_sha1, serve_hub
from huggingface_hub import HfApi, errors, scan_cache_dir

from streamllm.errors import ModelLoadError
from streamllm.sources import ModelFiles, blob_download, hub, resolve

WEIGHTS = bytes(range(256)) * 400
REPO, SHARDED, PICKLED, GGUFS = "org/model", "org/sharded", "facebook/opt", "org/Model-GGUF"
UNWANTED = {
    "README.md": b"#", "model.fp32.safetensors": b"f", "onnx/model.onnx": b"o", "original/params.json": b"{}",
    "consolidated.safetensors": b"c", "tf_model.h5": b"h", "model.fp16.safetensors.index.json": b"{}",
    ".gitattributes": b"x",
}  # fmt: skip
DESCRIPTION = {"config.json": b"{}", "tokenizer.json": b"[]", "merges.txt": b"a b", "vocab.json": b'{"a": 0}'}
INDEX = json.dumps(
    {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
)
REPOSITORIES = {
    REPO: {**DESCRIPTION, **UNWANTED, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"p"},
    SHARDED: {
        **DESCRIPTION, "model.safetensors.index.json": INDEX.encode(), "model.safetensors": b"all in one",
        "model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    },
    PICKLED: {**DESCRIPTION, **UNWANTED, "pytorch_model.bin": WEIGHTS, "flax_model.msgpack": b"m"},
    GGUFS: {
        "config.json": b"{}", "README.md": b"#", "Model-Q8_0.gguf": WEIGHTS, "Model-Q4_K_M.gguf": WEIGHTS[1:],
        "Model-UD-Q2_K.gguf": b"2", "mmproj-F16.gguf": b"m", "BF16/Model-BF16-00001-of-00002.gguf": b"1",
        "BF16/Model-BF16-00002-of-00002.gguf": b"2", "BF16/Model-F32-00001-of-00002.gguf": b"1",
    },
    "org/nothing": {"README.md": b"#"},
    "org/adapter": {"config.json": b"{}", "adapter_model.safetensors": b"a"},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def online(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve_hub({repo: dict(files) for repo, files in REPOSITORIES.items()}) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.address)
        yield fake


def refused(message: str, name: str = REPO, **kwargs: Any) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        resolve(name, **kwargs)
    assert "\n" not in str(error.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def parts(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_a_folder_is_fetched_once_and_only_what_is_needed(online: FakeHub, cache: Path) -> None:
    files = resolve(REPO)
    assert files == ModelFiles(REPO, REPO, "folder", cache / "models--org--model" / "snapshots" / COMMIT)
    assert contents(files.path) == {**DESCRIPTION, "model.safetensors": WEIGHTS}
    asked = len(online.requests)
    assert resolve(REPO) == files == resolve(REPO, offline=True) == resolve(REPO, revision=COMMIT)
    assert len(online.requests) == asked


def test_the_cache_is_the_hubs_own(online: FakeHub, cache: Path) -> None:
    files = resolve(REPO)
    (repository,) = scan_cache_dir(cache).repos
    (revision,) = repository.revisions
    assert (repository.repo_id, revision.commit_hash, revision.refs) == (REPO, COMMIT, {"main"})
    blobs = {path.name for path in (cache / "models--org--model" / "blobs").iterdir()}
    assert {hashlib.sha256(WEIGHTS).hexdigest(), git_sha1(b"[]")} < blobs
    assert HfApi().snapshot_download(REPO, cache_dir=cache, local_files_only=True) == str(files.path)


def test_shards_are_those_of_the_index(online: FakeHub) -> None:
    found = contents(resolve(SHARDED).path)
    assert "model.safetensors" not in found
    assert found["model-00002-of-00002.safetensors"] == WEIGHTS[::-1]
    del online.repositories[SHARDED]["model-00002-of-00002.safetensors"]
    online.commit = "f" * 40
    refused(
        "has no model-00002-of-00002.safetensors, which its model.safetensors.index.json",
        SHARDED,
        update=True,
    )


def test_pickled_weights_only_where_there_are_no_others(online: FakeHub) -> None:
    assert contents(resolve(PICKLED).path) == {**DESCRIPTION, "pytorch_model.bin": WEIGHTS}


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("", ["Model-Q4_K_M.gguf"]),
        (":q8_0", ["Model-Q8_0.gguf"]),
        (":Model-Q8_0.gguf", ["Model-Q8_0.gguf"]),
        (":Q2_K", ["Model-UD-Q2_K.gguf"]),
        (":BF16", [f"BF16/Model-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        (":BF16/Model-BF16-00002-of-00002.gguf", [f"BF16/Model-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_one_gguf_of_many(online: FakeHub, cache: Path, tag: str, files: list[str]) -> None:
    found = resolve(f"hf.co/{GGUFS}{tag}")
    snapshot = cache / "models--org--Model-GGUF" / "snapshots" / COMMIT
    assert (found.kind, found.served_name, found.path) == ("gguf", GGUFS + tag, snapshot / files[0])
    assert sorted(contents(snapshot)) == files
    assert resolve(f"{GGUFS}{tag}", offline=True).path == found.path


def test_ggufs_that_are_not_there(online: FakeHub) -> None:
    refused(r"has no GGUF Q5_0; it has BF16, Q4_K_M, Q8_0, UD-Q2_K\.", f"{GGUFS}:Q5_0")
    refused("has no GGUF F32", f"{GGUFS}:F32")
    refused(r"has no \.gguf files\. Leave out :Q4_0", f"{REPO}:Q4_0")
    del online.repositories[GGUFS]["Model-Q4_K_M.gguf"]
    refused(
        r"holds 3 GGUF models\. Name one: org/Model-GGUF:NAME, with NAME one of BF16, Q8_0, UD-Q2_K", GGUFS
    )
    online.repositories[GGUFS]["Other-Q8_0.gguf"] = b"8"
    refused(r"could be any of Model-Q8_0\.gguf, Other-Q8_0\.gguf\. Name the file", f"{GGUFS}:Q8_0")


def test_an_interrupted_download_goes_on_where_it_stopped(online: FakeHub, cache: Path) -> None:
    online.breaks_after = [60000, 0, 0]
    refused("could not be fetched .*what has arrived is kept")
    (part,) = parts(cache)
    assert part.read_bytes() == WEIGHTS[:60000]
    assert not (cache / "models--org--model" / "refs").exists()
    refused("not complete in the Hugging Face cache", offline=True)
    del online.requests[:]
    assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS
    assert [(path.split("/")[-1], rest) for _, path, rest in online.requests[1:]] == [
        ("model.safetensors", "bytes=60000-")
    ]
    assert parts(cache) == []


def test_a_connection_that_breaks_is_taken_up_again(online: FakeHub) -> None:
    online.breaks_after = [30000, 30000, 0, 1]
    assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS


def test_a_server_that_knows_no_ranges(online: FakeHub, cache: Path) -> None:
    online.knows_ranges = False
    online.breaks_after = [30000, 30000]
    assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS


def test_a_wrong_checksum(online: FakeHub, cache: Path) -> None:
    online.corrupts = {"model.safetensors"}
    refused("model.safetensors of org/model arrived with a wrong checksum .* It was deleted")
    assert parts(cache) == []
    online.corrupts = {"config.json"}
    online.commit = "1" * 40
    online.repositories[REPO]["config.json"] = b"{ }"
    refused("config.json of org/model arrived with a wrong checksum .SHA1")
    online.corrupts = set()
    assert contents(resolve(REPO).path)["config.json"] == b"{ }"


def test_a_part_that_is_not_of_this_file(online: FakeHub, cache: Path) -> None:
    blobs = cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    part.write_bytes(b"x" * 5000)
    refused("wrong checksum")
    part.write_bytes(WEIGHTS + b"x")
    assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS


def test_updates_are_asked_for(online: FakeHub) -> None:
    first = resolve(REPO)
    online.commit = "a" * 40
    online.repositories[REPO]["config.json"] = b'{"new": 1}'
    del online.requests[:]
    assert resolve(REPO) == first
    second = resolve(REPO, update=True)
    assert online.downloads() == ["config.json"]
    assert contents(second.path)["config.json"] == b'{"new": 1}'
    assert resolve(REPO, offline=True, update=True) == second
    assert resolve(REPO, revision=COMMIT, offline=True).path == first.path


def test_a_revision_without_its_tokenizer_is_completed(online: FakeHub) -> None:
    folder = resolve(REPO).path
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink()
    assert resolve(REPO, offline=True).path == folder
    assert not (folder / "tokenizer.json").exists()
    assert contents(resolve(REPO).path) == {**DESCRIPTION, "model.safetensors": WEIGHTS}


def test_a_file_system_without_links(online: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    large = online.repositories[REPO]["model.safetensors"] = WEIGHTS * 20
    monkeypatch.setattr(Path, "symlink_to", refuse)
    online.repositories[REPO]["generation_config.json"] = DESCRIPTION["config.json"]
    found = contents(resolve(REPO).path)
    assert found["model.safetensors"] == large
    assert found["generation_config.json"] == found["config.json"]
    assert len(list(cache.rglob("*"))) and not any(path.is_symlink() for path in cache.rglob("*"))
    asked = len(online.downloads())
    assert asked == len(found) - 1  # the same content is fetched once
    resolve(REPO, update=True)
    assert len(online.downloads()) == asked


def test_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("not complete in the Hugging Face cache.*streamllm pull org/model", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("offline")


def test_a_hub_that_does_not_answer(online: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online.stalls = 1.0
    for module in (hub, blob_download):
        monkeypatch.setattr(module, "TIMEOUT", 0.1)
    start = time.monotonic()
    refused(r"could not be fetched from the Hugging Face hub \(.*timed out\)\. Check the network")
    assert time.monotonic() - start < 1
    assert not cache.exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("Connection refused")


def test_a_hub_that_falls_silent(online: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_download, "TIMEOUT", 0.1)
    repository = hub.Repository.ask(REPO, None)
    online.stalls = 1.0
    with pytest.raises(ModelLoadError, match=r"timed out.*what has arrived is kept"):
        repository.download(hub.HubName(REPO), None, False)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            (403, {"X-Error-Code": "GatedRepo"}),
            r"is gated: accept its terms on https://huggingface\.co/org/model",
        ),
        ((401, {}), r"refuses access to org/model \(HTTP 401\)\. Set HF_TOKEN"),
        ((503, {}), "answered HTTP 503"),
    ],
)
def test_files_that_are_refused(online: FakeHub, status: Any, message: str) -> None:
    online.status = status
    refused(message)


def test_repositories_that_are_no_models(online: FakeHub) -> None:
    refused("does not exist: there is no such folder here", "org/unknown")
    refused("has no revision 'v9'", revision="v9")
    refused("has no config.json and no .gguf file", "org/nothing")
    refused("has no model.safetensors or pytorch_model.bin and no .gguf", "org/adapter")


def test_the_token_is_sent(online: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve(REPO)
    assert online.tokens == {"Bearer hf_secret"}


def test_the_token_stays_with_the_hub(online: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve_hub(online.repositories) as cdn:
        online.redirects_to = cdn.address
        assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS
        assert cdn.downloads() == ["model.safetensors"]
        assert cdn.tokens == {None}


def test_something_else_than_a_hub(online: FakeHub) -> None:
    online.commit = ""
    refused("names no commit of org/model: it does not speak the Hugging Face hub's API")


def test_files_outside_the_folder_are_refused(online: FakeHub, tmp_path: Path) -> None:
    online.repositories[GGUFS] = {"../../../evil-Q4_0.gguf": b"e"}
    refused("would lie outside its folder", GGUFS)
    assert not list(tmp_path.rglob("evil*"))


def http_error(kind: type, status: int) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, f"HTTP {status}\nmore lines")
    error.response = SimpleNamespace(status_code=status, headers={}, request=None, url="", text="")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError, 403), "is gated"),
        (http_error(errors.HfHubHTTPError, 401), r"refuses access to org/model \(HTTP 401\)"),
        (ConnectionError("name resolution\nsecond line"), r"could not be fetched.*\(name resolution\)"),
        (TimeoutError(), r"could not be fetched.*\(TimeoutError\)"),
    ],
)
def test_errors_of_the_library_are_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def model_info(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    refused(message, offline=False)


def test_a_full_disk(online: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(blob_download.os, "fsync", fsync)
        refused("The disk is full .* set HF_HUB_CACHE to a folder on another disk")
    with monkeypatch.context() as patched:
        patched.setattr(blob_download.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        refused("The disk is full: org/model needs 0.00 GB more")
    refused("not complete", offline=True)
    assert contents(resolve(REPO).path)["model.safetensors"] == WEIGHTS


def test_a_cache_that_cannot_be_a_folder(online: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    refused(r"cannot be written \(Not a directory\)\. Make it writable, or set HF_HUB_CACHE")


CODE = f"""
from streamllm.sources import resolve
print((resolve({REPO!r}).path / "model.safetensors").stat().st_size)
"""


def fetching_process(**kwargs: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_two_at_once_share_one_download_and_one_interrupted_leaves_its_part(
    online: FakeHub, cache: Path
) -> None:
    online.seconds_a_chunk = 0.02
    first = fetching_process()
    while not any(blob_download._size(path) > 4096 for path in parts(cache)):
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    first.communicate()
    (part,) = [path for path in parts(cache) if path.stat().st_size > 4096]
    assert WEIGHTS.startswith(part.read_bytes())
    online.seconds_a_chunk = 0.0
    del online.requests[:]
    results = [process.communicate() for process in [fetching_process(), fetching_process()]]
    assert [out.strip() for out, _ in results] == [str(len(WEIGHTS))] * 2
    assert online.downloads().count("model.safetensors") == 1
    assert parts(cache) == []


def test_who_waits_for_another_says_so(
    online: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    online.seconds_a_chunk = 0.01
    other = threading.Thread(target=resolve, args=(REPO,))
    other.start()
    while not parts(cache):
        time.sleep(0.005)
    resolve(REPO)
    other.join()
    assert [record.message for record in caplog.records if record.name == hub.__name__] == [
        "Another process is downloading org/model; waiting for it."
    ]


def test_a_cached_model_needs_no_hub_library(online: FakeHub) -> None:
    resolve(REPO)
    code = f"import sys, streamllm.sources as s; s.resolve({REPO!r}); print('huggingface_hub' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "False"
