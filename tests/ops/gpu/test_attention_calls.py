"""Decode attention as torch tensors reach the CUDA kernel (emulated: the tensors are this CPU's)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.cuda_emulation import emulated  # noqa: E402
from helpers.decode_case import DecodeCase  # noqa: E402
from helpers.number_formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, NumberFormat  # noqa: E402

from streamllm.ops.gpu.cuda.attention import paged_decode  # noqa: E402
from streamllm.ops.gpu.kernels import (  # noqa: E402
    AttentionShape,
    DecodeWork,
    PagedCache,
    PagedContext,
)

DTYPES = {
    FLOAT32: torch.float32,
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    FLOAT8: torch.float8_e4m3fn,
    INT8: torch.int8,
}


class Call:
    """The arguments of a call, tensors over a case's arrays."""

    def __init__(self, case: DecodeCase):
        def tensor(array: np.ndarray, dtype: NumberFormat | None = None) -> torch.Tensor:
            # torch knows neither bits of bfloat16 in uint16 nor those of float8 in uint8.
            signed = array.view(f"i{array.itemsize}") if dtype else array
            return torch.from_numpy(signed).view(DTYPES[dtype]) if dtype else torch.from_numpy(signed)

        self.case = case
        self.q = tensor(case.q, case.dtype)
        self.out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype)
        planes = tensor(case.keys, case.cache_dtype), tensor(case.values, case.cache_dtype)
        if case.cache_dtype is INT8:
            self.cache = PagedCache.of_int8(*planes, case.head_dim)
        else:
            self.cache = PagedCache(*planes, case.key_scale, case.value_scale)
        self.context = PagedContext(
            tensor(case.query_start),
            tensor(case.context_lens),
            tensor(case.table_rows),
            tensor(case.block_tables),
        )
        self.work = DecodeWork(
            tensor(case.items),
            tensor(case.num_items),
            tensor(case.first_item),
            tensor(case.num_splits),
            tensor(case.partials),
        )
        self.shape = AttentionShape(
            case.num_heads,
            case.kv_heads,
            case.head_dim,
            case.scale,
            case.window,
            case.soft_cap,
            tensor(case.sink_scores) if case.sinks else None,
        )

    def run(self) -> np.ndarray:
        paged_decode(
            emulated("attention_decode.cu"),
            self.out,
            self.q,
            self.cache,
            self.context,
            self.work,
            self.shape,
            num_multiprocessors=3,
            stream=0,
        )
        return self.out.double().numpy()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("narrow", [None, FLOAT8, INT8])
def test_is_what_the_kernel_computes(dtype: NumberFormat, narrow: NumberFormat | None) -> None:
    case = DecodeCase(
        [3, 300, 40],
        group=4,
        dtype=dtype,
        cache_dtype=narrow or dtype,
        key_scale=0.5 if narrow is FLOAT8 else 1.0,
        value_scale=2.0 if narrow is FLOAT8 else 1.0,
        window=280,
        soft_cap=3.0,
        sinks=True,
        decoded=[True, True, False],
    )
    np.testing.assert_array_equal(Call(case).run(), dtype.decode(case.run(emulated("attention_decode.cu"))))


def test_no_sequences() -> None:
    call = Call(DecodeCase([3]))
    empty = torch.empty(0, dtype=torch.int32)
    call.context = replace(call.context, context_lens=empty)
    assert np.isnan(call.run()).all()


@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("", "out", lambda out: out[:, :-8]),
        ("", "out", lambda out: out.half()),
        ("", "q", lambda q: q[:, ::2]),
        ("", "q", lambda q: q.t().contiguous().t()),
        ("cache", "keys", lambda keys: keys[:, :1]),
        ("cache", "values", lambda values: values.half()),
        ("cache", "values", lambda values: values.transpose(1, 2).contiguous().transpose(1, 2)),
        ("context", "context_lens", lambda lengths: lengths.long()),
        ("context", "query_start", lambda starts: starts[1:]),
        ("context", "block_tables", lambda tables: tables.long()),
        ("work", "partials", lambda partials: partials[..., :-1]),
        ("work", "items", lambda items: items[:, 0]),
        ("work", "num_splits", lambda splits: splits.float()),
        ("shape", "sinks", lambda sinks: sinks.half()),
    ],
)
def test_refuses_other_tensors(part: str, name: str, change) -> None:
    call = Call(DecodeCase([3, 300], sinks=True))
    if part:
        old = getattr(call, part)
        setattr(call, part, replace(old, **{name: change(getattr(old, name))}))
    else:
        setattr(call, name, change(getattr(call, name)))
    with pytest.raises(ValueError, match="paged_decode"):
        call.run()
    assert np.isnan(call.out.double().numpy()).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key_scales", lambda scales: None),
        ("key_scales", lambda scales: scales.clone()),
        ("value_scales", lambda scales: scales[:, :1]),
        ("values", lambda values: values.contiguous()),
    ],
)
def test_refuses_int8_whose_scales_lie_elsewhere(name: str, change) -> None:
    call = Call(DecodeCase([3, 300], cache_dtype=INT8))
    call.cache = replace(call.cache, **{name: change(getattr(call.cache, name))})
    with pytest.raises(ValueError, match="scales of int8, must lie as"):
        call.run()


def test_refuses_a_head_size_without_a_kernel() -> None:
    with pytest.raises(ValueError, match="head size"):
        Call(DecodeCase([3], head_dim=264)).run()
