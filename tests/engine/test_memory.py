from __future__ import annotations

import pytest

from streamllm.config import EngineConfig
from streamllm.engine.memory import gib, longest_sequence, num_kv_blocks
from streamllm.errors import ConfigError, ModelLoadError

GIB = 2**30
MIB = 2**20


def blocks(available=8 * GIB, weights=1 * GIB, **settings) -> int:
    return num_kv_blocks(
        EngineConfig(**settings), bytes_per_block=MIB, weight_bytes=weights, available=available
    )


def test_the_pool_is_2_gib_or_half_of_what_is_left():
    assert blocks() == 2048
    assert blocks(available=2 * GIB) == 512


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"num_gpu_blocks_override": 7}, 7),
        ({"kv_cache_memory_bytes": 10 * MIB + 5}, 10),
        ({"gpu_memory_utilization": 0.5}, 3072),
        ({"num_gpu_blocks_override": 7, "kv_cache_memory_bytes": GIB}, 7),
    ],
)
def test_a_flag_sizes_the_pool(settings, count):
    assert blocks(**settings) == count


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory_bytes": 5}, "--kv-cache-memory-bytes leaves 5 B"),
        ({"gpu_memory_utilization": 0.1}, "--gpu-memory-utilization leaves 0 B"),
        ({"kv_cache_memory_bytes": 8 * GIB}, "more than the 8.00 GiB available"),
        ({"num_gpu_blocks_override": 10**6}, "--num-kv-blocks"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_numbers(settings, words):
    with pytest.raises(ConfigError, match=words):
        blocks(**settings)


def test_weights_that_fill_memory_are_refused():
    with pytest.raises(ModelLoadError, match=r"weights need 9\.00 GiB and 8\.00 GiB are available"):
        blocks(weights=9 * GIB)


def longest(num_blocks: int, windows=(None,), **settings) -> int:
    return longest_sequence(
        EngineConfig(**settings), model_limit=4096, num_blocks=num_blocks, windows=windows
    )


def test_the_longest_sequence_is_what_model_pool_and_flag_allow():
    assert longest(1000) == 4096
    assert longest(10) == 160
    assert longest(1000, max_model_len=512) == 512
    assert longest(10, max_model_len="auto") == longest(10, max_model_len=-1) == 160
    # A window of 64 and chunks of 256 need 21 blocks at most, whatever the length.
    assert longest(20, windows=(64,)) == 320 and longest(21, windows=(64,)) == 4096


def test_a_length_that_does_not_fit_is_refused_with_the_one_that_would():
    with pytest.raises(ConfigError, match="context of 4096"):
        longest(1000, max_model_len=5000)
    with pytest.raises(ConfigError, match="--max-model-len 160 or less"):
        longest(10, max_model_len=512)


def test_sizes_read_well():
    assert [gib(n) for n in (640, 12 * MIB, 3 * GIB // 2)] == ["640 B", "12.0 MiB", "1.50 GiB"]
