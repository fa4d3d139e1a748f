"""Weights from safetensors folders and GGUF files, against the transformers models they were saved from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import FAMILIES, load_reference, make_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.rope import inverse_frequencies
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.sources import ModelFiles
from streamllm.sources.gguf_file import open_gguf

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles(name=str(folder), served_name=folder.name, kind="folder", path=folder)


def gguf_files(path: Path) -> ModelFiles:
    return ModelFiles(name=str(path), served_name=path.stem, kind="gguf", path=path)


def load(files: ModelFiles) -> tuple[ModelConfig, Checkpoint]:
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def assert_equal_to(model: Any, config: ModelConfig, checkpoint: Checkpoint, atol: float = 0) -> None:
    """Every tensor that the config asks for is the model's; the head too, wherever it comes from."""
    expected = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    for name, shape in expected_shapes(config).items():
        actual = checkpoint.read(name)
        assert checkpoint.shape(name) == actual.shape == shape
        assert actual.dtype == np.float32
        assert actual.flags.c_contiguous and actual.flags.aligned
        np.testing.assert_allclose(actual, expected[name], atol=atol, rtol=0, err_msg=name)
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    np.testing.assert_allclose(checkpoint.read(head), expected[HEAD], atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_and_type(tmp_path: Path, family: Any, dtype: Any) -> None:
    make_tiny_model(tmp_path, family, dtype=dtype)
    config, checkpoint = load(folder_files(tmp_path))
    assert checkpoint.names() == set(expected_shapes(config))
    assert_equal_to(load_reference(tmp_path), config, checkpoint)


def test_biases_everywhere(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    config, checkpoint = load(folder_files(tmp_path))
    assert checkpoint.has("model.layers.1.mlp.down_proj.bias")
    assert_equal_to(load_reference(tmp_path), config, checkpoint)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different", "instead"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_flag_and_stored_head(tmp_path: Path, tied: bool, head: str, sharded: bool) -> None:
    """The head is what transformers takes; one that it would make up at random is refused."""
    make_tiny_model(tmp_path, tied=tied, sharded=sharded)
    rewrite_head(tmp_path, head)
    if not tied and head in ("absent", "instead"):
        missing = HEAD if head == "absent" else EMBEDDING
        with pytest.raises(ModelLoadError, match=f"lack the tensor {missing}"):
            load(folder_files(tmp_path))
        return

    config, checkpoint = load(folder_files(tmp_path))

    assert config.tie_word_embeddings == (tied and head != "different")
    assert checkpoint.has(HEAD) == (not config.tie_word_embeddings)
    assert_equal_to(load_reference(tmp_path), config, checkpoint)


def rewrite_head(folder: Path, head: str) -> None:
    """What is stored: no head, one equal to the embedding, a different one, or a head and no embedding."""
    index = folder / "model.safetensors.index.json"
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    embedding = tensors[EMBEDDING]
    tensors.pop(HEAD, None)
    if head == "equal":
        tensors[HEAD] = embedding.clone()
    elif head == "different":
        tensors[HEAD] = embedding.flip(0).contiguous()
    elif head == "instead":
        tensors[HEAD] = tensors.pop(EMBEDDING)
    if not index.exists():
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, name in enumerate(tensors):
        shard = f"model-{number % 3}.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        members = {name: tensors[name] for name, where in weight_map.items() if where == shard}
        save_file(members, folder / shard, metadata={"format": "pt"})
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_file_cut_short_anywhere(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    files = folder_files(tmp_path)
    config = ModelConfig.from_files(files)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is cut short: it ends after") as error:
            open_checkpoint(files, config)
        assert "\n" not in str(error.value)
    path.write_bytes(whole)
    open_checkpoint(files, config)


def header(**entry: Any) -> bytes:
    content = json.dumps({"x": entry}).encode()
    return len(content).to_bytes(8, "little") + content + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(range(100)), "is not a safetensors file"),
        ((20).to_bytes(8, "little") + b"no JSON" + bytes(100), "damaged safetensors header"),
        ((2).to_bytes(8, "little") + b"[]" + bytes(100), "damaged safetensors header"),
        (header(dtype="F32", shape=[2, 2], data_offsets=[0, 8]), "damaged safetensors header"),
        (header(dtype="F32", shape=[-1, -4], data_offsets=[0, 16]), "damaged safetensors header"),
        (header(dtype="F32", shape=[4], data_offsets=[-16, 0]), "damaged safetensors header"),
        (header(dtype="F32", shape=[100], data_offsets=[0, 400]), "is cut short"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    make_tiny_model(tmp_path)
    files = folder_files(tmp_path)
    config = ModelConfig.from_files(files)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(files, config)


def test_missing_weights(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, sharded=True)
    files = folder_files(tmp_path)
    config = ModelConfig.from_files(files)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(
        ModelLoadError, match=rf"The shard {shards[1].name} \(2 of {len(shards)}\) is missing"
    ):
        open_checkpoint(files, config)

    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": []}')
    with pytest.raises(ModelLoadError, match="is not an index of a model's shards"):
        open_checkpoint(files, config)

    index.unlink()
    with pytest.raises(ModelLoadError, match=r"has no weights: neither .* nor pytorch_model\.bin"):
        open_checkpoint(files, config)


def test_a_tensor_that_contradicts_the_config(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, intermediate_size=96)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 128}))
    message = r"The tensor model\.layers\.0\.mlp\.gate_proj\.weight .* \[96, 64\]; .* must be \[128, 64\]"
    with pytest.raises(ModelLoadError, match=message):
        load(folder_files(tmp_path))


