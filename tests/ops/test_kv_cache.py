"""The paged cache's memory."""

from __future__ import annotations

import numpy as np
import pytest

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ops.kv_cache import KVCache, kv_bytes_per_block


def make_cache(**changes) -> KVCache:
    sizes = {
        "layers_per_block": 3,
        "num_blocks": 8,
        "block_size": 32,
        "num_kv_heads": 2,
        "head_dim": 8,
        "kv_cache_dtype": "float32",
    }
    return KVCache(**{**sizes, **changes})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_size_and_views(dtype):
    cache = make_cache(kv_cache_dtype=dtype)
    assert cache.num_bytes == 8 * kv_bytes_per_block(3, 2, 8, 32, dtype)
    assert cache.num_bytes == 3 * 2 * 8 * 2 * 32 * 8 * (4 if dtype == "float32" else 2)
    assert cache.keys(1).shape == (8, 2, 2, 8, 16)
    assert cache.values(2).shape == (8, 2, 2, 16, 8)
    assert cache.planes.ctypes.data % 64 == 0
    cache.keys(1)[3] = 1
    cache.values(2)[4] = 2
    assert cache.planes.sum() == 2 * 32 * 8 * 3
    assert (cache.planes[1, 0, 3] == 1).all() and (cache.planes[2, 1, 4] == 2).all()


def test_int8_has_its_scales_in_the_block():
    cache = make_cache(kv_cache_dtype="int8")
    assert cache.num_bytes == 8 * kv_bytes_per_block(3, 2, 8, 32, "int8") == 3 * 2 * 8 * 2 * 32 * (8 + 4)
    assert cache.scales(1).shape == (2, 8, 2, 2, 16)
    views = [cache.keys(1), cache.values(1), *cache.scales(1)]
    for number, view in enumerate(views, start=1):
        view[3] = number
    assert [float(view[3].mean()) for view in views] == [1, 2, 3, 4]
    cache.copy_blocks([(3, 6)])
    assert all((view[6] == view[3]).all() for view in views)
    written = cache.planes.reshape(3, 2, 8, -1).any(-1)
    assert written[1][:, [3, 6]].all() and written.sum() == 4


def test_blocks_are_copied_in_every_layer():
    cache = make_cache()
    cache.planes[...] = np.random.default_rng(0).standard_normal(cache.planes.shape)
    before = cache.planes.copy()
    cache.copy_blocks([])
    assert (cache.planes == before).all()
    cache.copy_blocks([(0, 5), (1, 6), (0, 7)])
    assert (cache.planes[:, :, [5, 6, 7]] == before[:, :, [0, 1, 0]]).all()
    assert (cache.planes[:, :, :5] == before[:, :, :5]).all()


def test_untouched_blocks_take_no_memory():
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident_bytes()
    cache = make_cache(num_blocks=40_000)
    assert cache.num_bytes > 2**28
    cache.planes[0, 0, 0] = 1
    assert resident_bytes() - before < 2**26


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="block_size must be a positive multiple of 16, got 24"):
        make_cache(block_size=24)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of float32, float16, int8, got 'int3'"):
        make_cache(kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match="at least one block"):
        make_cache(num_blocks=0)
    with pytest.raises(ModelLoadError, match="Not enough memory for a KV cache of"):
        make_cache(num_blocks=2**45)
