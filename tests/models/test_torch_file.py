"""pytorch_model.bin read without torch, against torch's own reading of it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.torch_file import open_torch_file
from streamllm.sources.model_files import ModelFiles


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(name="m", served_name="m", kind="folder", path=folder)


def as_bin(folder: Path, *, shards: int = 1) -> dict[str, torch.Tensor]:
    """Turns a folder's safetensors into what transformers wrote before them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        members = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        torch.save(members, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("float16", 3), ("bfloat16", 1)])
def test_a_folder_with_bin_weights_is_the_same_model(tmp_path: Path, dtype: Any, shards: int) -> None:
    make_tiny_model(tmp_path, dtype=dtype)
    tensors = as_bin(tmp_path, shards=shards)
    files = files_of(tmp_path)
    checkpoint = open_checkpoint(files, ModelConfig.from_files(files))
    assert checkpoint.names() == set(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.format(name) == dtype
        assert np.array_equal(checkpoint.read(name), tensor.float().numpy())
        checkpoint.release(name)
        assert np.array_equal(checkpoint.read_stored(name).data.ravel(), tensor.view(torch.uint8).ravel())


def test_what_training_scripts_save(tmp_path: Path) -> None:
    """Parameters, ties, views into a shared storage, other types, names of something else beside them."""
    base = torch.arange(24, dtype=torch.float32)
    saved = {
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "whole": base,
        "view": base[8:16].view(2, 4),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "counter": torch.tensor([5]),
    }
    torch.save({"state_dict": saved, "epoch": 3}, tmp_path / "m.bin")
    tensors = open_torch_file(tmp_path / "m.bin")
    assert set(tensors) == set(saved)
    for name in ("parameter", "whole", "view", "scalar"):
        assert np.array_equal(tensors[name].values(name), saved[name].detach().float().numpy())
    with pytest.raises(ModelLoadError, match=r"The tensor counter .* has the type I64; supported are F32"):
        tensors["counter"].values("counter")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("it ran",))


def test_code_in_a_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.ones(2), "y": Bomb()}, tmp_path / "m.bin")
    with pytest.raises(ModelLoadError, match=r"asks for __builtin__\.print, .* Convert it to safetensors"):
        open_torch_file(tmp_path / "m.bin")
    assert "it ran" not in capsys.readouterr().out


def test_every_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(30, 40), "b": torch.ones(5)}, path)
    whole = path.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"is not a file of torch\.save") as error:
            open_torch_file(path)
        assert "\n" not in str(error.value)
    rng = np.random.default_rng(0)
    header_bytes = [p for p in range(len(whole)) if not 2000 < p < len(whole) - 1500]
    for position in rng.choice(header_bytes, 300):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            for name, tensor in open_torch_file(path).items():
                if tensor.dtype == "F32":
                    tensor.values(name)
        except ModelLoadError as error:
            assert "\n" not in str(error)


def rewrite(path: Path, **changes: bytes | None) -> None:
    """Replaces an archive's entries by the ends of their names; ``None`` leaves one out."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            new = changes.get(name.rsplit("/", 1)[-1].replace(".", "_"), content)
            if new is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_pkl": None}, "holds no single data.pkl"),
        ({"data_pkl": pickle.dumps([1, 2])}, "holds a list, not tensors by name"),
        ({"data_pkl": b"not a pickle"}, "has a damaged data.pkl"),
    ],
)
def test_archives_of_something_else(tmp_path: Path, changes: dict[str, bytes | None], message: str) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "m.bin")
    rewrite(tmp_path / "m.bin", **changes)
    with pytest.raises(ModelLoadError, match=message):
        open_torch_file(tmp_path / "m.bin")


def test_storages_that_do_not_hold_their_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(30, 40)}, path)
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as archive:
        storage = next(name for name in archive.namelist() if "/data/" in name)
        entries = {name: archive.read(name) for name in archive.namelist()}
    for replacement in (None, entries[storage][:-4]):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in entries.items():
                kept = data if name != storage else replacement
                if kept is not None:
                    archive.writestr(name, kept)
        with pytest.raises(ModelLoadError, match="the tensor a"):
            open_torch_file(path)
    torch.save({"a": torch.ones(30, 40).T}, path)
    with pytest.raises(ModelLoadError, match="the tensor a is stored with gaps or transposed"):
        open_torch_file(path)
