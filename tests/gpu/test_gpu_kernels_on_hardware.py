"""Every kernel at the shapes of real models on a real GPU, against float64 or the definition in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.paged_attention_case import PagedCase  # noqa: E402
from helpers.sampling_checks import (  # noqa: E402
    check_against_definition,
    random_logits,
    random_rules,
    random_settings,
)
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.kernels import AttentionShape, DeviceSampling, PagedCache  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.gpu.sampling_upload import pack  # noqa: E402
from streamllm.ops.step_inputs import SamplingBuffers  # noqa: E402

REFERENCE = ReferenceKernels()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NARROW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)

LAYERS = {
    "Llama-3-8B": {"kv_heads": 8, "group": 4, "head_dim": 128},
    "Llama-2-7B": {"kv_heads": 16, "group": 1, "head_dim": 128},
    "Qwen3-0.6B": {"kv_heads": 8, "group": 2, "head_dim": 128},
    "Gemma-2-9B": {"kv_heads": 4, "group": 2, "head_dim": 256, "window": 1024, "soft_cap": 50.0},
    "gpt-oss-20b": {"kv_heads": 4, "group": 8, "head_dim": 64, "window": 128, "sinks": True},
    "Phi-3-mini": {"kv_heads": 8, "group": 1, "head_dim": 96},
    "float8 cache": {
        "kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "cache_dtype": torch.float8_e4m3fn,
        "key_scale": 0.25,
        "value_scale": 0.5,
    },
}
EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
DECODED = [(4096, 1), (2049, 1), (1000, 1), (257, 1), (256, 1), (255, 1), (1, 1), (0, 1)]
CHUNKS = [(1500, 300), (300, 300), (17, 17), (1000, 1), (513, 129), (0, 2)]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


def check_attention(case: PagedCase, out: torch.Tensor, *, last_rows: bool) -> None:
    found = out.cpu().double().numpy()
    for index in range(len(case.sequences)):
        rows, expected = found[case.rows_of(index)], case.expected(index)
        if last_rows:
            rows, expected = rows[-1:], expected[-1:]
        tolerance = TOLERANCE[case.dtype]
        np.testing.assert_allclose(rows, expected, rtol=tolerance, atol=tolerance)


@EVERY_LAYER
@DTYPES
def test_decode_attention(kernels, dtype, layer):
    case = PagedCase(DECODED, dtype=dtype, block_size=16, **layer)
    out = case.new_output()
    kernels.paged_decode(out, case.q, case.cache, case.context, case.decode_work(), case.shape)
    check_attention(case, out, last_rows=True)


@EVERY_LAYER
@DTYPES
def test_prefill_attention(kernels, dtype, layer):
    case = PagedCase(CHUNKS, dtype=dtype, block_size=32, **layer)
    out = case.new_output()
    kernels.paged_prefill(
        out, case.q, case.cache, case.context, case.all_sequences(), case.max_query_len, case.shape
    )
    check_attention(case, out, last_rows=False)


@NARROW
def test_a_decoded_rows_bits_do_not_depend_on_the_batch(kernels, dtype):
    layer = LAYERS["Llama-3-8B"]
    together = PagedCase(DECODED, names=range(8), dtype=dtype, **layer)
    out = together.new_output()
    kernels.paged_decode(
        out, together.q, together.cache, together.context, together.decode_work(), together.shape
    )
    for index in (0, 2, 6):
        alone = PagedCase([DECODED[index]], names=[index], placement=5, dtype=dtype, **layer)
        own = alone.new_output()
        kernels.paged_decode(own, alone.q, alone.cache, alone.context, alone.decode_work(), alone.shape)
        assert torch.equal(own[0], out[index])


@DTYPES
def test_a_prompts_bits_do_not_depend_on_its_chunks(kernels, dtype):
    layer = LAYERS["Llama-3-8B"]

    def attend(sequences, names, placement):
        case = PagedCase(sequences, names=names, placement=placement, dtype=dtype, **layer)
        out = case.new_output()
        kernels.paged_prefill(
            out, case.q, case.cache, case.context, case.all_sequences(), case.max_query_len, case.shape
        )
        return [out[case.rows_of(index)] for index in range(len(sequences))]

    (whole,) = attend([(700, 700)], [3], 0)
    start = 0
    for number, end in enumerate([1, 65, 300, 428, 700]):
        chunk = attend([(60, 9), (end, end - start), (1100, 200)], [5, 3, 8], number)[1]
        assert torch.equal(chunk, whole[start:end])
        start = end


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (37, 896), (2048, 8192)])
def test_rms_norm(kernels, dtype, rows, size):
    x, weight, residual = (
        random(1, rows, size, dtype=dtype),
        random(2, size),
        random(3, rows, size, dtype=dtype),
    )
    results = []
    for each in (kernels, REFERENCE):
        out, total = torch.full_like(x, math.nan), residual.clone()
        each.rms_norm(out, x, weight, 1e-5)
        again = torch.full_like(x, math.nan)
        each.rms_norm(again, x, weight, 1e-5, total)
        results.append((out, again, total))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


@DTYPES
@pytest.mark.parametrize(
    ("activation", "limit"), [("silu", 0.0), ("gelu", 0.0), ("gelu_tanh", 0.0), ("relu", 0.0), ("silu", 7.0)]
)
def test_gated_activations(kernels, dtype, activation, limit):
    for rows, width in ((1, 14336), (300, 4864)):
        x = 3 * random(rows, rows, 2 * width, dtype=dtype)
        results = [torch.full((rows, width), math.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
        kernels.act_and_mul(results[0], x, activation, limit)
        REFERENCE.act_and_mul(results[1], x, activation, limit)
        assert_close(*results)


@DTYPES
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["same", "float8"])
@pytest.mark.parametrize("norms", [False, True])
def test_rotary_embedding_and_cache_write(kernels, dtype, cache_dtype, norms):
    tokens, heads, kv_heads, width = 500, 32, 8, 128
    shape = AttentionShape(heads, kv_heads, width, scale=1.0)
    qkv = random(1, tokens, (heads + 2 * kv_heads) * width, dtype=dtype)
    slots = torch.randperm(64 * 16, generator=torch.Generator().manual_seed(2))[:tokens].to(DEVICE)
    slots[::7] = -1
    angles = random(3, 2048, width // 2)
    rope_rows = torch.randint(0, 2048, (tokens,), generator=torch.Generator().manual_seed(4)).int().to(DEVICE)
    weights = (random(5, width), random(6, width), 1e-6) if norms else None
    results = []
    for each in (kernels, REFERENCE):
        rows = qkv.clone()
        planes = torch.zeros(2, 64, kv_heads, 16, width, device=DEVICE).to(cache_dtype or dtype)
        scales = (0.5, 0.25) if cache_dtype else (1.0, 1.0)
        each.rotary_and_cache(
            rows, PagedCache(planes[0], planes[1], *scales), slots, rope_rows, angles.cos(), angles.sin(),
            shape, width, weights,
        )  # fmt: skip
        results.append((rows[:, : heads * width], planes.float()))
    assert_close(results[0][0], results[1][0])
    # A step of float8 is an eighth: what lies near the middle of two may go either way.
    step = 0.07 if cache_dtype else TOLERANCE[dtype]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2 * step, atol=2 * step)
    assert (results[0][1] != results[1][1]).float().mean() < 0.01 or dtype == torch.float32


def test_block_copies_and_swaps(kernels):
    planes, blocks, size = 32, 40, 2 * 16 * 128 * 2
    pool = torch.randint(0, 256, (planes, blocks, size), dtype=torch.uint8).to(DEVICE)
    host = torch.zeros(planes, 8, size, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    expected = pool.clone()
    expected[:, [30, 31, 5]] = pool[:, [1, 2, 1]]
    pairs = torch.tensor([[1, 30], [2, 31], [1, 5]], dtype=torch.int32, device=DEVICE)
    kernels.copy_blocks(pool, pool, pairs)
    assert torch.equal(pool, expected)
    kernels.copy_blocks(pool, host, torch.tensor([[30, 3], [7, 0]], dtype=torch.int32, device=DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[:, [3, 0]], expected[:, [30, 7]].cpu()) and not host[:, [1, 2, 4]].any()
    kernels.copy_blocks(host, pool, torch.tensor([[3, 9]], dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool[:, 9], expected[:, 30])


@pytest.mark.parametrize(("vocab_size", "rows"), [(128_256, 24), (32_000, 200)])
def test_sampling(kernels, vocab_size, rows):
    def sample(logits: np.ndarray, sampling: SamplingBuffers) -> None:
        staging = np.zeros(1 << 27, np.uint8)
        memory = torch.zeros(len(staging), dtype=torch.uint8, device=DEVICE)
        packed = pack(sampling, rows, vocab_size, staging, memory.data_ptr())
        memory.copy_(torch.from_numpy(staging))
        fields = {name: getattr(sampling, name) for name in SamplingBuffers.__slots__}
        fields["seed"] = fields["seed"].view(np.int64)
        for name in ("edits", "allowed_mask", "grammar_mask", "replacement"):
            fields[name] = getattr(packed, name)
        tensors = {name: torch.from_numpy(array.copy()).to(DEVICE) for name, array in fields.items()}
        kernels.sample(torch.from_numpy(logits).to(DEVICE), vocab_size, DeviceSampling(**tensors), rows)
        for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
            getattr(sampling, name)[...] = tensors[name].cpu().numpy()

    rng = np.random.default_rng(vocab_size)
    logits, sampling = random_logits(rng, rows, vocab_size), random_settings(rng, rows)
    rules = random_rules(rng, sampling, vocab_size)
    check_against_definition(sample, logits, sampling)
    del rules
