"""From a configuration to a model, or the part of it that one of several workers runs."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

from streamllm.config import EngineConfig
from streamllm.engine.cpu_loader import load_on_cpu
from streamllm.engine.model_shard import ModelShard
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.lora_targets import check_adaptable
from streamllm.models.model_config import ModelConfig
from streamllm.runner.pending_runner import PendingRunner, Share
from streamllm.sources.model_files import ModelFiles

if TYPE_CHECKING:
    from streamllm.runner.distributed.executor import DistributedExecutor


def open_model(config: EngineConfig, files: ModelFiles) -> tuple[ModelConfig, Checkpoint]:
    """What the files say of themselves; no weights are read.

    Raises:
        ModelLoadError: the model is not supported, or its files are broken.
    """
    model_config = ModelConfig.from_files(files, trust_remote_code=config.trust_remote_code)
    if config.enable_lora:
        check_adaptable(model_config)
    return model_config, open_checkpoint(files, model_config, quantization=config.quantization)


def load(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    sampled_vocab_size: int,
    share: Share,
) -> PendingRunner:
    """
    Args:
        sampled_vocab_size: ids below this are sampled.
        share: what this process has of the model.

    Raises:
        ConfigError: a flag cannot be honoured here.
        ModelLoadError: the model is not supported, or memory is too small for its weights.
    """
    load_here = load_on_cpu
    if config.resolved_backend == "cuda":
        from streamllm.engine.gpu_loader import load_on_gpu

        load_here = load_on_gpu
    progress = share.rank == share.stage == 0 and sys.stderr.isatty()
    return load_here(
        config,
        model_config,
        checkpoint,
        sampled_vocab_size=sampled_vocab_size,
        progress=progress,
        share=share,
    )


def load_shard(
    config: EngineConfig, files: ModelFiles, sampled_vocab_size: int, share: Share
) -> PendingRunner:
    """:func:`load` with the model's files; what a worker calls."""
    model_config, checkpoint = open_model(config, files)
    return load(config, model_config, checkpoint, sampled_vocab_size=sampled_vocab_size, share=share)


def start_workers(
    config: EngineConfig,
    files: ModelFiles,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    sampled_vocab_size: int,
) -> DistributedExecutor:
    """Workers with a shard each, and what drives them.

    Raises:
        ConfigError: the model cannot be divided among so many, there are fewer devices, or something that
            they need is not installed.
        ModelLoadError: as :func:`load`, in a worker.
    """
    from streamllm.models.lora_adapter import read_adapter
    from streamllm.runner.distributed.startup import start_executor

    share = Share(size=config.tensor_parallel_size, num_stages=config.pipeline_parallel_size)
    ModelShard.of(model_config, checkpoint, share)  # says what is wrong now
    limits = config.lora_limits
    read = functools.partial(read_adapter, config=model_config, max_rank=limits.max_rank if limits else 0)
    return start_executor(config, files, load_shard, sampled_vocab_size=sampled_vocab_size, read_adapter=read)
