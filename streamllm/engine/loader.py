"""From a configuration to an engine: find the model, size the KV pool, load the weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.engine.memory import gib
from streamllm.engine.shard_loader import load, open_model, start_workers
from streamllm.errors import ModelLoadError
from streamllm.models.model_config import ModelConfig
from streamllm.runner.executor import Executor
from streamllm.runner.pending_runner import RunnerSize, Share
from streamllm.settings import AUTO_LENGTH
from streamllm.sources import resolve
from streamllm.sources.model_files import ModelFiles
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from streamllm.runner.distributed.executor import DistributedExecutor

logger = logging.getLogger("streamllm.engine")


def load_engine(config: EngineConfig) -> AsyncEngine:
    """See :meth:`AsyncEngine.from_config`."""
    files = resolve(config.model, revision=config.revision)
    model_config, checkpoint = open_model(config, files)
    tokenizer = _load_tokenizer(files)
    vocab_size = min(tokenizer.vocab_size, model_config.vocab_size)
    executor: Executor | DistributedExecutor
    if config.launcher is None:
        loading = load(config, model_config, checkpoint, sampled_vocab_size=vocab_size, share=Share())
        runner = loading.make_runner(loading.num_blocks)
        executor, size = Executor(runner), RunnerSize.of(runner, loading.place)
    else:
        executor = start_workers(config, files, model_config, checkpoint, sampled_vocab_size=vocab_size)
        size = executor.size
    _log_size(config, files, model_config, size)
    engine = AsyncEngine(
        config=config,
        model_name=files.served_name,
        model_config=model_config,
        tokenizer=tokenizer,
        chat_template=_load_chat_template(tokenizer),
        executor=executor,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        default_sampling=dict(model_config.default_sampling) if config.generation_config == "auto" else {},
    )
    engine.weight_bytes = size.weight_bytes
    try:
        engine.adapters.load_modules(config.lora_module_paths)
    except ModelLoadError:
        executor.close()
        raise
    return engine


def _log_size(config: EngineConfig, files: ModelFiles, model_config: ModelConfig, size: RunnerSize) -> None:
    """Says once what has been loaded, and what there is room for."""
    logger.info(
        "%s: weights %s, KV pool %s = %d blocks of %d tokens (%d tokens), sequences up to %d tokens, %s",
        files.served_name, gib(size.weight_bytes), gib(size.kv_cache_bytes), size.num_blocks,
        config.block_size, size.num_blocks * config.block_size, size.max_model_len, size.place,
    )  # fmt: skip
    if config.max_model_len in (None, AUTO_LENGTH) and size.max_model_len < model_config.context_length:
        logger.warning(
            "the KV pool holds sequences of %d tokens, the model would allow %d; raise "
            "--kv-cache-memory-bytes for longer ones",
            size.max_model_len, model_config.context_length,
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
