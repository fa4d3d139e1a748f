"""How large the KV pool is, and how long a sequence may be in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from streamllm.config import EngineConfig
from streamllm.engine.block_table import most_blocks
from streamllm.errors import ConfigError, ModelLoadError, StreamLLMError
from streamllm.settings import AUTO_LENGTH

DEFAULT_POOL_BYTES = 2 * 2**30

DEFAULT_GPU_UTILIZATION = 0.92
"""``gpu_memory_utilization`` on a GPU if it is not given; then of no more than is free there."""


def num_kv_blocks(
    config: EngineConfig,
    *,
    bytes_per_block: int,
    weight_bytes: int,
    available: int,
    total: int | None = None,
) -> int:
    """Blocks in the KV pool, from the first of these that is set: ``num_gpu_blocks_override``,
    ``kv_cache_memory_bytes``, ``gpu_memory_utilization`` (weights included), the default.

    Args:
        bytes_per_block: K and V of all layers for one block.
        weight_bytes: what the weights take, and on a GPU the largest step.
        available: bytes available before the weights are loaded.
        total: of a GPU: what ``gpu_memory_utilization`` is a share of. On a CPU it is of ``available``.

    Raises:
        ConfigError: a flag asks for a pool of no blocks, or for more than is available.
        ModelLoadError: the weights leave no memory.
    """
    if config.num_gpu_blocks_override is not None:
        size, flag = config.num_gpu_blocks_override * bytes_per_block, "--num-kv-blocks"
    elif config.kv_cache_memory_bytes is not None:
        size, flag = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    elif config.gpu_memory_utilization is not None:
        size = int(config.gpu_memory_utilization * (total or available)) - weight_bytes
        flag = "--gpu-memory-utilization"
    elif total is not None:
        size, flag = int(DEFAULT_GPU_UTILIZATION * min(total, available)) - weight_bytes, None
    else:
        size, flag = min(DEFAULT_POOL_BYTES, (available - weight_bytes) // 2), None
    if size < bytes_per_block:
        raise _too_small(flag, size, bytes_per_block, weight_bytes, available)
    if size + weight_bytes > available:
        raise ConfigError(
            f"{flag} asks for a KV pool of {gib(size)}; with weights of {gib(weight_bytes)} that is more "
            f"than the {gib(available)} available. Lower it."
        )
    return size // bytes_per_block


def _too_small(
    flag: str | None, size: int, bytes_per_block: int, weight_bytes: int, available: int
) -> StreamLLMError:
    if flag is None:
        return ModelLoadError(
            f"The weights need {gib(weight_bytes)} and {gib(available)} are available: nothing is left for "
            "the KV cache. Free memory or take a smaller model."
        )
    return ConfigError(
        f"{flag} leaves {gib(max(size, 0))} for the KV cache beside weights of {gib(weight_bytes)}; one "
        f"block needs {gib(bytes_per_block)}. Raise it."
    )


def longest_sequence(
    config: EngineConfig, *, model_limit: int, num_blocks: int, windows: Sequence[int | None]
) -> int:
    """The longest sequence that is served, in tokens.

    Args:
        windows: of the model's KV groups.

    Raises:
        ConfigError: ``--max-model-len`` is more than the model or the pool can hold; the message says what
            would fit.
    """

    def fits(length: int) -> bool:
        return most_blocks(length, config.block_size, windows, config.max_num_batched_tokens) <= num_blocks

    fitting = bisect_right(range(1, model_limit + 1), False, key=lambda length: not fits(length))
    if config.max_model_len in (None, AUTO_LENGTH):
        if fitting == 0:
            raise ConfigError(
                f"the KV pool of {num_blocks} blocks of {config.block_size} tokens is too small for any "
                "sequence; raise --kv-cache-memory-bytes."
            )
        return fitting
    if config.max_model_len > model_limit:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's context of {model_limit} "
            "tokens."
        )
    if config.max_model_len > fitting:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit into the KV pool ({num_blocks} blocks of "
            f"{config.block_size} tokens). Use --max-model-len {fitting} or less (auto takes it), or a "
            "larger pool (--kv-cache-memory-bytes)."
        )
    return config.max_model_len


def gib(num_bytes: int) -> str:
    """A size for people: ``1.50 GiB``, ``12.0 MiB``, ``640 B``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes} B"
