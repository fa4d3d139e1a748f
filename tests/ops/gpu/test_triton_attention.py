"""Triton's attention kernels against float64, in Triton's interpreter where there is no GPU.

The interpreter runs a program at a time with numpy: it sees neither races nor what the compiler makes of the
code, and its matrix products know no bfloat16.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.paged_attention_case import PagedCase  # noqa: E402

from streamllm.ops.gpu.triton_kernels import attention_decode, attention_prefill  # noqa: E402
from streamllm.ops.gpu.triton_kernels.attention_decode import paged_decode  # noqa: E402
from streamllm.ops.gpu.triton_kernels.attention_prefill import paged_prefill  # noqa: E402
from streamllm.ops.gpu.triton_kernels.tuning import TileConfig  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = TileConfig(block_m=16, block_n=32, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
"""Absolute and relative: a float16 of 2 is already rounded by 1e-3."""


def prefill(case: PagedCase, config: TileConfig | None = SMALL) -> np.ndarray:
    out = case.new_output()
    paged_prefill(
        out, case.q, case.cache, case.context, case.all_sequences(), case.max_query_len, case.shape, config
    )
    return out.cpu().double().numpy()


def decode(case: PagedCase, decoded: list[int] | None = None, config: TileConfig | None = SMALL):
    out = case.new_output()
    work = case.decode_work(decoded)
    paged_decode(out, case.q, case.cache, case.context, work, case.shape, config)
    return out.cpu().double().numpy()


def check(case: PagedCase, found: np.ndarray, expected: np.ndarray) -> None:
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def check_prefill(case: PagedCase, config: TileConfig | None = SMALL) -> None:
    out = prefill(case, config)
    for index in range(len(case.sequences)):
        check(case, out[case.rows_of(index)], case.expected(index))


def check_decode(case: PagedCase, config: TileConfig | None = SMALL) -> None:
    out = decode(case, config=config)
    for index in range(len(case.sequences)):
        found = out[case.rows_of(index)]
        assert np.isnan(found[:-1]).all()
        check(case, found[-1], case.expected(index)[-1])


F32, F16 = torch.float32, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, F16], ids=str)
CHUNKS = [(1, 1), (15, 15), (17, 1), (0, 0), (32, 8), (0, 3), (65, 22)]
"""(context, rows): whole prompts, chunks in the middle, nothing at all, and padding."""
SPLIT_EDGES = [(n, 1) for n in (1, 0, 17, 255, 256, 257, 513)] + [(300, 3)]
VARIANTS = [
    (F32, {"window": 1}),
    (F16, {"window": 16, "sinks": True}),
    (F32, {"window": 33, "soft_cap": 2.0, "group": 3}),
    (F32, {"window": 290}),
    (F16, {"soft_cap": 30.0}),
    (F32, {"soft_cap": 1.0, "sinks": True, "group": 1}),
    (F32, {"sinks": True, "head_dim": 48}),
]
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])


@DTYPES
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@SEEDS
def test_groups_and_lengths(dtype, group, seed):
    layer = {"kv_heads": 1, "group": group, "head_dim": 32, "dtype": dtype, "inputs": seed, "placement": seed}
    check_prefill(PagedCase(CHUNKS, **layer))
    check_decode(PagedCase(SPLIT_EDGES, **layer))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (32, 16, F16),
        (64, 64, F32),
        (80, 16, F16),
        (96, 128, F32),
        (112, 16, F16),
        (128, 32, F32),
        (192, 16, F16),
        (256, 16, F32),
    ],
)
def test_head_and_block_sizes_with_the_tables_tiles(head_dim, block_size, dtype):
    case = PagedCase(
        [(70, 21), (128, 3)], head_dim=head_dim, block_size=block_size, dtype=dtype, inputs=head_dim
    )
    check_prefill(case, config=None)
    check_decode(case, config=None)


@pytest.mark.parametrize(("dtype", "variant"), VARIANTS, ids=str)
@SEEDS
def test_windows_soft_caps_and_sinks(dtype, variant, seed):
    layer = {"kv_heads": 1, "head_dim": 32, "dtype": dtype, "inputs": seed, "placement": seed} | variant
    check_prefill(PagedCase(CHUNKS, **layer))
    check_decode(PagedCase(SPLIT_EDGES, **layer))


def test_groups_wider_than_a_matrix_unit():
    check_decode(PagedCase([(300, 1), (9, 2)], group=20, head_dim=32))


def test_a_long_context_is_combined_in_several_rounds():
    check_decode(PagedCase([(17 * 256 + 9, 1), (16 * 256, 1)], kv_heads=1, group=1, head_dim=32))


def test_decode_leaves_the_other_sequences_alone():
    case = PagedCase([(300, 1), (40, 7), (0, 1), (17, 1)])
    out = decode(case, decoded=[0, 2])
    assert np.isnan(out[case.rows_of(1)]).all() and np.isnan(out[case.rows_of(3)]).all()
    check(case, out[case.rows_of(0)], case.expected(0))
    assert (out[case.rows_of(2)] == 0).all()


def test_prefill_leaves_the_other_sequences_alone():
    case = PagedCase([(300, 1), (40, 7), (64, 12)])
    out = case.new_output()
    named = torch.tensor([2, 1], dtype=torch.int32, device=out.device)
    paged_prefill(out, case.q, case.cache, case.context, named, 12, case.shape, SMALL)
    assert torch.isnan(out[case.rows_of(0)]).all()
    for index in (1, 2):
        check(case, out[case.rows_of(index)].cpu().double().numpy(), case.expected(index))


@pytest.mark.parametrize(("dtype", "architecture"), [(F16, "sm_80"), (F32, "sm_80"), (F16, "sm_90")], ids=str)
def test_a_float8_cache(dtype, architecture, monkeypatch):
    """sm_80 decodes the bits itself, sm_90 has instructions."""
    for module in (attention_prefill, attention_decode):
        monkeypatch.setattr(module, "gpu_architecture", lambda device: architecture)
    layer = {"cache_dtype": torch.float8_e4m3fn, "key_scale": 0.125, "value_scale": 0.5, "dtype": dtype}
    check_prefill(PagedCase(CHUNKS, **layer))
    check_decode(PagedCase(SPLIT_EDGES, **layer, window=270))


@DTYPES
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"window": 270, "sinks": True, "group": 3},
        {"window": 16, "soft_cap": 2.0, "kv_heads": 1, "group": 8},
        {"head_dim": 80, "block_size": 32, "group": 1},
    ],
    ids=str,
)
def test_an_int8_cache(dtype, variant):
    layer = {"cache_dtype": torch.int8, "dtype": dtype} | variant
    check_prefill(PagedCase(CHUNKS, **layer))
    check_decode(PagedCase(SPLIT_EDGES, **layer))


def test_a_float16_cache_under_float32_activations():
    case = PagedCase([(65, 22), (300, 1)], cache_dtype=F16)
    check_prefill(case)
    check_decode(case)


@DTYPES
@pytest.mark.parametrize("magnitude", [50.0, 3000.0])
def test_scores_of_large_magnitude(dtype, magnitude):
    """A row attends to its best keys alone; how float32 rounds the scores decides between near ones."""
    case = PagedCase([(90, 60), (300, 1)], dtype=dtype, magnitude=magnitude)
    for out in (prefill(case), decode(case)):
        found = out[case.rows_of(1)]
        assert np.isfinite(found).all()
        tolerance = TOLERANCE[dtype] + 4e-6 * magnitude
        np.testing.assert_allclose(found, case.expected(1), rtol=tolerance, atol=tolerance)


def test_a_sink_that_is_absent_and_one_that_takes_everything():
    case = PagedCase([(60, 20), (300, 1)], sinks=True)
    case.shape.sinks[:] = torch.tensor([float("-inf"), 1e4, 0.0, -1e4])
    check_prefill(case)
    check_decode(case)
    assert (prefill(case)[:, 64:128] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "config", "layer"),
    [
        (F32, SMALL, {"group": 3}),
        (F16, TileConfig(32, 16, 4, 2), {"group": 4, "window": 37, "sinks": True}),
        (F32, TileConfig(16, 16, 4, 2), {"group": 1, "soft_cap": 5.0}),
        (F16, SMALL, {"group": 2, "cache_dtype": torch.int8}),
    ],
    ids=["float32", "float16 window", "float32 soft cap", "float16 int8 cache"],
)
def test_the_bits_of_a_row_depend_neither_on_the_batch_nor_on_the_chunks(
    dtype, config, layer, ordered_products
):
    length = 83
    layer |= {"kv_heads": 1, "head_dim": 32, "dtype": dtype}
    whole = prefill(PagedCase([(length, length)], names=[7], **layer), config)
    assert np.isfinite(whole).all()
    for seed, chunks in enumerate([[40, 43], [1, 16, 17, 49]]):
        end = 0
        for number, chunk in enumerate(chunks):
            end += chunk
            sequences = [(31, 10), (end, chunk), (0, 2), (9, 9)]
            case = PagedCase(sequences, names=[1, 7, 2, 3], placement=10 * seed + number, **layer)
            found = prefill(case, config)[case.rows_of(1)]
            assert (found == whole[end - chunk : end]).all()


@DTYPES
def test_the_bits_of_a_decoded_row_do_not_depend_on_the_batch(dtype, ordered_products):
    for window in (0, 300):
        layer = {"dtype": dtype, "window": window, "group": 3, "kv_heads": 1, "head_dim": 32}
        alone = decode(PagedCase([(777, 1)], names=[7], **layer))
        case = PagedCase([(5, 1), (270, 2), (777, 1), (0, 1)], names=[1, 2, 7, 3], placement=5, **layer)
        assert (decode(case)[case.rows_of(2)] == alone).all()
