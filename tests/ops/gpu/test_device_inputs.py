"""What a step brings to the device: rows and their padding, block tables by slot, tokens that stay there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamllm.ops.gpu import device_inputs, staged_step
from streamllm.ops.gpu.device_inputs import DeviceInputs
from streamllm.ops.gpu.device_kv_cache import DeviceKVCache
from streamllm.ops.gpu.kernels import SPLIT_SIZE
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.gpu.staged_step import StagedStep, StepSizes
from streamllm.ops.step_inputs import UNKNOWN_TOKEN, SamplingBuffers, StepInputs

CPU = torch.device("cpu")
ROPES = (np.arange(40, dtype=np.float32).reshape(10, 4), np.full((12, 1), 3.0, np.float32))
MINUS = tuple(-table for table in ROPES)


class Device:
    """Inputs on the CPU and the step that fills them.

    Args:
        chunks: rows of each sequence; sequence ``s`` has the slot ``s + 1`` and so many tokens of context.
    """

    def __init__(self, windows=(0,), decode_items: int = 64):
        self.cache = DeviceKVCache(
            ReferenceKernels(),
            layers_per_block=2,
            num_blocks=12,
            block_size=16,
            num_kv_heads=1,
            head_dim=8,
            kv_cache_dtype="float32",
            device=CPU,
        )
        self.sizes = StepSizes(32, 8, 8, 9, tuple(windows), 40, decode_items)
        partials = torch.empty(decode_items, 1, 10)
        self.device = DeviceInputs(self.sizes, self.cache, ROPES, MINUS, partials, CPU)
        self.step = StagedStep(self.sizes, pinned=False)
        self.inputs = StepInputs.allocate(32, 8, ROPES, MINUS, self.cache, len(windows), 8)

    def fill(self, chunks: list[int], contexts: list[int]) -> None:
        inputs, tokens = self.inputs, sum(chunks)
        inputs.num_tokens, inputs.num_sequences = tokens, len(chunks)
        inputs.token_ids[:tokens] = np.arange(100, 100 + tokens)
        inputs.rope_rows[:tokens] = np.arange(tokens) % 10
        inputs.slot_mapping[:, :tokens] = np.arange(tokens)
        inputs.query_start[: len(chunks) + 1] = np.cumsum([0, *chunks])
        inputs.context_lens[: len(chunks)] = contexts
        inputs.slots[: len(chunks)] = np.arange(1, len(chunks) + 1)

    def send(self, changes=(), copies=(), tokens=None, sequences=None):
        return self.device.send_forward(
            self.step,
            self.inputs,
            changes,
            copies,
            padded_tokens=tokens or self.inputs.num_tokens,
            padded_sequences=sequences or self.inputs.num_sequences,
        )


def test_rows_are_what_the_step_says_and_padding_does_nothing():
    device = Device()
    device.fill([1, 3, 1], [20, 3, 300])
    batch = device.send(tokens=8, sequences=6)
    (group,) = batch.groups
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 104, 0, 0, 0]
    assert batch.rope_rows.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert group.slot_mapping.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert group.context.query_start.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert group.context.context_lens.tolist() == [20, 3, 300, 0, 0, 0]
    assert group.context.table_rows.tolist() == [1, 2, 3, 0, 0, 0]
    assert batch.prefill_sequences.tolist() == [1] and batch.max_query_len == 3
    (work,) = group.decode_works
    assert work.first_item.tolist() == [0, -1, 1, -1, -1, -1]
    assert work.num_splits.tolist() == [1, 0, 2, 0, 0, 0]
    assert work.items[: int(work.num_items)].tolist() == [[0, 0], [2, 0], [2, 1]]


def test_the_arrays_may_change_once_they_are_sent():
    device = Device()
    device.fill([2], [2])
    batch = device.send()
    device.fill([2], [5])
    device.inputs.token_ids[:] = 7
    assert batch.token_ids.tolist() == [100, 101]
    assert batch.groups[0].context.context_lens.tolist() == [2]


def test_without_decodes_their_kernel_has_no_work():
    device = Device(windows=(0, 5))
    device.fill([2, 3], [2, 9])
    batch = device.send()
    assert [group.decode_works for group in batch.groups] == [[], []]
    assert batch.prefill_sequences.tolist() == [0, 1]


def test_a_window_leaves_out_splits_that_nobody_sees():
    device = Device(windows=(0, 10))
    device.fill([1], [2 * SPLIT_SIZE + 20])
    full, windowed = (group.decode_works[0] for group in device.send().groups)
    assert full.items[: int(full.num_items), 1].tolist() == [0, 1, 2]
    assert windowed.items[: int(windowed.num_items), 1].tolist() == [2]


def test_splits_beyond_one_launch_come_in_more():
    device = Device(decode_items=4)
    contexts = [3 * SPLIT_SIZE, SPLIT_SIZE, 2 * SPLIT_SIZE + 1, 2]
    device.fill([1, 1, 1, 1], contexts)
    assert not device.device.decodes_at_once(device.inputs)
    (group,) = device.send().groups
    seen = []
    for work in group.decode_works:
        assert int(work.num_items) <= 4 and len(work.partials) >= int(work.num_items)
        for sequence, first in enumerate(work.first_item.tolist()):
            if first >= 0:
                splits = work.items[first : first + int(work.num_splits[sequence])]
                seen += [(sequence, split) for _, split in splits.tolist()]
                assert set(splits[:, 0].tolist()) == {sequence}
    assert seen == [(s, split) for s, n in enumerate(contexts) for split in range(-(-n // SPLIT_SIZE))]


def test_tables_stay_by_slot_and_take_changes():
    device = Device(windows=(0, 5))
    device.fill([1], [1])
    device.send([(0, 2, 0, [5, 6, 7]), (1, 2, 0, [8, 9]), (0, 3, 0, [1])])
    tables = device.send([(0, 2, 1, [-1, 4]), (0, 2, 3, [3])]).groups
    assert tables[0].context.block_tables[2, :5].tolist() == [5, -1, 4, 3, -1]
    assert tables[0].context.block_tables[3, :2].tolist() == [1, -1]
    assert tables[1].context.block_tables[2, :3].tolist() == [8, 9, -1]


def test_the_last_of_two_changes_counts():
    device = Device()
    device.fill([1], [1])
    tables = device.send([(0, 4, 0, [1, 2, 3]), (0, 4, 1, [9])]).groups[0].context.block_tables
    assert tables[4, :4].tolist() == [1, 9, 3, -1]


def test_a_table_that_is_too_long_is_refused():
    device = Device()
    device.fill([1], [1])
    with pytest.raises(ValueError, match="slot 3 has 41 blocks, more than 40"):
        device.send([(0, 3, 38, [1, 2, 3])])


def test_more_changes_and_copies_than_one_transfer_holds(monkeypatch):
    monkeypatch.setattr(staged_step, "MAX_TABLE_CHANGES", 3)
    monkeypatch.setattr(device_inputs, "MAX_TABLE_CHANGES", 3)
    monkeypatch.setattr(staged_step, "MAX_BLOCK_COPIES", 2)
    monkeypatch.setattr(device_inputs, "MAX_BLOCK_COPIES", 2)
    device = Device()
    device.fill([1], [1])
    planes = device.cache.planes
    planes[:] = torch.arange(12.0)[None, None, :, None, None]
    copies = [(0, 5), (1, 6), (2, 7), (5, 8), (3, 0)]
    tables = device.send([(0, 1, 0, list(range(10, 18)))], copies).groups[0].context.block_tables
    assert tables[1, :8].tolist() == list(range(10, 18))
    assert planes[1, 1, :, 0, 50].tolist() == [3, 1, 2, 3, 4, 0, 1, 2, 0, 9, 10, 11]


def test_copies_are_made_one_after_the_other():
    device = Device()
    device.fill([1], [1])
    device.cache.planes[:] = torch.arange(12.0)[None, None, :, None, None]
    device.send(copies=[(1, 2), (2, 3), (4, 1)])
    assert device.cache.planes[0, 0, :5, 0, 0].tolist() == [0, 4, 1, 1, 4]


def test_drawn_tokens_are_fed_to_their_slots():
    device = Device()
    device.fill([1, 2, 1], [4, 2, 9])
    device.inputs.num_outputs = 3
    device.inputs.output_slots[:3] = [5, 1, 3]
    sampling = SamplingBuffers.allocate(8)
    sampling.target[1] = 17  # judged, not drawn
    device.device.send_sampling(device.step, device.inputs, sampling, vocab_size=50)
    device.device.sampling.token[:3] = torch.tensor([42, 17, -1], dtype=torch.int32)
    device.device.keep_drawn_tokens()
    assert device.device.last_tokens.tolist() == [0, 0, 0, 0, 0, 42, 0, 0, 0]

    device.inputs.slots[:3] = [5, 2, 3]
    device.inputs.token_ids[[0, 3]] = UNKNOWN_TOKEN
    assert device.send().token_ids.tolist() == [42, 101, 102, 0]


def test_what_addresses_point_to_has_been_taken_when_sampling_is_sent():
    device = Device()
    device.fill([1], [4])
    device.inputs.num_outputs = 1
    sampling = SamplingBuffers.allocate(8)
    logits = np.arange(300_000, dtype=np.float32)  # more than fits at first
    sampling.replacement[0] = logits.ctypes.data
    device.device.send_sampling(device.step, device.inputs, sampling, vocab_size=len(logits))
    logits[:] = 0
    device.device.sampling.top_k[:] = 0
    ReferenceKernels().sample(torch.zeros(1, len(logits)), len(logits), device.device.sampling, 1)
    assert device.device.sampling.token[0] == len(logits) - 1


def test_changed_rotary_tables_are_taken():
    device = Device()
    device.fill([1], [1])
    before = device.send()
    assert [table.tolist() for table in before.rope_sin] == [table.tolist() for table in MINUS]
    cos, sin = tuple(table + 1 for table in ROPES), tuple(table + 2 for table in ROPES)
    device.device.send_rope(cos, sin)
    for batch in (before, device.send()):  # a graph has the addresses
        assert [table.tolist() for table in batch.rope_cos] == [table.tolist() for table in cos]
        assert [table.tolist() for table in batch.rope_sin] == [table.tolist() for table in sin]


@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_a_batch_of_padding_touches_nothing(num_tokens):
    device = Device(windows=(0, 5))
    device.fill([1, 1], [40, 40])
    device.send([(0, 1, 0, [2])])
    before = device.cache.planes.clone()
    batch = device.device.send_padding(device.step, num_tokens, with_prefill=True)
    assert batch.num_tokens == num_tokens and batch.max_query_len == num_tokens
    for group in batch.groups:
        assert group.slot_mapping.tolist() == [-1] * num_tokens
        assert not group.context.context_lens.any()
        assert int(group.decode_works[0].num_items) == 0
    assert torch.equal(device.cache.planes, before)
