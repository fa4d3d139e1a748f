"""Quantised weights as they lie on a device, against what the gguf package makes of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.quantized_weights import (  # noqa: E402
    BLOCKS,
    FILE_FORMATS,
    dequantized,
    random_rows,
    stored_groups,
)

from streamllm.ops.gpu.quantized_matrix import (  # noqa: E402
    QuantizedMatrix,
    from_float8,
    quantize_float8,
    quantize_int8,
)
from streamllm.ops.gpu.stored_blocks import STORED_BLOCKS  # noqa: E402
from streamllm.ops.gpu.weight_layout import PACKED_FORMATS  # noqa: E402
from streamllm.ops.stored_rows import StoredRows  # noqa: E402

EVERY_FORMAT = pytest.mark.parametrize("row_format", FILE_FORMATS)


def stored(row_format: str, rows: int, columns: int, seed: int = 0) -> StoredRows:
    return stored_groups(row_format, rows, columns, np.random.default_rng(seed))


def elements_of(row_format: str) -> int:
    """Of which a row has whole blocks; float8 takes any number."""
    return BLOCKS[row_format].elements if row_format in BLOCKS else 43


def pack(parts, rows: int, columns: int, dtype=torch.float32, bias=None) -> QuantizedMatrix:
    return QuantizedMatrix.from_parts(rows, columns, parts, "cpu", dtype, bias)


@EVERY_FORMAT
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 33])
def test_a_weight_stands_for_what_the_file_says(row_format, blocks):
    columns = blocks * elements_of(row_format)
    part = stored(row_format, 37, columns)
    matrix = pack([part], 37, columns)
    assert matrix.shape == (37, columns)
    assert np.array_equal(matrix.dequantize_rows(torch.arange(37)).numpy(), dequantized(part))


def test_every_format_of_a_file_that_has_a_layout_is_tested_and_can_be_taken_apart():
    assert set(FILE_FORMATS) == PACKED_FORMATS and BLOCKS.keys() == STORED_BLOCKS.keys()


@EVERY_FORMAT
def test_a_single_row_of_a_single_block(row_format):
    part = stored(row_format, 1, elements_of(row_format))
    found = pack([part], 1, elements_of(row_format)).dequantize_rows(torch.zeros(3, dtype=torch.int64))
    assert np.array_equal(found.numpy(), dequantized(part).repeat(3, 0))


def test_a_float8_block_that_holds_nan_is_nan():
    part = stored("float8_e4m3", 3, 300)
    part.data[1, 12 + 130] = 0xFF
    found = pack([part], 3, 300).dequantize_rows(torch.arange(3)).numpy()
    expected = dequantized(part)
    expected[1, 128:256] = np.nan
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254, 255])
def test_every_code_of_mxfp4_under_extreme_powers_of_two(exponent):
    data = np.zeros((1, 17), np.uint8)
    data[0, 0], data[0, 1:] = exponent, np.arange(16) * 17
    part = StoredRows("mxfp4", data)
    found = pack([part], 1, 32).dequantize_rows(torch.arange(1)).numpy()
    np.testing.assert_array_equal(found, dequantized(part))


@EVERY_FORMAT
def test_parts_are_stacked_in_order_and_may_be_views_of_a_file(row_format):
    columns = 3 * elements_of(row_format)
    parts = [stored(row_format, rows, columns, seed) for seed, rows in enumerate([1, 20, 7])]
    for part in parts:
        part.data.flags.writeable = False
    matrix = pack(iter(parts), 28, columns)
    assert [piece.format for piece in matrix.pieces] == [row_format]
    expected = np.concatenate([dequantized(part) for part in parts])
    assert np.array_equal(matrix.dequantize_rows(torch.arange(28)).numpy(), expected)


def test_parts_longer_than_what_is_repacked_at_a_time(monkeypatch):
    monkeypatch.setattr("streamllm.ops.gpu.quantized_matrix._ELEMENTS_AT_A_TIME", 16 * 64)
    part = stored("q4_1", 37, 64)
    assert np.array_equal(pack([part], 37, 64).dequantize_rows(torch.arange(37)).numpy(), dequantized(part))


def test_rows_of_several_formats_are_gathered_in_any_order():
    plain = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    half = plain.astype(np.float16)[:4]
    parts = [
        stored("q4_0", 10, 64),
        stored("q8_0", 11, 64),
        StoredRows("float16", half.view(np.uint8)),
        plain,
    ]
    matrix = pack(parts, 34, 64)
    assert [piece.n for piece in matrix.pieces] == [10, 11, 13]
    expected = np.concatenate([dequantized(parts[0]), dequantized(parts[1]), half.astype(np.float32), plain])
    ids = torch.tensor([33, 0, 9, 10, 20, 21, 24, 25, 0, 12])
    assert np.array_equal(matrix.dequantize_rows(ids).numpy(), expected[ids])
    out = torch.full((10, 64), float("nan"), dtype=torch.float16)
    matrix.gather(out, ids)
    assert np.array_equal(out.numpy(), expected[ids].astype(np.float16))


@EVERY_FORMAT
def test_memory_is_that_of_the_file(row_format):
    """But for integer scales of 6 bits, which become bytes."""
    part = stored(row_format, 64, 1024)
    size = pack([part], 64, 1024).nbytes
    added = {"q3_k": 4 / 110, "q4_k": 4 / 144, "q5_k": 4 / 176, "iq4_xs": 2 / 136}.get(row_format, 0)
    assert size == round(part.data.nbytes * (1 + added))
    assert pack([part], 64, 1024, bias=torch.zeros(64)).nbytes == size + 256


def test_products_without_a_gpu():
    part, bias = stored("q4_1", 20, 64), torch.randn(20)
    matrix, x = pack([part], 20, 64, bias=bias), torch.randn(3, 64)
    out = torch.full((3, 20), float("nan"))
    matrix.multiply(out, x)
    expected = x.double().numpy() @ dequantized(part).T.astype(np.float64) + bias.double().numpy()
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("row_format", ["int8_row", "float8_row"])
@pytest.mark.parametrize("columns", [32, 100])
def test_row_scaled_weights(row_format, columns):
    rows, reference = random_rows(row_format, 37, columns, torch.float32, "cpu")
    found = rows.dequantize(torch.arange(37)).double().numpy()
    np.testing.assert_allclose(found, reference, rtol=1e-6)


def test_quantising_keeps_the_largest_value_and_rows_of_zeros():
    weight = torch.randn(5, 64)
    weight[2] = 0
    for quantize, step in ((quantize_int8, 0.5 / 127), (quantize_float8, 2.0**-4)):
        found = quantize(weight).dequantize(torch.arange(5))
        largest = weight.abs().amax(1)
        assert torch.allclose(found.abs().amax(1), largest) and (found[2] == 0).all()
        assert ((found - weight).abs() <= largest[:, None] * step * 1.0001).all()


def test_one_scale_for_a_whole_float8_weight():
    weight = torch.randn(5, 64).to(torch.float8_e4m3fn)
    found = from_float8(weight, torch.tensor(0.5)).dequantize(torch.tensor([4, 1]))
    assert torch.equal(found, weight.float()[[4, 1]] * 0.5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([stored("q4_0", 5, 64)], "have 5 rows"),
        ([], "have 0 rows"),
        ([stored("q4_0", 5, 64), stored("q4_0", 6, 64)], r"shape \(6, 36\) does not fit a weight \[10, 64\]"),
        ([stored("q8_0", 10, 96)], r"shape \(10, 102\) does not fit"),
        ([np.zeros((10, 63), np.float32)], r"shape \(10, 63\) does not fit"),
        ([stored("q6_k", 10, 256)], "rows of 64 elements stored as q6_k must be dequantised"),
        ([StoredRows("iq2_xs", np.zeros((10, 50), np.uint8))], "stored as iq2_xs must be dequantised"),
    ],
)
def test_parts_that_do_not_make_the_weight(parts, message):
    with pytest.raises(ValueError, match=message):
        pack(parts, 10, 64)
