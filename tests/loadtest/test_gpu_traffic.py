"""The written model of the decode kernel's traffic, against what the emulated kernel moves."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda_emulation import emulated
from helpers.decode_case import DecodeCase
from helpers.number_formats import BFLOAT16, FLOAT8, FLOAT32, NumberFormat

from loadtest.gpu_traffic import DecodeLayer, decode_traffic


def layer_of(case: DecodeCase) -> DecodeLayer:
    return DecodeLayer(
        case.num_heads,
        case.kv_heads,
        case.head_dim,
        activation_bytes=np.dtype(case.dtype.storage).itemsize,
        cache_bytes=np.dtype(case.cache_dtype.storage).itemsize,
        block_size=case.block_size,
        window=case.window,
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("group", [1, 4, 8, 12])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_dim"),
    [(BFLOAT16, BFLOAT16, 128), (BFLOAT16, FLOAT8, 64), (FLOAT32, FLOAT32, 80)],
)
def test_is_what_the_kernel_moves(
    dtype: NumberFormat, cache_dtype: NumberFormat, head_dim: int, group: int, window: int
) -> None:
    case = DecodeCase(
        [1, 100, 256, 300, 1000],
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        window=window,
    )
    library = emulated("attention_decode.cu")
    case.run(library)
    loaded, _ = library.take_traffic()
    traffic = decode_traffic(layer_of(case), case.contexts)
    assert loaded == traffic.keys_and_values + traffic.queries
    assert np.count_nonzero(~np.isnan(case.partials)) * 4 * 2 == traffic.partials


@pytest.mark.parametrize("num_heads", [8, 32, 64], ids=lambda heads: f"group_{heads // 8}")
@pytest.mark.parametrize("contexts", [[4096] * 32, [1000, 2000, 3000, 7777], [131072]], ids=len)
def test_little_more_than_needed_is_moved(num_heads: int, contexts: list[int]) -> None:
    """8 KV heads of 128 in 16 bits, as Llama 3's 8B (32 query heads) and 70B (64) have them."""
    traffic = decode_traffic(DecodeLayer(num_heads, 8, 128), contexts)
    assert 1.0 <= traffic.ratio <= 1.1
