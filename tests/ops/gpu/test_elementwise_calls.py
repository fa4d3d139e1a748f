"""The calls that take torch tensors, with emulated kernels on tensors of the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.cuda_emulation import EmulatedLibrary, emulated

from streamllm.ops.gpu.cuda import elementwise
from streamllm.ops.gpu.kernels import AttentionShape, PagedCache
from streamllm.ops.gpu.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return emulated("elementwise.cu", "rotary_cache.cu", "copy_blocks.cu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 50])
def test_rms_norm(library, dtype, columns):
    x = torch.randn(5, 80, dtype=dtype)[:, :columns]  # rows that are not side by side
    residual, weight = torch.randn(5, columns, dtype=dtype), torch.randn(columns)
    for carried in (None, residual):
        results = []
        for call in (
            lambda *args: elementwise.rms_norm(library, *args, stream=0),
            REFERENCE.rms_norm,
        ):
            out = torch.full((5, columns), torch.nan, dtype=dtype)
            copy = None if carried is None else carried.clone()
            call(out, x, weight, 1e-5, copy)
            results.append((out, copy))
        close(results[0][0], results[1][0])
        if carried is not None:
            close(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(library, activation, dtype):
    x = torch.randn(7, 2 * 40, dtype=dtype)
    out, expected = torch.full((2, 7, 40), torch.nan, dtype=dtype)
    elementwise.act_and_mul(library, out, x, activation, 0)
    REFERENCE.act_and_mul(expected, x, activation)
    close(out, expected)


@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("has_norms", "rotary_dim"), [(False, 32), (True, 32), (True, 0)])
def test_rotary_and_cache(library, has_norms, rotary_dim, cache_dtype):
    qkv = torch.randn(6, 8 * 64, dtype=torch.float16)
    angles = torch.rand(30, rotary_dim // 2)
    norms = (torch.randn(64), torch.randn(64), 1e-6) if has_norms else None
    inputs = (
        torch.tensor([3, 40, -1, 0, 17, 63]),
        torch.tensor([4, 9, 0, 29, 3, 3], dtype=torch.int32),
        angles.cos(),
        angles.sin(),
        SHAPE,
        rotary_dim,
        norms,
    )
    results = []
    for call in (
        lambda *args: elementwise.rotary_and_cache(library, *args, stream=0),
        REFERENCE.rotary_and_cache,
    ):
        rows = qkv.clone()
        scales = (0.25, 0.5) if cache_dtype == torch.float8_e4m3fn else (1.0, 1.0)
        if cache_dtype == torch.int8:
            cache = PagedCache.of_int8(*torch.zeros(2, 4, 2, 16 * 68, dtype=torch.int8), 64)
        else:
            planes = torch.zeros(2, 4, 2, 16, 64).to(cache_dtype)
            cache = PagedCache(planes[0], planes[1], *scales)
        call(rows, cache, *inputs)
        results.append((rows, _stored(cache)))
    close(results[0][0], results[1][0])
    # Both round to the cache's dtype, at times to different sides of the middle.
    spacing = {torch.float8_e4m3fn: 0.125, torch.bfloat16: 8e-3}.get(cache_dtype, 1e-3)
    absolute = 0.05 if cache_dtype == torch.int8 else 1e-3
    torch.testing.assert_close(results[0][1], results[1][1], rtol=spacing, atol=absolute)


def _stored(cache: PagedCache) -> torch.Tensor:
    """Keys and values, those of int8 times their scales."""
    both = torch.stack([cache.keys, cache.values]).float()
    if cache.key_scales is None:
        return both
    return both * torch.stack([cache.key_scales, cache.value_scales])[..., None]


def test_copy_blocks(library):
    source = torch.randint(0, 256, (3, 5, 96), dtype=torch.uint8)
    pairs = torch.tensor([[0, 6], [4, 1]], dtype=torch.int32)
    results = []
    for call in (lambda *args: elementwise.copy_blocks(library, *args, stream=0), REFERENCE.copy_blocks):
        destination = torch.zeros(3, 7, 96, dtype=torch.uint8)
        call(source, destination, pairs)
        results.append(destination)
    assert torch.equal(*results) and results[0].any()


def test_what_does_not_agree_is_told_before_the_kernel_runs(library):
    x, weight = torch.ones(2, 8), torch.ones(8)
    for out, given, vector, residual in (
        (torch.ones(3, 8), x, weight, None),
        (torch.ones(2, 8, dtype=torch.float16), x, weight, None),
        (torch.ones(8, 2).T, x, weight, None),
        (x, x, torch.ones(7), None),
        (x, x, weight.half(), None),
        (x, x, weight, torch.ones(2, 7)),
        (x, x, weight, torch.ones(2, 8, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match=r"rms_norm needs .* not .*\[8\]|\[7\]"):
            elementwise.rms_norm(library, out, given, vector, 1e-5, residual, 0)
    with pytest.raises(ValueError, match=r"act_and_mul needs .*float32 \[2, 8\] \(strides \[8, 1\]\)"):
        elementwise.act_and_mul(library, torch.ones(2, 5), x, "silu", 0)
    with pytest.raises(ValueError, match=r"no CUDA kernels for torch\.float64"):
        elementwise.act_and_mul(library, torch.ones(2, 4).double(), x.double(), "silu", 0)
    planes = torch.zeros(2, 4, 2, 16, 64)
    cos = torch.ones(3, 32)
    slots, rope_rows = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for width, keys, where, rotary_dim in (
        (8 * 64 - 1, planes[0], slots, 64),
        (8 * 64, planes[0, :, :1], slots, 64),
        (8 * 64, planes[0].half(), slots, 64),
        (8 * 64, planes[0].transpose(1, 2), slots, 64),
        (8 * 64, planes[0], rope_rows, 64),
        (8 * 64, planes[0], slots, 32),
    ):
        cache = PagedCache(keys, planes[1])
        with pytest.raises(
            ValueError, match=r"rotary_and_cache: .* do not agree with 4 heads and 2 KV heads"
        ):
            elementwise.rotary_and_cache(
                library, torch.ones(1, width), cache, where, rope_rows, cos, cos, SHAPE, rotary_dim, None, 0
            )
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    for destination, pairs in (
        (torch.zeros(1, 3, 16, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(2, 3, 32, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32)),
        (blocks, torch.zeros(1, 2, dtype=torch.int64)),
        (blocks, torch.zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match="copy_blocks needs"):
            elementwise.copy_blocks(library, blocks, destination, pairs, 0)
