"""The ranks' parts of a checkpoint: together they are the tensors, and each reads only its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.integer_checkpoints import awq, gptq, quantise, save_quantised
from helpers.sharded_runner import files_of
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.dequantize import to_float32
from streamllm.models.load_quantization import to_q8_0
from streamllm.models.lora_targets import adaptable_matrices, lora_bytes
from streamllm.models.model_config import ModelConfig
from streamllm.models.mxfp4 import MXFP4Part
from streamllm.models.sharded_checkpoint import ShardedCheckpoint
from streamllm.models.sharding import TensorShard
from streamllm.models.sharding_plan import make_sharding_plan
from streamllm.models.stored_columns import take_columns
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.models.weights import weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.float8_rows import pack_float8
from streamllm.ops.lora import LoraLimits
from streamllm.ops.stored_rows import StoredRows


def save_float8(folder: Path) -> Path:
    """A Llama with matrices in 8-bit floats, a scale for each block of 128 rows and columns."""
    make_tiny_model(
        folder, "llama", hidden_size=128, intermediate_size=384, num_key_value_heads=4, head_dim=64
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            tensors[name] = (tensor * 8).to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in tensor.shape]
            tensors[f"{name}_scale_inv"] = torch.rand(*blocks) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_gguf(folder: Path, family: str, quantization: str, **fields) -> Path:
    folder.mkdir(exist_ok=True)
    save_tiny_gguf(folder / "m.gguf", family, quantization=quantization, **fields)
    return folder / "m.gguf"


def save_integers(folder: Path, write, group_size: int, **changes) -> Path:
    return save_quantised(
        folder,
        write,
        {
            "quant_method": "awq" if write is awq else "gptq",
            "bits": 4,
            "group_size": group_size,
            "version": "gemm",
        },
        lambda weight: quantise(weight, 4, group_size, symmetric=False, **changes),
    ).path


MODELS = {
    "float32": lambda folder: make_tiny_model(folder, "llama", attention_bias=True),
    "bfloat16": lambda folder: make_tiny_model(folder, "qwen2", dtype="bfloat16", tied=True),
    "transposed": lambda folder: make_tiny_model(folder, "gpt2", dtype="float16"),
    "fused": lambda folder: make_tiny_model(folder, "phi3"),
    "halves": lambda folder: make_tiny_model(folder, "granite4"),
    "stacks of experts": lambda folder: make_tiny_model(folder, "gpt-oss"),
    "interleaved": lambda folder: save_gguf(folder, "llama", "Q4_1", tied=True),
    "interleaved floats": lambda folder: save_gguf(folder, "llama", "F16"),
    "blocks too large": lambda folder: save_gguf(
        folder, "qwen2", "Q6_K", hidden_size=256, intermediate_size=512, num_attention_heads=4
    ),
    "experts in blocks": lambda folder: save_gguf(
        folder, "qwen2moe", "Q8_0", mlp_only_layers=[], use_sliding_window=False
    ),
    "gptq": lambda folder: save_integers(folder, gptq(4), 32),
    "gptq without blocks": lambda folder: save_integers(folder, gptq(4), 48),
    "awq": lambda folder: save_integers(folder, awq, 32),
    "float8": save_float8,
    "quantised as read": lambda folder: make_tiny_model(folder, "llama", dtype="bfloat16"),
}


@pytest.fixture(scope="module", params=MODELS)
def opened(request, tmp_path_factory) -> tuple[ModelConfig, Checkpoint]:
    files = files_of(MODELS[request.param](tmp_path_factory.mktemp("model")))
    config = ModelConfig.from_files(files)
    quantization = "int8" if request.param == "quantised as read" else None
    return config, open_checkpoint(files, config, quantization=quantization)


def rank_of(config: ModelConfig, checkpoint: Checkpoint, rank: int, size: int) -> ShardedCheckpoint:
    return ShardedCheckpoint(checkpoint, make_sharding_plan(config, checkpoint.format, rank=rank, size=size))


def place_of(shard: TensorShard, shape: tuple[int, ...]):
    """What a shard is an index of."""
    rows = [row for part in shard.rows or [range(shape[0])] for row in part]
    return np.ix_(rows, shard.columns or range(shape[1])) if len(shape) == 2 else rows


@pytest.mark.parametrize("size", [2, 4])
def test_all_parts_together_are_each_tensor(opened, size):
    """Each element is somewhere, in the right place, with the value that the whole has; those of heads that
    several ranks share more than once, and of tensors that are not divided on every rank."""
    config, checkpoint = opened
    plans = [make_sharding_plan(config, checkpoint.format, rank=rank, size=size) for rank in range(size)]
    ranks = [ShardedCheckpoint(checkpoint, plan) for plan in plans]
    for name in expected_shapes(config):
        whole = checkpoint.read(name)
        seen = np.zeros(whole.shape, int)
        for plan, own in zip(plans, ranks, strict=True):
            shard = plan.tensors.get(name)
            assert own.has(name) == (name in own.names()) == (shard is None or shard.rows != ())
            if not own.has(name):
                assert own.num_bytes(name) == 0
                seen += 1  # a bias of which rank 0 has all
                continue
            values = own.read(name)
            assert values.shape == own.shape(name) and values.flags.c_contiguous
            if shard is None:
                assert np.array_equal(values, whole)
                seen += 1
                continue
            place = place_of(shard, whole.shape)
            assert np.array_equal(values, whole[place])
            seen[place] += 1
        copies = size // config.num_kv_heads if size > config.num_kv_heads else 1
        alike = (
            {size} if name not in plans[0].tensors and name not in plans[-1].tensors else {1, copies, size}
        )
        assert set(np.unique(seen)) <= alike


def test_stored_parts_are_what_is_read(opened):
    config, checkpoint = opened
    for rank in range(2):
        plan = make_sharding_plan(config, checkpoint.format, rank=rank, size=2)
        own = ShardedCheckpoint(checkpoint, plan)
        for name, shape in expected_shapes(config).items():
            if len(shape) != 2:
                continue
            stored = own.read_stored(name)
            assert stored.format == own.format(name) and stored.data.nbytes == own.num_bytes(name)
            values = to_float32(stored, name).reshape(own.shape(name))
            whole = to_float32(checkpoint.read_stored(name), name).reshape(shape)
            assert np.array_equal(values, whole[place_of(plan.tensors.get(name, TensorShard()), shape)])


def test_rows_alone_are_rows_of_the_tensor(opened):
    """Of every tensor in the files' own layout, and of a part of one."""
    config, checkpoint = opened
    own = rank_of(config, checkpoint, 1, 2)
    for name, shape in expected_shapes(config).items():
        for each in (checkpoint, own):
            if not each.has(name):
                continue
            whole, count = each.read(name), each.shape(name)[0]
            for rows in (slice(0, count), slice(count // 3, max(count // 3, 2 * count // 3))):
                assert np.array_equal(each.read(name, rows), whole[rows])
                if len(shape) == 2:
                    stored = each.read_stored(name, rows)
                    assert np.array_equal(stored.data, each.read_stored(name).data[rows])


class Requests:
    """A checkpoint that notes how many bytes of which tensor it was asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.rows: dict[str, int] = {}

    def __getattr__(self, name: str):
        return getattr(self._checkpoint, name)

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        stored = self._checkpoint.read_stored(name, rows)
        self.rows[name] = self.rows.get(name, 0) + len(stored.data)
        return stored


@pytest.mark.parametrize("model", ["float32", "transposed", "interleaved", "gptq"])
def test_no_rank_asks_for_rows_of_others(tmp_path, model):
    files = files_of(MODELS[model](tmp_path / "m"))
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    for rank in range(2):
        requests = Requests(checkpoint)
        plan = make_sharding_plan(config, checkpoint.format, rank=rank, size=2)
        own = ShardedCheckpoint(requests, plan)
        for name, shard in plan.tensors.items():
            if len(checkpoint.shape(name)) == 2:
                own.read_stored(name)
                assert requests.rows[name] == own.shape(name)[0]
                assert shard.columns is not None or requests.rows[name] < checkpoint.shape(name)[0]


@pytest.mark.parametrize("mode", ["float32", "packed"])
def test_expected_bytes_are_the_ranks_alone(opened, mode):
    """All parts weigh what the whole does, and once more a rank what is not divided."""
    config, checkpoint = opened
    formats = CpuOps.packed_formats
    whole = weight_bytes(checkpoint, formats, mode)
    ranks = [rank_of(config, checkpoint, rank, 2) for rank in range(2)]
    plan = make_sharding_plan(config, checkpoint.format, rank=1, size=2)
    undivided = sum(
        4 * np.prod(shape) if len(shape) != 2 or mode == "float32" else checkpoint.num_bytes(name)
        for name, shape in expected_shapes(config).items()
        if name not in plan.tensors
    )
    total = sum(weight_bytes(own, formats, mode) for own in ranks)
    dequantised = [name for name, shard in plan.tensors.items() if shard.dequantised]
    if mode == "packed" and dequantised:
        assert total > whole + undivided
    else:
        assert total == whole + undivided


def test_what_must_be_dequantised_is_said_once(tmp_path, caplog):
    files = files_of(MODELS["blocks too large"](tmp_path))
    config = ModelConfig.from_files(files)
    own = rank_of(config, open_checkpoint(files, config), 0, 2)
    with caplog.at_level(logging.WARNING, "streamllm"):
        own.warn_of_dequantised({"float32"})
        own.warn_of_dequantised({"q6_k"})
    (line,) = caplog.messages
    assert line.startswith("2 matrices such as model.layers.0.self_attn.o_proj.weight have blocks (q6_k)")


def test_room_for_adapters_is_the_ranks(tmp_path):
    files = files_of(make_tiny_model(tmp_path, "llama"))
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    plan = make_sharding_plan(config, checkpoint.format, rank=0, size=2)
    own = lora_bytes(config, LoraLimits(2, 4), ShardedCheckpoint(checkpoint, plan), "float32", plan=plan)
    # qkv 64 -> 64 of 128 rows; o_proj 32 of 64 columns; gate and up 64 -> 96 of 192; down 48 of 96 columns.
    elements = (3 * 64 + 64) + (32 + 64) + (2 * 64 + 96) + (48 + 64)
    assert own == 2 * 2 * 4 * 4 * elements
    assert len(adaptable_matrices(config)) == 8


@given(st.data())
def test_columns_of_blocks(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = rng.standard_normal((3, 384)).astype(np.float32)
    kind, unit = data.draw(
        st.sampled_from([("float32", 1), ("bfloat16", 1), ("q8_0", 32), ("float8_e4m3", 128)])
    )
    rows = {
        "float32": lambda: StoredRows("float32", values.view(np.uint8)),
        "bfloat16": lambda: StoredRows(
            "bfloat16", (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        ),
        "q8_0": lambda: StoredRows("q8_0", to_q8_0(values)),
        "float8_e4m3": lambda: pack_float8(
            rng.integers(0, 126, (3, 384), dtype=np.uint8), rng.random((3, 3), np.float32)
        ),
    }[kind]()
    start = data.draw(st.integers(0, 384 // unit - 1))
    stop = data.draw(st.integers(start + 1, 384 // unit))
    columns = range(start * unit, stop * unit)
    taken = take_columns(rows, columns, "w")
    expected = to_float32(rows, "w").reshape(3, -1)[:, columns.start : columns.stop]
    assert np.array_equal(to_float32(taken, "w").reshape(3, -1), expected)
    if unit > 1:
        with pytest.raises(ValueError, match="does not begin and end with blocks"):
            take_columns(StoredRows("q8_0", to_q8_0(values)), range(8, 64), "w")


class MXFP4Stack:
    """Random blocks and scales of 2 matrices of 6 rows and 64 columns."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._tensors = {
            "w_blocks": rng.integers(0, 256, (2, 6, 32), dtype=np.uint8),
            "w_scales": rng.integers(110, 130, (2, 6, 2), dtype=np.uint8),
        }

    def read_stored(self, name: str) -> StoredRows:
        return StoredRows("u8", self._tensors[name].reshape(2, -1))


def test_rows_of_mxfp4_experts():
    part, files = MXFP4Part("w", (2, 6, 64), 1, slice(1, None, 2)), MXFP4Stack()
    whole = part.read(files)  # type: ignore[arg-type]
    assert np.array_equal(part.read(files, slice(1, 3)), whole[1:3])  # type: ignore[arg-type]
    stored = part.read_stored(files, slice(1, 3))  # type: ignore[arg-type]
    assert np.array_equal(to_float32(stored, "w"), whole[1:3])
