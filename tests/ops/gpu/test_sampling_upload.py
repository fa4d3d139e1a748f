"""Rows' rules packed for a device: here its memory is a copy at another address, and the host's is wiped."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sampling_checks import OUTPUTS, defined, random_logits, random_rules, random_settings
from helpers.sampling_rows import RowRules, copy_buffers

from streamllm.ops.gpu.kernels import PADDING_TARGET
from streamllm.ops.gpu.sampling_upload import PackedRows, StagingTooSmallError, pack
from streamllm.ops.step_inputs import ROW_EDITS, SamplingBuffers
from streamllm.runner import sampler

ADDRESSES = ("edits", "allowed_mask", "grammar_mask", "replacement")


def packed_rows(sampling: SamplingBuffers, count: int, vocab_size: int) -> tuple[PackedRows, np.ndarray]:
    """The rows, and the memory that their addresses are of: as large as they say that it must be."""
    staging = np.zeros(1 << 20, np.uint8)
    device = np.zeros(1 << 20, np.uint8)
    packed = pack(sampling, count, vocab_size, staging, device.ctypes.data)
    assert not staging[packed.num_bytes :].any()
    device[: packed.num_bytes] = staging[: packed.num_bytes]
    return packed, device


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500])
def test_sampling_from_the_copy_gives_the_same(vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = 30
    logits = random_logits(rng, rows, vocab_size)
    sampling = random_settings(rng, rows)
    rules = random_rules(rng, sampling, vocab_size)
    moved = copy_buffers(sampling)
    packed, device = packed_rows(sampling, rows, vocab_size)
    for name in ADDRESSES:
        addresses = getattr(packed, name)
        start, end = device.ctypes.data, device.ctypes.data + packed.num_bytes
        assert ((addresses == 0) | ((addresses >= start) & (addresses < end))).all()
        assert (addresses % 16 == 0).all()
        getattr(moved, name)[:] = addresses
    expected = defined(logits, sampling)
    rules.wipe()
    actual = defined(logits, moved)
    for name in OUTPUTS:
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


def test_every_field_of_a_record():
    sampling = SamplingBuffers.allocate(1)
    rules = RowRules(sampling)
    rules.edit(0, bias={7: 0.5, 9: -1.0}, seen={3: 2, 4: 0, 9: 1}, penalties=(1.5, 0.25, 0.125), banned=[1])
    packed, _device = packed_rows(sampling, 1, 10)
    rules.wipe()
    edits = sampler.RowEdits.at(int(packed.edits[0]))
    assert edits.bias_ids.tolist() == [7, 9] and edits.bias_values.tolist() == [0.5, -1.0]
    assert edits.seen_ids.tolist() == [3, 4, 9] and edits.output_counts.tolist() == [2, 0, 1]
    assert edits.banned_ids.tolist() == [1]
    penalties = (edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty)
    assert penalties == (1.5, 0.25, 0.125)


def test_rows_without_rules_need_nothing():
    sampling = SamplingBuffers.allocate(3)
    packed = pack(sampling, 3, 100, np.empty(0, np.uint8), 1 << 40)
    assert packed.num_bytes == 0
    assert not any(getattr(packed, name).any() for name in ADDRESSES)


def test_what_rows_share_is_copied_once():
    sampling = SamplingBuffers.allocate(4)
    rules = RowRules(sampling)
    rules.allow(0, np.arange(1000) % 2 == 0)
    rules.edit(0, banned=[1, 2, 3])
    sampling.allowed_mask[:] = sampling.allowed_mask[0]
    sampling.edits[:] = sampling.edits[0]
    packed, _device = packed_rows(sampling, 4, 1000)
    assert len(set(packed.allowed_mask)) == len(set(packed.edits)) == 1
    assert packed.num_bytes == 128 + -(-ROW_EDITS.itemsize // 16) * 16 + 16


def test_rows_that_are_not_drawn_have_no_rules():
    """Their addresses may be of memory that is gone; so may those of rows beyond the count."""
    sampling = SamplingBuffers.allocate(3)
    for name in ADDRESSES:
        getattr(sampling, name)[:] = 8
    sampling.target[:2] = [5, PADDING_TARGET]
    packed, _device = packed_rows(sampling, 2, 100)
    assert packed.num_bytes == 0
    assert not any(getattr(packed, name).any() for name in ADDRESSES)


def test_a_staging_area_that_is_too_small_says_what_would_do():
    sampling = SamplingBuffers.allocate(2)
    rules = RowRules(sampling)
    rules.replace(0, np.arange(100))
    rules.edit(1, banned=[1])
    staging = np.zeros(300, np.uint8)
    with pytest.raises(StagingTooSmallError, match="bytes of staging, not 300") as error:
        pack(sampling, 2, 100, staging, 0)
    assert not staging.any()
    needed = error.value.needed
    assert pack(sampling, 2, 100, np.zeros(needed, np.uint8), 0).num_bytes == needed
    with pytest.raises(StagingTooSmallError):
        pack(sampling, 2, 100, np.zeros(needed - 1, np.uint8), 0)
