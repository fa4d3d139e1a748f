"""gpt-oss: experts as MXFP4, transposed stacks, and in GGUFs; against Transformers' own reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from helpers.cpu_as_gpu import new_runner
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.rope import attention_factor, inverse_frequencies
from streamllm.models.weights import weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

GATE, UP = "model.layers.1.mlp.experts.3.gate_proj", "model.layers.1.mlp.experts.3.up_proj"
DOWN = "model.layers.1.mlp.experts.3.down_proj"
STACKS = "model.layers.1.mlp.experts"


def load(path: Path) -> tuple[ModelConfig, Checkpoint]:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    files = ModelFiles(name="gpt-oss", served_name="gpt-oss", kind=kind, path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def make_mxfp4_model(folder: Path) -> None:
    """A folder like openai/gpt-oss-20b: experts in random blocks and scales, the rest in 16 bits."""
    make_tiny_model(folder, "gpt-oss", dtype="bfloat16")
    path = folder / "model.safetensors"
    tensors, random = load_file(path), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8, generator=random)
    save_file(tensors, path, metadata={"format": "pt"})
    change_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    make_mxfp4_model(folder)
    return folder


def make_runner(config: ModelConfig, checkpoint: Checkpoint, **changes: Any) -> ModelRunner:
    settings = {
        "block_size": 16,
        "num_blocks": 32,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_dtype": "float32",
        "max_model_len": 128,
        "threads": 1,
        "progress": False,
        **changes,
    }
    return new_runner(config, checkpoint, **settings)


@pytest.mark.parametrize("backend", ["torch", "cpu", "gpu"])
def test_mxfp4_experts_compute_what_transformers_dequantises(mxfp4_folder: Path, backend: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        mxfp4_folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    config, checkpoint = load(mxfp4_folder)
    runner = make_runner(config, checkpoint, backend=backend)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, length).tolist() for length in (5, 40)]
    for run in generate(runner, prompts, max_tokens=4, budget=33):
        with torch.no_grad():
            expected = reference(torch.tensor([run.tokens[:-1]])).logits[0, len(run.prompt) - 1 :]
        np.testing.assert_allclose(np.array(run.logits), expected.numpy(), atol=1e-4)
    runner.close()


def test_mxfp4_rows_can_stay_as_stored(mxfp4_folder: Path) -> None:
    """In GGML's layout, for a backend that has a kernel."""
    _, checkpoint = load(mxfp4_folder)
    for name in (f"{GATE}.weight", f"{DOWN}.weight"):
        rows = checkpoint.read_stored(name)
        assert rows.format == checkpoint.format(name) == "mxfp4"
        assert checkpoint.num_bytes(name) == rows.data.nbytes
        values = gguf.quants.dequantize(rows.data, gguf.GGMLQuantizationType.MXFP4)
        assert np.array_equal(checkpoint.read(name), values)


@pytest.mark.parametrize("from_gguf", [False, True])
def test_mxfp4_experts_stay_packed(mxfp4_folder: Path, tmp_path: Path, from_gguf: bool) -> None:
    path = mxfp4_folder
    if from_gguf:
        path = tmp_path / "m.gguf"
        save_tiny_gguf(path, "gpt-oss", quantization="MXFP4")
    config, checkpoint = load(path)
    outputs = []
    for mode in ("float32", "packed"):
        runner = make_runner(config, checkpoint, backend="cpu", weight_mode=mode)
        outputs.append(generate(runner, [[5, 6, 7], list(range(40))], max_tokens=1))
        # All heights of this model but the head's are multiples of 32, so that panels have no padding.
        expected = weight_bytes(checkpoint, CpuOps.packed_formats, mode)
        assert runner.weight_bytes == pytest.approx(expected, rel=0.05)
        runner.close()
    experts = [name for name in checkpoint.names() if ".experts." in name and name.endswith(".weight")]
    assert {checkpoint.format(name) for name in experts} == {"mxfp4"} <= CpuOps.packed_formats
    for exact, packed in zip(*outputs, strict=True):
        error = np.array(packed.logits) - np.array(exact.logits)
        # Activations are rounded to 8 bits, which grows in a model of random weights.
        assert 0 < np.sqrt(np.mean(error**2)) < 0.2 * np.std(exact.logits)