def test_a_type_that_cannot_be_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, path)
    _, checkpoint = load(folder_files(tmp_path))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .* has the type I8"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(ModelLoadError, match=r"lack the tensor model\.nothing"):
        checkpoint.read("model.nothing")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_equals_the_model_that_it_was_made_from(tmp_path: Path, family: Any, tied: bool) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = save_tiny_gguf(tmp_path / "m.gguf", family, tied=tied, **biases)
    config, checkpoint = load(gguf_files(tmp_path / "m.gguf"))
    assert config.tie_word_embeddings == tied
    assert config.vocab_size == 320
    assert config.eos_token_ids == (2,)
    assert config.qkv_bias == (family in ("llama", "qwen2"))
    assert config.qk_norm == (family == "qwen3")
    assert checkpoint.names() == set(expected_shapes(config))
    assert_equal_to(model, config, checkpoint)


# Half a quantisation step of weights whose blocks span about +-0.9, and one more bit for the rounded scale.
@pytest.mark.parametrize(
    ("quantization", "atol"), [("F16", 5e-4), ("BF16", 4e-3), ("Q8_0", 6e-3), ("Q4_1", 0.08)]
)
def test_quantised_gguf(tmp_path: Path, quantization: str, atol: float) -> None:
    model = save_tiny_gguf(tmp_path / "m.gguf", quantization=quantization)
    config, checkpoint = load(gguf_files(tmp_path / "m.gguf"))
    assert_equal_to(model, config, checkpoint, atol=atol)


def test_gguf_cut_short_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path)
    files = gguf_files(path)
    config = ModelConfig.from_files(files)
    whole = path.read_bytes()
    lengths = [0, 3, 23, 24, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 33]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="cut short") as error:
            open_checkpoint(files, config)
        assert "\n" not in str(error.value)


def test_every_damaged_byte_of_a_gguf_header_is_a_clean_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path)
    files = gguf_files(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(0, 9000, 300):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            load(files)
        except ModelLoadError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' is not supported"),
        ("expert_count", 8.0, r"lack the tensor blk\.0\.ffn_down_exps\.weight"),
        ("rope.freq_base", float("nan"), r"llama\.rope\.freq_base must be a number, got nan"),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured(tmp_path: Path, name: str, value: Any, message: str) -> None:
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, extra_metadata={name: value})
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_files(gguf_files(path))


