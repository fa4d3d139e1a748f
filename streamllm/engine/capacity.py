"""What a model would take on this machine, and how much it could serve, without loading it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from streamllm import machine
from streamllm.config import EngineConfig
from streamllm.engine.block_table import most_blocks
from streamllm.engine.memory import gib, longest_sequence, num_kv_blocks
from streamllm.engine.model_shard import ModelShard
from streamllm.errors import StreamLLMError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.lora_targets import check_adaptable, lora_bytes
from streamllm.models.model_config import ModelConfig
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.models.weights import WeightMode, weight_bytes
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.kv_cache import kv_bytes_per_block
from streamllm.runner.pending_runner import Share
from streamllm.settings import AUTO_LENGTH

_TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)
_Q4_K_M_BYTES = 0.61
"""Bytes a parameter of llama.cpp's most usual quantisation."""


@dataclass(frozen=True)
class Capacity:
    """A model on this machine.

    Attributes:
        architecture: as in ``config.json``.
        num_workers: among which it is divided. Memory, from ``weight_bytes`` on, is that of the one that has
            most of it.
        num_parameters: elements of all weights.
        weight_formats: bytes in the file by format.
        weight_bytes: bytes in memory.
        adapter_bytes: bytes that full slots of LoRA adapters take beside them.
        kv_cache_dtype: of the KV cache.
        kv_bytes_per_token: over all layers; those with a window give theirs back.
        block_size: tokens a block.
        kv_bytes_per_block: of a block, which may hold a part of the layers.
        context_length: tokens that the model is made for.
        available: bytes of memory that could be used.
        place: ``"the CPU"``, or the GPU's name.
        num_blocks: of the KV pool; 0 if the model does not fit.
        max_model_len: longest sequence in tokens; 0 if the model does not fit.
        sequences: (tokens, how many sequences of so many fit into the pool at a time).
        problem: why the model does not fit, and ``None`` if it does.
        remedies: what would make it fit.
    """

    architecture: str
    num_workers: int
    num_parameters: int
    weight_formats: dict[str, int]
    weight_bytes: int
    adapter_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    block_size: int
    kv_bytes_per_block: int
    context_length: int
    available: int
    place: str
    num_blocks: int
    max_model_len: int
    sequences: tuple[tuple[int, int], ...]
    problem: str | None
    remedies: tuple[str, ...]

    @property
    def kv_pool_bytes(self) -> int:
        return self.num_blocks * self.kv_bytes_per_block


@dataclass(frozen=True)
class _Target:
    """Where the model would run, and in which precisions."""

    place: str
    available: int
    total: int | None
    packed_formats: Collection[str]
    dense_itemsize: int
    kv_cache_dtype: str
    kv_bytes_per_block: int


