"""From a configuration to an engine: find the model, size the KV pool, load the weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.engine.memory import gib, longest_sequence, num_kv_blocks
from streamllm.errors import ModelLoadError
from streamllm.machine import available_cores, available_memory, memory_nodes
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.kv_layout import kv_layout
from streamllm.models.lora_targets import check_adaptable, lora_bytes
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightMode
from streamllm.ops.instruction_set import instruction_set
from streamllm.ops.memory import spread_over_nodes
from streamllm.runner.executor import Executor
from streamllm.runner.model_runner import ModelRunner
from streamllm.settings import AUTO_LENGTH
from streamllm.sources import resolve
from streamllm.sources.model_files import ModelFiles
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tokenizer import Tokenizer

logger = logging.getLogger("streamllm.engine")


def load_engine(config: EngineConfig) -> AsyncEngine:
    """See :meth:`AsyncEngine.from_config`."""
    files = resolve(config.model, revision=config.revision)
    model_config = ModelConfig.from_files(files, trust_remote_code=config.trust_remote_code)
    if config.enable_lora:
        check_adaptable(model_config)
    checkpoint = open_checkpoint(files, model_config, quantization=config.quantization)
    tokenizer = _load_tokenizer(files)
    load = _load_on_cpu
    if config.resolved_backend == "cuda":
        from streamllm.engine.gpu_loader import load_on_gpu

        load = load_on_gpu
    runner, place = load(
        config,
        model_config,
        checkpoint,
        sampled_vocab_size=min(tokenizer.vocab_size, model_config.vocab_size),
        progress=sys.stderr.isatty(),
    )
    logger.info(
        "%s: weights %s, KV pool %s = %d blocks of %d tokens (%d tokens), sequences up to %d tokens, %s",
        files.served_name, gib(runner.weight_bytes), gib(runner.kv_cache_bytes), runner.num_blocks,
        config.block_size, runner.num_blocks * config.block_size, runner.max_model_len, place,
    )  # fmt: skip
    if config.max_model_len in (None, AUTO_LENGTH) and runner.max_model_len < model_config.context_length:
        logger.warning(
            "the KV pool holds sequences of %d tokens, the model would allow %d; raise "
            "--kv-cache-memory-bytes for longer ones",
            runner.max_model_len, model_config.context_length,
        )  # fmt: skip
    engine = AsyncEngine(
        config=config,
        model_name=files.served_name,
        model_config=model_config,
        tokenizer=tokenizer,
        chat_template=_load_chat_template(tokenizer),
        executor=Executor(runner),
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        default_sampling=dict(model_config.default_sampling) if config.generation_config == "auto" else {},
    )
    engine.weight_bytes = runner.weight_bytes
    try:
        engine.adapters.load_modules(config.lora_module_paths)
    except ModelLoadError:
        runner.close()
        raise
    return engine


def _load_on_cpu(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    sampled_vocab_size: int,
    progress: bool,
) -> tuple[ModelRunner, str]:
    """A runner on the CPU (native kernels, or the reference on torch), and what to call that."""
    available = available_memory()
    threads = _threads(config)
    is_dense = config.exact or model_config.through_transformers
    weight_mode: WeightMode = "float32" if is_dense else "packed"
    num_blocks = num_kv_blocks(
        config,
        bytes_per_block=ModelRunner.kv_bytes_per_block(
            model_config, config.block_size, config.resolved_kv_cache_dtype
        ),
        weight_bytes=ModelRunner.expected_weight_bytes(checkpoint, weight_mode)
        + lora_bytes(model_config, config.lora_limits, checkpoint, weight_mode),
        available=available,
    )
    max_model_len = longest_sequence(
        config,
        model_limit=model_config.context_length,
        num_blocks=num_blocks,
        windows=kv_layout(model_config.layer_windows).windows,
    )
    if config.backend != "torch":
        _prepare_machine(memory_nodes())
    runner = ModelRunner(
        model_config,
        checkpoint,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        kv_cache_dtype=config.resolved_kv_cache_dtype,
        max_model_len=max_model_len,
        threads=threads,
        weight_mode=weight_mode,
        backend="torch" if config.backend == "torch" else "cpu",
        sampled_vocab_size=sampled_vocab_size,
        progress=progress,
        lora=config.lora_limits,
    )
    return runner, f"{threads} threads"


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


def _load_tokenizer(files: ModelFiles) -> Tokenizer:
    if files.kind == "gguf":
        return Tokenizer.from_gguf(files.path)
    return Tokenizer.from_folder(files.path)


def _load_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_token_strings)
    except ModelLoadError as error:
        logger.warning("no chat with this model, completions only: %s", error)
        return None