def test_gguf_of_another_architecture_or_none(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported; supported are llama"):
        ModelConfig.from_files(gguf_files(path))
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        ModelConfig.from_files(gguf_files(path))


def test_gguf_yarn(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512.0}
    save_tiny_gguf(
        path, "qwen2", extra_metadata={f"rope.scaling.{key}": value for key, value in scaling.items()}
    )
    config = ModelConfig.from_files(gguf_files(path))

    folder = tmp_path / "folder"
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    make_tiny_model(folder, "qwen2", rope_parameters=yarn)
    from_folder = ModelConfig.from_files(folder_files(folder))

    assert config.context_length == from_folder.context_length == 2048
    assert np.array_equal(inverse_frequencies(config.ropes[0]), inverse_frequencies(from_folder.ropes[0]))
    assert config.ropes[0].attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_gguf_frequency_factors_are_llama3s_scaling(tmp_path: Path) -> None:
    """llama.cpp writes Llama 3.1's scaling to rope_freqs; it gives the frequencies of transformers."""
    folder, path = tmp_path / "folder", tmp_path / "m.gguf"
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    make_tiny_model(folder, rope_parameters=llama3, head_dim=64)
    expected = inverse_frequencies(ModelConfig.from_files(folder_files(folder)).ropes[0])

    save_tiny_gguf(tmp_path / "plain.gguf", head_dim=64)
    reader = gguf.GGUFReader(tmp_path / "plain.gguf")
    copy_with_tensor(reader, path, "rope_freqs.weight", converter_factors(64, 10000.0, llama3))
    config, checkpoint = load(gguf_files(path))

    np.testing.assert_allclose(inverse_frequencies(config.ropes[0]), expected, rtol=3e-7)
    assert not np.array_equal(config.ropes[0].frequency_factors, np.ones(32))
    assert not checkpoint.has("rope_freqs.weight")


def converter_factors(dim: int, base: float, scaling: dict[str, Any]) -> np.ndarray:
    """``LlamaModel.generate_extra_tensors`` of llama.cpp's converter."""
    factors = []
    low_wavelength = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high_wavelength = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    for frequency in 1.0 / base ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def copy_with_tensor(reader: Any, path: Path, name: str, values: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    add_fields(writer, reader)
    writer.add_tensor(name, values)
    write(writer, reader.tensors)


def add_fields(writer: Any, reader: Any) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and len(field.types) == 1:
            writer.add_key_value(key, field.contents(), field.types[0])


def write(writer: Any, tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_gguf(path: Path, count: int, tensors: Sequence[Any] | None = None) -> Path:
    """Cuts a file as llama-gguf-split does: the first part has all metadata (here: and no tensor)."""
    reader = gguf.GGUFReader(path)
    tensors = reader.tensors if tensors is None else tensors
    size = -(-len(tensors) // (count - 1))
    parts = [path.with_name(f"m-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            add_fields(writer, reader)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        write(writer, tensors[(number - 1) * size : number * size] if number else [])
    return parts[0]


def test_a_split_gguf_is_the_model_that_it_was_cut_from(tmp_path: Path) -> None:
    model = save_tiny_gguf(tmp_path / "whole.gguf", quantization="Q8_0")
    first = split_gguf(tmp_path / "whole.gguf", 3)
    whole_config, whole = load(gguf_files(tmp_path / "whole.gguf"))
    config, checkpoint = load(gguf_files(first))
    assert config == whole_config and checkpoint.names() == whole.names()
    assert_equal_to(model, config, checkpoint, atol=6e-3)
    for name in whole.names():
        assert checkpoint.num_bytes(name) == whole.num_bytes(name)
        assert np.array_equal(checkpoint.read_stored(name).data, whole.read_stored(name).data)
        checkpoint.release(name)
        assert np.array_equal(checkpoint.read(name), whole.read(name))


def test_a_split_gguf_that_is_not_whole(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "whole.gguf")
    first = split_gguf(tmp_path / "whole.gguf", 3)
    second, third = (first.with_name(f"m-0000{number}-of-00003.gguf") for number in (2, 3))
    with pytest.raises(ModelLoadError, match=r"one of the 3 files of a split GGUF\. Give the first"):
        open_gguf(second)
    content = third.read_bytes()
    third.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003\.gguf is cut short"):
        load(gguf_files(first))
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelLoadError, match="they do not belong together"):
        load(gguf_files(first))
    third.unlink()
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003\.gguf \(3 of 3\) is missing"):
        load(gguf_files(first))


def test_the_default_model_is_complete(default_model_path: Path) -> None:
    config, checkpoint = load(gguf_files(default_model_path))
    assert checkpoint.names() == set(expected_shapes(config))
    norm = checkpoint.read("model.norm.weight")
    assert norm.shape == (576,) and np.isfinite(norm).all()
    reader = gguf.GGUFReader(default_model_path)
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.ffn_down.weight")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(checkpoint.read("model.layers.7.mlp.down_proj.weight"), expected)


def test_a_truncated_copy_of_the_default_model(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copy(default_model_path, path)
    with open(path, "r+b") as file:
        file.truncate(50_000_000)
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is cut short: it ends after 50000000 bytes"):
        load(gguf_files(path))
