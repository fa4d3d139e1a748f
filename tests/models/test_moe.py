"""How experts lie in files: one tensor each, or stacked, by Transformers or by llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.cpu_as_gpu import new_runner
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model, new_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.loading_progress import LoadingProgress
from streamllm.models.model_config import ModelConfig
from streamllm.models.moe import load_weights
from streamllm.models.tensor_shapes import TensorShapes
from streamllm.models.weights import CheckpointLoader
from streamllm.ops.torch_ops import TorchOps
from streamllm.sources.model_files import ModelFiles

FAMILIES = ("mixtral", "qwen2moe", "qwen3moe")
PLAIN = {
    "qwen2moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "mixtral": {"sliding_window": None},
}
"""What a GGUF's metadata cannot say."""


def load(path: Path) -> tuple[ModelConfig, Checkpoint]:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    files = ModelFiles(name="moe", served_name="moe", kind=kind, path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def save(folder: Path, family: str, *, stacked: bool, **fields: Any) -> dict[str, np.ndarray]:
    """A tiny model in one of the generations of names; gives what Transformers holds."""
    torch.manual_seed(0)
    model = new_tiny_model(family, **fields)
    model.save_pretrained(folder, save_original_format=not stacked)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def expert_parts(name: str) -> tuple[str, int, str] | None:
    """The layer, the number and the part of an expert's tensor."""
    if ".experts." not in name:
        return None
    before, after = name.split(".experts.")
    number, part, _ = after.split(".")
    return before.rpartition(".")[0], int(number), {"w1": "gate_proj", "w3": "up_proj"}.get(part, part)


def assert_equal_to(checkpoint: Checkpoint, held: dict[str, np.ndarray]) -> None:
    """Every tensor is what Transformers holds, experts as parts of its stacks."""
    num_experts = 0
    for name in checkpoint.names():
        parts = expert_parts(name)
        if parts is None:
            expected = held[name.replace(".block_sparse_moe.", ".mlp.")]
        else:
            num_experts += 1
            layer, number, part = parts
            if part in ("gate_proj", "up_proj"):
                stack = held[f"{layer}.mlp.experts.gate_up_proj"][number]
                expected = np.split(stack, 2)[part == "up_proj"]
            else:
                expected = held[f"{layer}.mlp.experts.down_proj"][number]
        values = checkpoint.read(name)
        assert values.shape == checkpoint.shape(name) and np.array_equal(values, expected), name
    assert num_experts


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_generations_of_names(tmp_path: Path, family: str, stacked: bool) -> None:
    held = save(tmp_path, family, stacked=stacked)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(tensor.ndim == 3 for tensor in stored.values()) == stacked
    config, checkpoint = load(tmp_path)
    assert_equal_to(checkpoint, held)
    shapes = TensorShapes()
    load_weights(shapes, config)
    assert checkpoint.names() == set(shapes.shapes)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_ggufs(tmp_path: Path, family: str, joined: bool) -> None:
    fields = PLAIN.get(family, {"decoder_sparse_step": 1})
    model = save_tiny_gguf(tmp_path / "m.gguf", family, joined_experts=joined, **fields)
    config, checkpoint = load(tmp_path / "m.gguf")
    assert_equal_to(checkpoint, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    make_tiny_model(tmp_path / "folder", family, **fields)
    expected, _ = load(tmp_path / "folder")
    for name in (
        "architecture",
        "sparse_layers",
        "expert_size",
        "num_experts",
        "top_k",
        "shared_size",
        "qk_norm",
    ):
        assert getattr(config, name) == getattr(expected, name), name
    # llama.cpp takes what the published models have, whatever a tiny one was given.
    assert config.normalize == (family != "qwen2moe")


def test_quantised_experts_stay_as_stored(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", "qwen3moe", quantization="Q8_0", decoder_sparse_step=1)
    _, checkpoint = load(tmp_path / "m.gguf")
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    rows = checkpoint.read_stored(name)
    assert rows.format == checkpoint.format(name) == "q8_0" and rows.shape == (32, 64 // 32 * 34)


def test_16_bit_experts_compute_what_their_float32_values_do(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2moe", dtype="bfloat16")
    config, checkpoint = load(tmp_path)
    logits = []
    for mode in ("float32", "packed"):
        runner = new_runner(
            config,
            checkpoint,
            weight_mode=mode,
            block_size=16,
            num_blocks=32,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            kv_cache_dtype="float32",
            max_model_len=128,
            threads=2,
            progress=False,
        )
        runs = generate(runner, [[5, 6, 7], list(range(50))], max_tokens=4)
        logits.append(np.concatenate([run.logits for run in runs]))
        runner.close()
    assert np.array_equal(*logits)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    config, checkpoint = load(tmp_path)
    assert config.sparse_layers == (False, True, False, False)
    assert checkpoint.has("model.layers.3.mlp.gate_proj.weight")


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("qwen2moe", "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("qwen2moe", "model.layers.0.mlp.shared_expert_gate.weight"),
    ],
)
def test_a_missing_expert_is_named(tmp_path: Path, family: str, missing: str) -> None:
    save(tmp_path, family, stacked=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[missing]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=f"lack the tensor {missing}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 5}, r"mlp\.gate\.weight in .* \[6, 64\].* must be \[5, 64\]"),
        ({"moe_intermediate_size": 48}, r"gate_up_proj in .* \[6, 64, 64\].* must be \[6, 96, 64\]"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok must be at most num_experts, got 7"),
        ({"mlp_only_layers": "1"}, r"mlp_only_layers must be a list of layers' numbers, got '1'"),
        ({"shared_expert_intermediate_size": 32}, r"shared_expert\.gate_proj\.weight in .* \[64, 64\]"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantised with 'mxfp4' are not supported"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path, "qwen2moe", stacked=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


class WatchedReads:
    """A checkpoint that notes which experts have been read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self._checkpoint.read(name)


class CountingOps(TorchOps):
    """Takes an expert's parts and sees that nothing was read ahead of them."""

    watched: WatchedReads

    def expert_matrices(self, rows: int, columns: int, experts: Iterable[Any], bias: Any = None) -> Any:
        start = len(self.watched.reads)
        count = 0
        for parts in experts:
            for _ in parts:
                count += 1
                assert len(self.watched.reads) == start + count
        return None


def test_one_expert_is_in_memory_at_a_time(tmp_path: Path) -> None:
    save(tmp_path, "mixtral", stacked=True)
    config, checkpoint = load(tmp_path)
    ops = CountingOps()
    ops.watched = WatchedReads(checkpoint)
    load_weights(CheckpointLoader(ops.watched, ops, progress=LoadingProgress(0, show=False)), config)
    assert sum(".experts." in name for name in ops.watched.reads) == 2 * 4 * 3


SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}


@pytest.mark.parametrize("sliding", [{}, {"use_sliding_window": True, "max_window_layers": 3}])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_absent_fields_mean_what_transformers_takes_them_for(
    tmp_path: Path, model_type: str, sliding: dict[str, Any]
) -> None:
    fields = {"model_type": model_type, **SIZES, **sliding}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = ModelConfig.from_files(ModelFiles("moe", "moe", "folder", tmp_path))
    assert (config.num_kv_heads, config.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert (config.num_experts, config.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert config.bos_token_id == theirs.bos_token_id and not config.tie_word_embeddings
    assert list(config.eos_token_ids) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])
    assert config.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert config.ropes[0].rope_type == theirs.rope_parameters["rope_type"]
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = theirs.sliding_window or None
    assert config.layer_windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    if model_type != "gpt_oss":
        assert config.expert_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert config.shared_size == getattr(theirs, "shared_expert_intermediate_size", 0)
        assert config.normalize == getattr(theirs, "norm_topk_prob", True)
