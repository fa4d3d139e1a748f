"""What a start says about the machine, and about weights that it has no kernel for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from helpers.tiny_gguf import save_tiny_gguf

from streamllm import _native
from streamllm.config import EngineConfig
from streamllm.engine import cpu_loader
from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ops.cpu_plan import CpuOps
from streamllm.sources.gguf_file import GGUFFile


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    save_tiny_gguf(path)
    return path


@pytest.fixture
def start(caplog):
    """Loads a model and gives the warnings that were logged meanwhile."""

    async def load(path: Path, **settings) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "streamllm"):
            engine = AsyncEngine.from_config(
                EngineConfig(model=str(path), num_gpu_blocks_override=32, **settings)
            )
            await engine.start()
            await engine.stop()
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    return load


def about(warnings: list[str], word: str) -> list[str]:
    return [warning for warning in warnings if word in warning]


async def test_threads_are_the_cores_at_hand(model, start, monkeypatch, caplog):
    monkeypatch.setattr(cpu_loader, "available_cores", lambda: 3)
    assert about(await start(model), "threads") == []
    assert any("3 threads" in r.getMessage() for r in caplog.records)


async def test_more_threads_than_cores_are_warned_of_once(model, start, monkeypatch, caplog):
    monkeypatch.setattr(cpu_loader, "available_cores", lambda: 2)
    (warning,) = about(await start(model, threads=5), "threads")
    assert "--threads 5" in warning and "2 cores" in warning
    assert any("5 threads" in r.getMessage() for r in caplog.records)
    assert about(await start(model, threads=2), "threads") == []


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads):
    with pytest.raises(ConfigError, match=rf"--threads must be between 1 and 1024, got {threads}"):
        EngineConfig(threads=threads)


async def test_the_portable_kernels_are_warned_of_once(model, start):
    before = _native.instruction_set()
    _native.set_instruction_set("portable")
    try:
        warnings = await start(model)
        assert about(await start(model, backend="torch"), "portable") == []
    finally:
        _native.set_instruction_set(before)
    assert len(about(warnings, "portable")) == 1
    if before != "portable":
        assert about(await start(model), "portable") == []


async def test_nodes_that_memory_cannot_be_spread_over_are_warned_of(model, start, monkeypatch):
    monkeypatch.setattr(cpu_loader, "memory_nodes", lambda: [900, 901])
    (warning,) = about(await start(model), "NUMA")
    assert "2 NUMA nodes" in warning and "mbind" in warning
    monkeypatch.undo()
    assert about(await start(model), "NUMA") == []


async def test_a_weight_type_without_a_kernel_is_dequantised_and_named(tmp_path, start, monkeypatch):
    monkeypatch.setattr(CpuOps, "packed_formats", CpuOps.packed_formats - {"q5_0"})
    save_tiny_gguf(tmp_path / "m.gguf", quantization="Q5_0")
    (warning,) = about(await start(tmp_path / "m.gguf"), "kernel for")
    assert "q5_0" in warning and "float32" in warning


@pytest.mark.parametrize(("number", "name"), [(99, "has GGML type number 99"), (24, "type i8")])
async def test_a_weight_type_that_nothing_reads_is_refused_by_name(tmp_path, start, number, name):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path)
    data = bytearray(path.read_bytes())
    # In the directory a tensor's type follows its name, its number of dimensions and their sizes.
    end_of_name = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight")
    at = end_of_name + 4 + 2 * 8
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    assert GGUFFile(path).tensors["blk.0.ffn_up.weight"].type_id == number
    with pytest.raises(ModelLoadError, match=rf"blk\.0\.ffn_up\.weight .*{name}, which is not"):
        await start(path)