def capacity(config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint) -> Capacity:
    """Plans as loading does, with the same rules.

    On a GPU the activations of the largest step are not known before the model runs: the real pool is
    smaller by those.

    Raises:
        ConfigError: a flag cannot be honoured on this machine.
    """
    shard = _fullest_shard(config, model_config, checkpoint)
    if config.resolved_backend == "cuda":
        target = _gpu_target(config, shard.config, checkpoint)
    else:
        target = _cpu_target(config, shard.config)
    layout, bytes_per_block = model_config.kv_layout, target.kv_bytes_per_block
    mode: WeightMode = "float32" if config.exact or model_config.through_transformers else "packed"
    weights = weight_bytes(
        shard.checkpoint, target.packed_formats, mode, dense_itemsize=target.dense_itemsize
    )
    adapters = 0
    if config.enable_lora:
        check_adaptable(model_config)
        adapters = (
            lora_bytes(
                model_config, config.lora_limits, checkpoint, mode, dense_itemsize=target.dense_itemsize
            )
            // config.world_size
        )
    num_blocks = longest = 0
    problem = None
    try:
        num_blocks = num_kv_blocks(
            config,
            bytes_per_block=bytes_per_block,
            weight_bytes=weights + adapters,
            available=target.available,
            total=target.total,
        )
        longest = longest_sequence(
            config,
            model_limit=model_config.context_length,
            num_blocks=num_blocks,
            windows=layout.windows,
        )
    except StreamLLMError as error:
        problem = str(error)

    def blocks_of(length: int) -> int:
        return most_blocks(length, config.block_size, layout.windows, config.max_num_batched_tokens)

    lengths = sorted({*(length for length in _TYPICAL_LENGTHS if length < longest), longest} - {0})
    num_parameters = _num_parameters(model_config, checkpoint)
    return Capacity(
        architecture=model_config.architecture,
        num_workers=config.world_size,
        num_parameters=num_parameters,
        weight_formats=_formats(checkpoint),
        weight_bytes=weights,
        adapter_bytes=adapters,
        kv_cache_dtype=target.kv_cache_dtype,
        kv_bytes_per_token=bytes_per_block * layout.num_groups // config.block_size,
        block_size=config.block_size,
        kv_bytes_per_block=bytes_per_block,
        context_length=model_config.context_length,
        available=target.available,
        place=target.place,
        num_blocks=num_blocks if longest else 0,
        max_model_len=longest,
        sequences=tuple((length, num_blocks // blocks_of(length)) for length in lengths),
        problem=problem,
        remedies=_remedies(config, target, shard.checkpoint, mode, weights + adapters, num_parameters)
        if problem
        else (),
    )


def _fullest_shard(config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint) -> ModelShard:
    """The part of the model that takes most memory."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    shards = [
        ModelShard.of(
            model_config, checkpoint, Share(rank=rank, size=size, stage=stage, num_stages=num_stages)
        )
        for stage in range(num_stages)
        for rank in range(size)
    ]
    return max(shards, key=lambda shard: sum(map(shard.checkpoint.num_bytes, shard.checkpoint.names())))


def _block_shape(config: EngineConfig, model_config: ModelConfig) -> tuple[int, int, int, int]:
    layers_per_block = model_config.kv_layout.layers_per_block
    return layers_per_block, model_config.num_kv_heads, model_config.head_dim, config.block_size


def _cpu_target(config: EngineConfig, model_config: ModelConfig) -> _Target:
    dtype = config.resolved_kv_cache_dtype
    return _Target(
        "the CPU",
        machine.available_memory() // (1 if config.launcher == "ray" else config.world_size),
        None,
        CpuOps.packed_formats,
        4,
        dtype,
        kv_bytes_per_block(*_block_shape(config, model_config), dtype),
    )


def _gpu_target(config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint) -> _Target:
    from streamllm.engine.gpu_loader import activation_dtype, cache_dtype, find_gpu
    from streamllm.ops.gpu.device_kv_cache import device_kv_bytes_per_block
    from streamllm.ops.gpu.gpu_ops import DTYPES
    from streamllm.ops.gpu.weight_layout import PACKED_FORMATS

    gpu = find_gpu(config)
    dtype = activation_dtype(config, checkpoint)
    kv_dtype = cache_dtype(config, dtype)
    return _Target(
        gpu.name,
        gpu.memory.free(),
        gpu.memory.total(),
        PACKED_FORMATS,
        DTYPES[dtype].itemsize,
        kv_dtype,
        device_kv_bytes_per_block(*_block_shape(config, model_config), kv_dtype),
    )


def _num_parameters(model_config: ModelConfig, checkpoint: Checkpoint) -> int:
    if model_config.through_transformers:
        return sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    return sum(math.prod(shape) for shape in expected_shapes(model_config).values())


def _formats(checkpoint: Checkpoint) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in checkpoint.names():
        stored_as = checkpoint.format(name)
        found[stored_as] = found.get(stored_as, 0) + checkpoint.num_bytes(name)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _remedies(
    config: EngineConfig,
    target: _Target,
    checkpoint: Checkpoint,
    mode: WeightMode,
    weights: int,
    num_parameters: int,
) -> tuple[str, ...]:
    """What would help, the nearest first."""
    found = []
    if weights < target.available:
        if config.max_model_len not in (None, AUTO_LENGTH):
            found.append("--max-model-len auto takes the longest sequence that fits")
        found.append(f"a KV pool that fits beside the weights: {gib(target.available - weights)} are left")
    if mode == "float32":
        packed = weight_bytes(
            checkpoint, target.packed_formats, "packed", dense_itemsize=target.dense_itemsize
        )
        if packed < weights:
            found.append(f"weights as the file holds them, without --dtype float32: {gib(packed)}")
    quantised = int(_Q4_K_M_BYTES * num_parameters)
    if quantised < target.available < 2 * weights:
        found.append(f"a quantised GGUF of the model: about {gib(quantised)} as Q4_K_M")
    if weights >= target.available:
        found.append(f"{gib(weights - target.available)} more memory for the weights alone")
    return tuple(found)
