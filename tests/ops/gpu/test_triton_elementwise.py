"""Triton's norms, activations, rotary embedding with its cache write and block copies against float64, in
Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.int8_cache import hard_heads, quantize_heads, unwritten_plane  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.kernels import AttentionShape, PagedCache  # noqa: E402
from streamllm.ops.gpu.reference import ReferenceKernels  # noqa: E402
from streamllm.ops.gpu.triton_kernels import rotary_cache  # noqa: E402
from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels  # noqa: E402

F32, F16, FLOAT8 = torch.float32, torch.float16, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16], ids=str)
TOLERANCE = {F32: 1e-5, F16: 1e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative; the interpreter cuts a bfloat16 off, where a GPU rounds it."""
KERNELS = TritonKernels()


def random(seed: int, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(dtype).to(DEVICE)


def wide(x: torch.Tensor, extra: int = 3) -> torch.Tensor:
    """The same rows, with NaN between them."""
    padded = torch.full((len(x), x.shape[1] + extra), math.nan, dtype=x.dtype, device=x.device)
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


def float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def check(found: torch.Tensor, expected: np.ndarray, magnitude: float = 1.0) -> None:
    """Within the dtype's tolerance, relative or of what has ``magnitude``."""
    tolerance = TOLERANCE[found.dtype]
    np.testing.assert_allclose(float64(found), expected, rtol=tolerance, atol=tolerance * magnitude)


def norm64(x: np.ndarray, weight: torch.Tensor, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * float64(weight)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 64), (2, 100), (1, 4096), (0, 8)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype, rows, size, with_residual):
    x, weight = wide(random(1, rows, size, dtype=dtype)), random(2, size)
    residual = wide(random(3, rows, size, dtype=dtype), 5) if with_residual else None
    out = torch.full((rows, size), math.nan, dtype=dtype, device=DEVICE)
    total = float64(x)
    if residual is not None:
        total = float64((x.float() + residual.float()).to(dtype))
    KERNELS.rms_norm(out, x, weight, 1e-5, residual)
    check(out, norm64(total, weight, 1e-5))
    if residual is not None:
        check(residual, total)
        if dtype != torch.bfloat16:
            np.testing.assert_array_equal(float64(residual), total)


def test_rms_norm_in_place_of_its_input():
    x, weight = random(1, 3, 48), random(2, 48)
    expected = norm64(float64(x), weight, 1e-6)
    KERNELS.rms_norm(x, x, weight, 1e-6)
    check(x, expected)


def activation64(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (2, 1500), (0, 8)])
def test_gated_activations(dtype, activation, rows, width):
    x = wide(3 * random(width, rows, 2 * width, dtype=dtype), 2)
    out = wide(torch.full((rows, width), math.nan, dtype=dtype, device=DEVICE))
    KERNELS.act_and_mul(out, x, activation)
    gate, up = np.split(float64(x), 2, axis=1)
    check(out, activation64(gate, activation) * up)


