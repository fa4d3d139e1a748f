"""From a configuration to a model runner on the CPU: native kernels, or the reference on torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from streamllm.config import EngineConfig
from streamllm.engine.memory import longest_sequence, num_kv_blocks
from streamllm.engine.model_shard import ModelShard
from streamllm.machine import available_cores, available_memory, memory_nodes
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.lora_targets import lora_bytes
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightMode
from streamllm.ops.instruction_set import instruction_set
from streamllm.ops.memory import spread_over_nodes
from streamllm.runner.model_runner import ModelRunner
from streamllm.runner.pending_runner import PendingRunner, Share

logger = logging.getLogger("streamllm.engine")


def load_on_cpu(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    sampled_vocab_size: int,
    progress: bool,
    share: Share,
) -> PendingRunner:
    """
    Raises:
        ConfigError: a flag cannot be honoured here.
        ModelLoadError: the model is not supported, or memory is too small for its weights.
    """
    shard = ModelShard.of(model_config, checkpoint, share)
    available = available_memory() // share.num_here
    threads = share.threads or _threads(config)
    is_dense = config.exact or model_config.through_transformers
    weight_mode: WeightMode = "float32" if is_dense else "packed"
    num_blocks = num_kv_blocks(
        config,
        bytes_per_block=ModelRunner.kv_bytes_per_block(
            shard.config, config.block_size, config.resolved_kv_cache_dtype
        ),
        weight_bytes=ModelRunner.expected_weight_bytes(shard.checkpoint, weight_mode)
        + lora_bytes(model_config, config.lora_limits, shard.checkpoint, weight_mode, plan=shard.plan),
        available=available,
    )
    longest = functools.partial(
        longest_sequence,
        config,
        model_limit=model_config.context_length,
        windows=model_config.kv_layout.windows,
    )
    longest(num_blocks=num_blocks)  # says what is wrong before the weights are loaded
    if config.backend != "torch":
        _prepare_machine(memory_nodes())

    def make_runner(num_blocks: int) -> ModelRunner:
        return ModelRunner(
            shard.config,
            checkpoint,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            kv_cache_dtype=config.resolved_kv_cache_dtype,
            max_model_len=longest(num_blocks=num_blocks),
            threads=threads,
            weight_mode=weight_mode,
            backend="torch" if config.backend == "torch" else "cpu",
            sampled_vocab_size=sampled_vocab_size,
            progress=progress,
            lora=config.lora_limits,
            whole_config=model_config,
            parallel=shard.parallel,
        )

    return PendingRunner(num_blocks, make_runner, f"{threads} threads", shard.shard_adapter)


def _threads(config: EngineConfig) -> int:
    cores = available_cores()
    if config.threads is None:
        return cores
    if config.threads > cores:
        logger.warning(
            "--threads %d is more than the %d cores that this process may use (affinity and control group): "
            "threads will wait for each other; leave it out or lower it",
            config.threads, cores,
        )  # fmt: skip
    return config.threads


def _prepare_machine(nodes: Sequence[int]) -> None:
    """Says once what makes this machine slower than it could be, and spreads memory over NUMA nodes."""
    if (kernels := instruction_set()).name == "portable":
        logger.warning(
            "the portable kernels run, which are several times slower than those for AVX2 and better (%s)",
            kernels.why,
        )
    if not spread_over_nodes(nodes):
        logger.warning(
            "the kernel refuses to spread memory over the %d NUMA nodes (a container's seccomp profile must "
            "allow mbind): weights and KV cache may lie on one of them",
            len(nodes),
        )  # fmt: skip