def test_gate_and_up_take_turns(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt-oss", dtype="bfloat16")
    _, checkpoint = load(tmp_path)
    stored = {
        name: tensor.float().numpy() for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    rows = stored[f"{STACKS}.gate_up_proj"][3].T
    bias = stored[f"{STACKS}.gate_up_proj_bias"][3]
    for first, name in enumerate((GATE, UP)):
        assert np.array_equal(checkpoint.read(f"{name}.weight"), rows[first::2])
        assert np.array_equal(checkpoint.read(f"{name}.bias"), bias[first::2])
    assert np.array_equal(checkpoint.read(f"{DOWN}.weight"), stored[f"{STACKS}.down_proj"][3].T)
    assert np.array_equal(checkpoint.read(f"{DOWN}.bias"), stored[f"{STACKS}.down_proj_bias"][3])


@pytest.mark.parametrize("quantization", ["F32", "MXFP4"])
def test_a_gguf_has_the_same_tensors(tmp_path: Path, quantization: str) -> None:
    fields = {"swiglu_limit": 7.0}
    make_tiny_model(tmp_path / "folder", "gpt-oss", **fields)
    save_tiny_gguf(tmp_path / "m.gguf", "gpt-oss", quantization=quantization, **fields)
    config, checkpoint = load(tmp_path / "m.gguf")
    expected, folder = load(tmp_path / "folder")
    assert checkpoint.names() == folder.names()
    for name in folder.names():
        values = folder.read(name)
        if quantization == "MXFP4" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.MXFP4
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert np.array_equal(checkpoint.read(name), values), name
    for name in ("layer_windows", "num_experts", "top_k", "limit", "intermediate_size", "qkv_bias"):
        assert getattr(config, name) == getattr(expected, name), name
    assert np.array_equal(inverse_frequencies(config.ropes[0]), inverse_frequencies(expected.ropes[0]))
    assert attention_factor(config.ropes[0]) == pytest.approx(attention_factor(expected.ropes[0]))


def test_what_an_absent_field_means(tmp_path: Path) -> None:
    """As in Transformers' config class: YaRN by 32 from 4,096 positions, every other layer with a window."""
    make_tiny_model(tmp_path, "gpt-oss")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "sliding_window", "swiglu_limit", "swiglu_alpha"):
        del fields[name]
    path.write_text(json.dumps(fields))
    config, _ = load(tmp_path)
    rope = config.ropes[0]
    assert (rope.rope_type, rope.factor, rope.theta, rope.truncate) == ("yarn", 32.0, 150000.0, False)
    assert rope.original_max_position_embeddings == 4096
    assert config.layer_windows == (128, None) and config.limit == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 3}, r"mlp\.router\.weight in .* \[4, 64\].* must be \[3, 64\]"),
        (
            {"intermediate_size": 64},
            r"gate_up_proj_blocks in .* \[4, 192, 2, 16\].* must be \[4, 128, 2, 16\]",
        ),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be at most num_local_experts, got 5"),
        ({"swiglu_alpha": 1.5}, r"swiglu_alpha must be 1\.702, got 1\.5"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quantised with 'aqlm' are not supported"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_mxfp4_model(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_blocks_of_another_type_are_named(tmp_path: Path) -> None:
    make_mxfp4_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{STACKS}.down_proj_scales"] = tensors[f"{STACKS}.down_proj_scales"].float()
    save_file(tensors, path)
    _, checkpoint = load(tmp_path)
    with pytest.raises(ModelLoadError, match=r"down_proj_scales has the type float32; .* are uint8"):
        checkpoint.read(f"{DOWN}.weight")


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_bias"])
def test_a_missing_stack_is_named(tmp_path: Path, part: str) -> None:
    make_mxfp4_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{STACKS}.{part}"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=rf"lack the tensor {STACKS}\.{part}"):
        load(tmp_path)
