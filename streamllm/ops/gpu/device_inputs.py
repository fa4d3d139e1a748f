"""What a step reads on a device: buffers that never move, and the pinned arrays that fill them.

A step's arrays are written on the host into pinned memory (:class:`StagedStep`) and moved by one asynchronous
copy into buffers whose addresses graphs may hold. Block tables stay on the device by slot; a step brings only
what changed in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from streamllm.ops.gpu.decode_work import DecodeItems, decode_work
from streamllm.ops.gpu.device_kv_cache import DeviceKVCache
from streamllm.ops.gpu.kernels import SPLIT_SIZE, DecodeWork, DeviceSampling, PagedContext, copy_waves
from streamllm.ops.gpu.sampling_upload import PackedRows, StagingTooSmallError, pack
from streamllm.ops.gpu.staged_step import (
    MAX_BLOCK_COPIES,
    MAX_TABLE_CHANGES,
    StagedStep,
    StepSizes,
    forward_layout,
    result_layout,
    sampling_layout,
)
from streamllm.ops.lora import NO_ADAPTER
from streamllm.ops.step_inputs import UNKNOWN_TOKEN, SamplingBuffers, StepInputs

BlockCopy = tuple[int, int]
"""(source, destination)."""

TableChange = tuple[int, int, int, list[int]]
"""(KV group, slot, first logical block, physical blocks from there on)."""


@dataclass(slots=True)
class GroupBatch:
    """What the layers of one KV group read.

    Attributes:
        slot_mapping: int64 ``[tokens]``.
        context: where the sequences stand.
        decode_works: the splits of those with one row, in one list or, if they are too many, in several.
    """

    slot_mapping: Tensor
    context: PagedContext
    decode_works: list[DecodeWork]


@dataclass(slots=True)
class DeviceBatch:
    """What one forward reads: leading entries of buffers that never move.

    Attributes:
        token_ids, rope_rows: int32 ``[tokens]``, padding included.
        output_rows: int32 ``[outputs]``.
        rope_cos, rope_sin: float32 ``[*, rotary_dim / 2]``, one each for every rotary embedding of the model.
        prefill_sequences: int32 ``[n]``: those with more than one row.
        max_query_len: the most rows that one of them has.
    """

    token_ids: Tensor
    rope_rows: Tensor
    output_rows: Tensor
    rope_cos: tuple[Tensor, ...]
    rope_sin: tuple[Tensor, ...]
    kv_cache: DeviceKVCache
    groups: list[GroupBatch]
    prefill_sequences: Tensor
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DeviceInputs:
    """The device's side: buffers that never move. All copies go to the current stream.

    Args:
        partials: float32 ``[decode_items, heads, head_dim + 2]``: the decode kernel's scratch.
        rope_cos, rope_sin: float32 ``[*, rotary_dim / 2]``, one each for every rotary embedding of the model.

    Attributes:
        last_tokens: int32 ``[slots]``: the token drawn last for the sequence in a slot.
        lora_slots: int32 ``[tokens]``: the slot of each row's adapter, or -1.
        sampling: settings and results on the device.
    """

    def __init__(
        self,
        sizes: StepSizes,
        kv_cache: DeviceKVCache,
        rope_cos: Sequence[np.ndarray],
        rope_sin: Sequence[np.ndarray],
        partials: Tensor,
        device: torch.device,
    ):
        self._sizes, self._kv_cache, self._partials, self._device = sizes, kv_cache, partials, device
        self._forward_layout = forward_layout(sizes)
        self._forward_memory = self._forward_layout.allocate(device)
        self._sampling_memory = sampling_layout(sizes).allocate(device)
        self._result_memory = result_layout(sizes).allocate(device)
        self._forward = self._forward_layout.tensors(self._forward_memory)
        self._sampling = sampling_layout(sizes).tensors(self._sampling_memory)
        results = result_layout(sizes).tensors(self._result_memory)
        settings = self._sampling | results
        self._alternatives_start, self._result_end = (
            result_layout(sizes).start("top_ids"),
            result_layout(sizes).num_bytes,
        )
        self._num_drawn = 0
        self.sampling = DeviceSampling(
            **{field.name: settings[field.name] for field in fields(DeviceSampling)}
        )
        self.lora_slots = self._forward["lora_slots"]
        self.last_tokens = torch.zeros(sizes.slots, dtype=torch.int32, device=device)
        self._rope_cos = tuple(torch.tensor(table, device=device) for table in rope_cos)
        self._rope_sin = tuple(torch.tensor(table, device=device) for table in rope_sin)
        self._tables = torch.full(
            (sizes.groups, sizes.slots, sizes.blocks), -1, dtype=torch.int32, device=device
        )
        self._rules = torch.zeros(0, dtype=torch.uint8, device=device)

    # -- the forward ---------------------------------------------------------------------------------------

    def send_forward(
        self,
        step: StagedStep,
        inputs: StepInputs,
        changes: Iterable[TableChange] = (),
        copies: Sequence[BlockCopy] = (),
        *,
        padded_tokens: int,
        padded_sequences: int,
    ) -> DeviceBatch:
        """Takes a step's arrays, which may change then, and sends them; changes block tables and copies
        blocks.

        Args:
            copies: made one after the other.
            padded_tokens, padded_sequences: what the forward's rows and sequences are filled up to. Padding
                writes nothing into the cache and has empty contexts.
        """
        places, blocks = self._places(changes)
        num_items, later_works = self._stage_forward(step, inputs, padded_tokens, padded_sequences)
        count = min(len(places), MAX_TABLE_CHANGES)
        step.forward["changed_places"][:count] = places[:count]
        step.forward["changed_blocks"][:count] = blocks[:count]
        named = np.array(copies[:MAX_BLOCK_COPIES], np.int32).reshape(-1, 2)
        step.forward["copied_blocks"][: len(named)] = named
        fed = _fed_rows(inputs)
        step.forward["fed_rows"][: len(fed[0])], step.forward["fed_slots"][: len(fed[0])] = fed
        end = self._forward_layout.start("items") + 8 * num_items
        self._forward_memory[:end].copy_(step.forward_memory[:end], non_blocking=True)
        self._change_tables(self._forward["changed_places"][:count], self._forward["changed_blocks"][:count])
        if count < len(places):
            rest = torch.from_numpy(places[count:]), torch.from_numpy(blocks[count:])
            self._change_tables(*(tensor.to(self._device) for tensor in rest))
        self._copy_blocks(copies)
        if num_fed := len(fed[0]):
            tokens = self.last_tokens.index_select(0, self._forward["fed_slots"][:num_fed])
            self._forward["token_ids"].index_copy_(0, self._forward["fed_rows"][:num_fed], tokens)
        batch = self.batch(padded_tokens, padded_sequences)
        chunks = np.diff(inputs.query_start[: inputs.num_sequences + 1])
        num_prefills = int((chunks > 1).sum())
        batch.prefill_sequences = self._forward["prefill_sequences"][:num_prefills]
        batch.max_query_len = int(chunks.max(initial=0))
        for group, later in zip(batch.groups, later_works, strict=True):
            group.decode_works += later
        if not (chunks == 1).any():
            for group in batch.groups:
                group.decode_works.clear()
        return batch

    def send_padding(self, step: StagedStep, num_tokens: int, *, with_prefill: bool = False) -> DeviceBatch:
        """Sends a batch of nothing but padding, with sequences of one row as far as there may be so many, and
        waits until it is there.

        Args:
            with_prefill: attention runs the first of them as a prompt of ``num_tokens``, too.
        """
        cache, groups = self._kv_cache, self._sizes.groups
        nothing = StepInputs.allocate(0, 0, (), (), cache, groups)  # type: ignore[arg-type]
        num_sequences = min(num_tokens, self._sizes.sequences)
        step.forward["prefill_sequences"][0] = 0
        self.send_forward(step, nothing, padded_tokens=num_tokens, padded_sequences=num_sequences)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        batch = self.batch(num_tokens, num_sequences)
        if with_prefill:
            batch.prefill_sequences = self._forward["prefill_sequences"][:1]
            batch.max_query_len = num_tokens
        return batch

    def decodes_at_once(self, inputs: StepInputs) -> bool:
        """Whether one launch of the decode kernel has room for all splits of the sequences' contexts."""
        splits = -(-inputs.context_lens[: inputs.num_sequences] // SPLIT_SIZE)
        return int(splits.sum()) <= self._sizes.decode_items

    def batch(self, num_tokens: int, num_sequences: int) -> DeviceBatch:
        """So many tokens and sequences of one row each, over the buffers."""
        forward, sizes = self._forward, self._sizes
        groups = [
            GroupBatch(
                slot_mapping=forward["slot_mapping"][group, :num_tokens],
                context=PagedContext(
                    query_start=forward["query_start"][: num_sequences + 1],
                    context_lens=forward["context_lens"][:num_sequences],
                    table_rows=forward["table_rows"][:num_sequences],
                    block_tables=self._tables[group],
                ),
                decode_works=[
                    DecodeWork(
                        items=forward["items"][group],
                        num_items=forward["num_items"][group],
                        first_item=forward["first_item"][group, :num_sequences],
                        num_splits=forward["num_splits"][group, :num_sequences],
                        partials=self._partials,
                    )
                ],
            )
            for group in range(sizes.groups)
        ]
        return DeviceBatch(
            token_ids=forward["token_ids"][:num_tokens],
            rope_rows=forward["rope_rows"][:num_tokens],
            output_rows=self._sampling["output_rows"][:0],
            rope_cos=self._rope_cos,
            rope_sin=self._rope_sin,
            kv_cache=self._kv_cache,
            groups=groups,
            prefill_sequences=forward["prefill_sequences"][:0],
            max_query_len=1,
        )

    def send_rope(self, rope_cos: Sequence[np.ndarray], rope_sin: Sequence[np.ndarray]) -> None:
        """Takes rotary tables that have changed."""
        for own, changed in zip((*self._rope_cos, *self._rope_sin), (*rope_cos, *rope_sin), strict=True):
            own.copy_(torch.from_numpy(changed))

    def _stage_forward(
        self, step: StagedStep, inputs: StepInputs, num_tokens: int, num_sequences: int
    ) -> tuple[int, list[list[DecodeWork]]]:
        """Writes rows, sequences and the decode kernel's work; returns how many entries of ``items`` count
        (over all groups, the gaps between them included) and each group's further works."""
        staged, tokens, sequences = step.forward, inputs.num_tokens, inputs.num_sequences
        staged["token_ids"][:tokens] = inputs.token_ids[:tokens]
        staged["rope_rows"][:tokens] = inputs.rope_rows[:tokens]
        staged["slot_mapping"][:, :tokens] = inputs.slot_mapping[:, :tokens]
        staged["token_ids"][tokens:num_tokens] = staged["rope_rows"][tokens:num_tokens] = 0
        staged["slot_mapping"][:, tokens:num_tokens] = -1
        staged["lora_slots"][:tokens] = inputs.lora_slots[:tokens]
        staged["lora_slots"][tokens:num_tokens] = NO_ADAPTER
        staged["query_start"][: sequences + 1] = inputs.query_start[: sequences + 1]
        staged["query_start"][sequences + 1 : num_sequences + 1] = np.arange(
            tokens + 1, tokens + 1 + num_sequences - sequences
        )
        staged["context_lens"][:sequences] = inputs.context_lens[:sequences]
        staged["table_rows"][:sequences] = inputs.slots[:sequences]
        staged["context_lens"][sequences:num_sequences] = staged["table_rows"][sequences:num_sequences] = 0
        chunks = np.diff(inputs.query_start[: sequences + 1])
        prefills = np.flatnonzero(chunks > 1)
        staged["prefill_sequences"][: len(prefills)] = prefills
        num_items, later_works = 0, []
        for group, window in enumerate(self._sizes.windows):
            works = self._decode_works(inputs.context_lens[:sequences], chunks == 1, window)
            first = works[0]
            staged["num_items"][group] = len(first.items)
            staged["items"][group, : len(first.items)] = first.items
            for name in ("first_item", "num_splits"):
                staged[name][group, :sequences] = getattr(first, name)
                staged[name][group, sequences:num_sequences] = -1 if name == "first_item" else 0
            num_items = group * self._sizes.decode_items + len(first.items)
            later_works.append([self._on_device(work) for work in works[1:]])
        return num_items, later_works

    def _decode_works(self, context_lens: np.ndarray, decoded: np.ndarray, window: int) -> list[DecodeItems]:
        """The splits of the sequences with one row, cut where one launch has no room for more."""
        items = decode_work(context_lens, decoded, window)
        if len(items.items) <= self._sizes.decode_items:
            return [items]
        works, taken = [], 0
        launch = np.zeros(len(decoded), np.int64)
        for sequence in np.flatnonzero(decoded):
            if taken + items.num_splits[sequence] > self._sizes.decode_items:
                launch[sequence:] += 1
                taken = 0
            taken += int(items.num_splits[sequence])
        for number in range(int(launch.max()) + 1):
            works.append(decode_work(context_lens, decoded & (launch == number), window))
        return works

    def _on_device(self, work: DecodeItems) -> DecodeWork:
        """A work that has no place in the buffers."""
        num_items = len(work.items)
        return DecodeWork(
            items=torch.from_numpy(work.items).to(self._device),
            num_items=torch.tensor([num_items], dtype=torch.int32, device=self._device),
            first_item=torch.from_numpy(work.first_item).to(self._device),
            num_splits=torch.from_numpy(work.num_splits).to(self._device),
            partials=self._partials[:num_items],
        )

    def _places(self, changes: Iterable[TableChange]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct places among all tables' entries, and the blocks that are there now.

        Raises:
            ValueError: a table has no such place.
        """
        sizes = self._sizes
        blocks: dict[int, int] = {}
        for group, slot, first, block_ids in changes:
            if first + len(block_ids) > sizes.blocks:
                raise ValueError(f"slot {slot} has {first + len(block_ids)} blocks, more than {sizes.blocks}")
            place = (group * sizes.slots + slot) * sizes.blocks + first
            blocks.update(zip(range(place, place + len(block_ids)), block_ids, strict=True))
        return np.fromiter(blocks.keys(), np.int64, len(blocks)), np.fromiter(
            blocks.values(), np.int32, len(blocks)
        )

    def _change_tables(self, places: Tensor, blocks: Tensor) -> None:
        if len(places):
            self._tables.view(-1).index_copy_(0, places, blocks)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, of which the leading ones have been sent, as many at once as may be."""
        start = 0
        for wave in copy_waves(copies):
            end = start + len(wave)
            if end <= MAX_BLOCK_COPIES:
                pairs = self._forward["copied_blocks"][start:end]
            else:
                pairs = torch.tensor(wave, dtype=torch.int32, device=self._device)
            self._kv_cache.copy_blocks(pairs)
            start = end

    # -- sampling ------------------------------------------------------------------------------------------

    def send_sampling(
        self, step: StagedStep, inputs: StepInputs, sampling: SamplingBuffers, vocab_size: int
    ) -> None:
        """Takes the settings of the output rows, and all that they point to, and sends them."""
        count, staged = inputs.num_outputs, step.sampling
        staged["output_rows"][:count] = inputs.output_rows[:count]
        drawn = np.flatnonzero(sampling.target[:count] < 0)
        staged["drawn_rows"][: len(drawn)] = drawn
        staged["drawn_slots"][: len(drawn)] = inputs.output_slots[drawn]
        for name in _SETTINGS:
            staged[name][:count] = getattr(sampling, name)[:count]
        packed = self._pack_rules(step, sampling, count, vocab_size)
        for name in ("edits", "allowed_mask", "grammar_mask", "replacement"):
            staged[name][:count] = getattr(packed, name)
        self._sampling_memory.copy_(step.sampling_memory, non_blocking=True)
        if packed.num_bytes:
            end = packed.num_bytes
            self._rules[:end].copy_(step.rules[:end], non_blocking=True)
        self._num_drawn = len(drawn)

    def output_rows(self, count: int) -> Tensor:
        """int32 ``[count]``: the rows whose logits are wanted."""
        return self._sampling["output_rows"][:count]

    def keep_drawn_tokens(self) -> None:
        """Notes the tokens that were drawn for the sequences that the last :meth:`send_sampling` named."""
        rows, slots = (self._sampling[name][: self._num_drawn] for name in ("drawn_rows", "drawn_slots"))
        # A row without a token is a failed one: what is computed from its place on is dropped.
        tokens = self.sampling.token.index_select(0, rows).clamp_(min=0)
        self.last_tokens.index_copy_(0, slots, tokens)

    def fetch_results(self, step: StagedStep, *, with_alternatives: bool) -> None:
        """Begins to bring the results to the host; they are there when the stream has come so far."""
        end = self._result_end if with_alternatives else self._alternatives_start
        step.result_memory[:end].copy_(self._result_memory[:end], non_blocking=True)

    def _pack_rules(
        self, step: StagedStep, sampling: SamplingBuffers, count: int, vocab_size: int
    ) -> PackedRows:
        while True:
            if len(self._rules) < len(step.rules):
                self._rules = torch.zeros(len(step.rules), dtype=torch.uint8, device=self._device)
            try:
                return pack(sampling, count, vocab_size, step.rules.numpy(), self._rules.data_ptr())
            except StagingTooSmallError as error:
                step.grow_rules(error.needed)


_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "choice", "position", "num_logprobs", "logprobs_mode",
    "target",
)  # fmt: skip


def _fed_rows(inputs: StepInputs) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the batch whose token only the device knows, and the slots of their sequences."""
    rows = np.flatnonzero(inputs.token_ids[: inputs.num_tokens] == UNKNOWN_TOKEN)
    sequences = np.searchsorted(inputs.query_start[: inputs.num_sequences + 1], rows, side="right") - 1
    return rows, inputs.slots[sequences]