@DTYPES
def test_a_gate_with_a_limit(dtype):
    """gpt-oss's, of infinities and NaN too."""
    x = 3 * random(1, 2, 3000, dtype=dtype)
    x[0, :3] = torch.tensor([math.inf, math.nan, 1.0])
    x[0, 1500:1503] = torch.tensor([-math.inf, 1.0, math.nan])
    out = torch.full((2, 1500), 7.0, dtype=dtype, device=DEVICE)
    KERNELS.act_and_mul(out, x, "silu", 2.5)
    gate, up = np.split(float64(x), 2, axis=1)
    gate, up = np.where(gate > 2.5, 2.5, gate), np.clip(up, -2.5, 2.5)
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    assert np.isnan(float64(out)[0, :3]).tolist() == [False, True, True]
    check(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_far_from_zero_are_the_gate_or_nothing(activation):
    gate = torch.tensor([[-1e4, -100.0, 100.0, 1e4]], device=DEVICE)
    out = torch.empty_like(gate)
    KERNELS.act_and_mul(out, torch.cat([gate, torch.ones_like(gate)], 1), activation)
    assert torch.equal(out.abs(), torch.relu(gate))


class RotaryCase:
    """Random rows, a cache of NaN, and what both should hold afterwards (float64)."""

    def __init__(
        self,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        rotary_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = F32,
        cache_dtype: torch.dtype | None = None,
        norms: bool = False,
        magnitude: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.shape = AttentionShape(heads, kv_heads, head_dim, scale=1.0)
        self.block_size, self.rotary_dim, self.magnitude = block_size, rotary_dim, magnitude
        self.tokens, blocks = 5, 4
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = wide(magnitude * random(seed, self.tokens, width, dtype=dtype), 16)
        planes = torch.full((2, blocks, kv_heads, block_size, head_dim), math.nan, device=DEVICE)
        planes = planes.to(cache_dtype or dtype)
        self.cache = PagedCache(planes[0], planes[1])
        if cache_dtype == FLOAT8:
            self.cache = PagedCache(planes[0], planes[1], 0.25, 0.5)
        slots = np.random.default_rng(seed).permutation(blocks * block_size)[: self.tokens]
        slots[3] = -1
        self.slots = torch.from_numpy(slots).to(torch.int64).to(DEVICE)
        self.rows = torch.tensor([7, 0, 3, 3, 9], dtype=torch.int32, device=DEVICE)
        angles = random(seed + 1, 10, rotary_dim // 2)
        self.cos, self.sin = torch.cos(angles), torch.sin(angles)
        self.norms = (random(seed + 2, head_dim), random(seed + 3, head_dim), 1e-6) if norms else None

    def run(self) -> None:
        KERNELS.rotary_and_cache(
            self.qkv, self.cache, self.slots, self.rows, self.cos, self.sin, self.shape, self.rotary_dim,
            self.norms,
        )  # fmt: skip

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v of the rows: ``[tokens, heads, D]``."""
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        rows = float64(self.qkv).reshape(self.tokens, -1, self.shape.head_dim)
        q, k, v = np.split(rows, [heads, heads + kv_heads], axis=1)
        if self.norms is not None:
            q, k = norm64(q, self.norms[0], 1e-6), norm64(k, self.norms[1], 1e-6)
        return self._rotated(q), self._rotated(k), v

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.rotary_dim // 2
        cos, sin = (float64(table[self.rows.long()])[:, None] for table in (self.cos, self.sin))
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def check(self) -> None:
        before = self.qkv.clone()
        q, k, v = self.expected()
        self.run()
        width = self.shape.num_heads * self.shape.head_dim
        check(self.qkv[:, :width], q.reshape(self.tokens, width), max(self.magnitude, 1.0))
        assert torch.equal(self.qkv[:, width:], before[:, width:])
        for plane, scale, rows in (
            (self.cache.keys, self.cache.key_scale, k),
            (self.cache.values, self.cache.value_scale, v),
        ):
            self._check_plane(plane, scale, rows)

    def _check_plane(self, plane: torch.Tensor, scale: float, rows: np.ndarray) -> None:
        stored = float64(plane.float()) * scale
        largest = math.inf if plane.dtype not in (F16, FLOAT8) else torch.finfo(plane.dtype).max * scale
        relative, absolute = TOLERANCE.get(plane.dtype, 2**-4), TOLERANCE.get(plane.dtype, scale * 2**-9)
        for token, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, self.block_size)
            found = stored[block, :, offset].copy()
            stored[block, :, offset] = math.nan
            expected = np.clip(rows[token], -largest, largest)
            np.testing.assert_allclose(found, expected, rtol=relative, atol=absolute)
        assert np.isnan(stored).all()


@DTYPES
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 80, "rotary_dim": 80, "block_size": 32},
        {"head_dim": 96, "rotary_dim": 32, "heads": 3, "kv_heads": 1},
        {"head_dim": 128, "rotary_dim": 128, "heads": 24, "kv_heads": 3},
        {"head_dim": 32, "rotary_dim": 2},
        {"head_dim": 64, "rotary_dim": 0},
        {"head_dim": 256, "rotary_dim": 256, "heads": 1, "kv_heads": 1},
    ],
    ids=str,
)
def test_rotary_embedding_and_cache_write(dtype, norms, shape):
    RotaryCase(dtype=dtype, norms=norms, **shape).check()


@pytest.mark.parametrize("cache_dtype", [F16, FLOAT8], ids=str)
@pytest.mark.parametrize("magnitude", [1e-4, 0.01, 1.0, 1e6])
def test_narrow_caches_round_and_saturate(cache_dtype, magnitude):
    RotaryCase(cache_dtype=cache_dtype, magnitude=magnitude).check()


def test_every_float8_is_rounded_as_torch_rounds_it():
    """All values of e4m3, the points half way between neighbours, and those just beside them."""
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(FLOAT8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    up, down = torch.tensor(math.inf), torch.tensor(0.0)
    points = torch.cat([codes, middles, middles.nextafter(up), middles.nextafter(down), torch.tensor([1e-9])])
    points = torch.cat([points, -points, torch.tensor([math.nan])])
    rows = torch.nn.functional.pad(points, (0, -len(points) % 32)).view(-1, 1, 32)
    qkv = torch.zeros(len(rows), 3, 32)
    qkv[:, 2:] = rows
    planes = torch.zeros(2, 2, 1, 32, 32).to(FLOAT8).to(DEVICE)
    zeros = torch.zeros(len(rows), 16, device=DEVICE)
    rotary_cache.rotary_and_cache(
        qkv.view(len(rows), 96).to(DEVICE), PagedCache(planes[0], planes[1]),
        torch.arange(len(rows), device=DEVICE), torch.zeros(len(rows), dtype=torch.int32, device=DEVICE),
        zeros, zeros, AttentionShape(1, 1, 32, scale=1.0), 32,
    )  # fmt: skip
    found = planes[1].cpu().view(-1, 32)[: len(rows)]
    assert torch.equal(found.view(torch.uint8), rows.view(-1, 32).to(FLOAT8).view(torch.uint8))


@pytest.mark.parametrize("kernels", [KERNELS, ReferenceKernels()], ids=["triton", "reference"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 0), (40, 0), (64, 64), (80, 32), (256, 0)])
def test_an_int8_cache_has_the_elements_and_scales_that_it_has_on_a_cpu(head_dim, rotary_dim, kernels):
    """Rotated by nothing, so that keys are as exact as values."""
    heads = torch.from_numpy(hard_heads(6, head_dim)).float()
    planes = torch.from_numpy(np.stack([unwritten_plane(4, 2, 16, head_dim)] * 2)).to(DEVICE)
    cache = PagedCache.of_int8(*planes, head_dim)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(64)[:24])
    slots[11] = -1
    cos = torch.ones(1, rotary_dim // 2, device=DEVICE)
    rows = heads.reshape(24, -1).to(DEVICE)
    kernels.rotary_and_cache(
        rows, cache, slots.to(DEVICE), torch.zeros(24, dtype=torch.int32, device=DEVICE), cos, 0 * cos,
        AttentionShape(2, 2, head_dim, scale=1.0), rotary_dim,
    )  # fmt: skip
    written = slots >= 0
    block, offset = slots[written] // 16, slots[written] % 16
    for first, elements, scales in ((2, cache.keys, cache.key_scales), (4, cache.values, cache.value_scales)):
        rotated = first == 2 and rotary_dim > 0  # NaN and infinity times 0 are NaN in their partners too
        integers, expected = quantize_heads(heads[written, first : first + 2].numpy())
        found = elements[block, :, offset].cpu().numpy(), scales[block, :, offset].cpu().numpy()
        ordinary = np.isfinite(heads[written, first : first + 2].numpy()).all(-1) | (not rotated)
        np.testing.assert_array_equal(found[0][ordinary], integers[ordinary])
        np.testing.assert_array_equal(found[1][ordinary], expected[ordinary])
        elements[block, :, offset], scales[block, :, offset] = 99, math.nan
        assert (elements == 99).all() and scales.isnan().all()


@pytest.mark.parametrize("size", [8, 100, 4096, 9001])
def test_block_copies(size):
    values = np.random.default_rng(size).integers(0, 256, (3, 6, size), np.uint8)
    pool = torch.from_numpy(values.copy()).to(DEVICE)
    pairs = torch.tensor([[0, 4], [0, 2], [5, 1]], dtype=torch.int32, device=DEVICE)
    KERNELS.copy_blocks(pool, pool, pairs)
    values[:, [4, 2, 1]] = values[:, [0, 0, 5]]
    assert np.array_equal(pool.cpu().numpy(), values)

    other = torch.full((3, 4, size + 8), 7, dtype=torch.uint8, device=DEVICE)[:, :, :size]
    KERNELS.copy_blocks(pool, other, torch.tensor([[5, 0], [1, 3]], dtype=torch.int32, device=DEVICE))
    expected = np.full((3, 4, size), 7, np.uint8)
    expected[:, [0, 3]] = values[:, [5, 1]]
    assert np.array_equal(other.cpu().numpy(), expected)


def test_no_copies_is_no_launch():
    pool = torch.zeros(1, 2, 8, dtype=torch.uint8, device=DEVICE)
    KERNELS.copy_blocks(pool, pool, torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
    assert not pool.any()
