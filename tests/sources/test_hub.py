"""The hub, with its library's download replaced at the bottom: no test here needs a network."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from streamllm.errors import ModelLoadError
from streamllm.sources import hub, resolve

REPO = "org/model"


def write_model(folder: Path, *, sharded: bool = False, without: tuple[str, ...] = ()) -> Path:
    names = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}
    if sharded:
        del names["model.safetensors"]
        names["model-1.safetensors"] = names["model-2.safetensors"] = ""
        weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        names["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map})
    folder.mkdir(exist_ok=True)
    for name, content in names.items():
        if name not in without:
            (folder / name).write_text(content)
    return folder


class FakeHub:
    """Stands for ``snapshot_download``: what is cached, what the network gives, and what was asked."""

    def __init__(self, cached: Path | None, online: Path | Exception | None) -> None:
        self.cached = cached
        self.online = online
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, **kwargs: Any) -> str:
        self.calls.append({"repo_id": repo_id, **kwargs})
        found = self.cached if kwargs.get("local_files_only") else self.online
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise errors.LocalEntryNotFoundError("not cached")
        return str(found)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(cached: Path | None, online: Path | Exception | None = None) -> FakeHub:
        fake = FakeHub(cached, online)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return install


@pytest.mark.parametrize("sharded", [False, True])
def test_a_whole_cached_model_needs_no_network(install: Any, tmp_path: Path, sharded: bool) -> None:
    fake = install(write_model(tmp_path, sharded=sharded))
    assert resolve(REPO, revision="abc").path == tmp_path
    assert [call.get("local_files_only") for call in fake.calls] == [True]
    assert fake.calls[0]["revision"] == "abc"


@pytest.mark.parametrize("missing", ["config.json", "model-2.safetensors"])
def test_an_interrupted_download_is_completed(install: Any, tmp_path: Path, missing: str) -> None:
    partial = write_model(tmp_path / "partial", sharded=True, without=(missing,))
    whole = write_model(tmp_path / "whole", sharded=True)
    fake = install(partial, whole)
    assert resolve(REPO).path == whole
    assert len(fake.calls) == 2


def test_pickles_are_never_asked_for(install: Any, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    fake = install(None, write_model(tmp_path))
    resolve(REPO)
    patterns = {key: fake.calls[-1][key] for key in ("allow_patterns", "ignore_patterns")}
    files = ["config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    files += ["tokenizer.model", "chat_template.jinja", "merges.txt", "model.safetensors.index.json"]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "original/params.json",
    ]
    unwanted += ["model.gguf", "README.md", "onnx/model.onnx"]
    assert sorted(filter_repo_objects(files + unwanted, **patterns)) == sorted(files)


def test_offline(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(None, write_model(tmp_path))
    with pytest.raises(ModelLoadError, match="not complete in the Hugging Face cache"):
        resolve(REPO, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="offline"):
        resolve(REPO)
    assert all(call["local_files_only"] for call in fake.calls)


def http_error(kind: type, status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None, url="", text="")
    error = kind.__new__(kind)
    Exception.__init__(error, f"HTTP {status}\nmore lines")
    error.response = response
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http_error(errors.GatedRepoError, 403),
            r"is gated: accept its terms on https://huggingface\.co/org/model",
        ),
        (http_error(errors.RepositoryNotFoundError, 401), "does not exist: there is no such folder here"),
        (http_error(errors.RevisionNotFoundError, 404), "has no revision 'v9'"),
        (http_error(errors.HfHubHTTPError, 401), r"refuses access to org/model \(HTTP 401\)"),
        (http_error(errors.HfHubHTTPError, 503), "answered HTTP 503"),
        (
            errors.LocalEntryNotFoundError("no connection\nsecond line"),
            r"could not be fetched.*\(no connection\)",
        ),
        (ConnectionError("name resolution"), r"could not be fetched.*Check the network"),
        (TimeoutError(), r"could not be fetched.*\(TimeoutError\)"),
    ],
)
def test_errors_are_one_line(install: Any, error: Exception, message: str) -> None:
    install(None, error)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve(REPO, revision="v9")
    assert "\n" not in str(caught.value)


def test_a_repository_of_another_format(install: Any, tmp_path: Path) -> None:
    install(None, write_model(tmp_path, without=("model.safetensors",)))
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors: .*For a GGUF"):
        resolve(REPO)


def test_progress_bars_stay_off_and_come_back(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    seen = []
    fake = install(None, write_model(tmp_path))

    def record(repo_id: str, **kwargs: Any) -> str:
        seen.append(are_progress_bars_disabled())
        return fake(repo_id, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    before = are_progress_bars_disabled()
    hub.fetch(REPO, revision=None, offline=False, progress=False)
    assert seen[-1] is True
    assert are_progress_bars_disabled() == before
