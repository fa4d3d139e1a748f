"""What a step sends to a device and gets back, in pinned memory of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamllm.ops.gpu.staging import Layout
from streamllm.ops.step_inputs import MAX_LOGPROBS

MAX_TABLE_CHANGES = 8192
"""Entries of block tables that a step's copy can bring; more of them are brought by another."""

MAX_BLOCK_COPIES = 1024
"""Block copies that a step's copy can name; more of them are named by another."""


@dataclass(frozen=True)
class StepSizes:
    """The largest step.

    Attributes:
        tokens, sequences, outputs: rows of the batch, of its tables, and rows whose logits are wanted.
        slots: sequences that have a block table.
        windows: positions that a row of each KV group sees; 0 for all.
        blocks: logical blocks of the longest sequence.
        decode_items: splits that one launch of the decode kernel attends to.
    """

    tokens: int
    sequences: int
    outputs: int
    slots: int
    windows: tuple[int, ...]
    blocks: int
    decode_items: int

    @property
    def groups(self) -> int:
        return len(self.windows)


class StagedStep:
    """The host's side of a step in flight, in pinned memory: what it sends, and where its results arrive.

    Attributes:
        forward, sampling: what the forward and what sampling reads, by the names of the layouts below.
        results: token, logprob, rank, top_ids and top_logprobs of the output rows.
        rules: what addresses among the sampling settings point to, uint8; grows as it has to.
    """

    def __init__(self, sizes: StepSizes, *, pinned: bool):
        host = torch.device("cpu")
        self._pinned = pinned
        self.forward_memory = forward_layout(sizes).allocate(host, pinned=pinned)
        self.sampling_memory = sampling_layout(sizes).allocate(host, pinned=pinned)
        self.result_memory = result_layout(sizes).allocate(host, pinned=pinned)
        self.forward = forward_layout(sizes).arrays(self.forward_memory)
        self.sampling = sampling_layout(sizes).arrays(self.sampling_memory)
        self.results = result_layout(sizes).arrays(self.result_memory)
        self.rules = self._allocate_rules(2**16)

    def grow_rules(self, num_bytes: int) -> None:
        """Makes ``rules`` at least so large; only while nothing is copied from it."""
        self.rules = self._allocate_rules(max(num_bytes, 2 * len(self.rules)))

    def _allocate_rules(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def forward_layout(sizes: StepSizes) -> Layout:
    """What a forward is sent. The decode kernel's lists of work stand last: of them a copy takes as much as
    there is."""
    int32, int64 = np.int32, np.int64
    sequences, per_group = (sizes.sequences,), (sizes.groups, sizes.sequences)
    return Layout(
        {
            "token_ids": (int32, (sizes.tokens,)),
            "rope_rows": (int32, (sizes.tokens,)),
            "lora_slots": (int32, (sizes.tokens,)),
            "slot_mapping": (int64, (sizes.groups, sizes.tokens)),
            "query_start": (int32, (sizes.sequences + 1,)),
            "context_lens": (int32, sequences),
            "table_rows": (int32, sequences),
            "prefill_sequences": (int32, sequences),
            "fed_rows": (int64, sequences),
            "fed_slots": (int64, sequences),
            "changed_places": (int64, (MAX_TABLE_CHANGES,)),
            "changed_blocks": (int32, (MAX_TABLE_CHANGES,)),
            "copied_blocks": (int32, (MAX_BLOCK_COPIES, 2)),
            "num_items": (int32, (sizes.groups, 1)),
            "first_item": (int32, per_group),
            "num_splits": (int32, per_group),
            "items": (int32, (sizes.groups, sizes.decode_items, 2)),
        }
    )


def sampling_layout(sizes: StepSizes) -> Layout:
    """What sampling is sent."""
    int32, int64, float32, outputs = np.int32, np.int64, np.float32, (sizes.outputs,)
    return Layout(
        {
            "output_rows": (int32, outputs),
            "drawn_rows": (int64, outputs),
            "drawn_slots": (int64, outputs),
            "temperature": (float32, outputs),
            "top_k": (int32, outputs),
            "top_p": (float32, outputs),
            "min_p": (float32, outputs),
            "seed": (np.uint64, outputs),
            "choice": (int32, outputs),
            "position": (int32, outputs),
            "num_logprobs": (int32, outputs),
            "logprobs_mode": (int32, outputs),
            "edits": (int64, outputs),
            "allowed_mask": (int64, outputs),
            "grammar_mask": (int64, outputs),
            "replacement": (int64, outputs),
            "target": (int32, outputs),
        }
    )


def result_layout(sizes: StepSizes) -> Layout:
    """What sampling gives back."""
    top = (sizes.outputs, MAX_LOGPROBS)
    return Layout(
        {
            "token": (np.int32, (sizes.outputs,)),
            "logprob": (np.float32, (sizes.outputs,)),
            "rank": (np.int32, (sizes.outputs,)),
            "top_ids": (np.int32, top),
            "top_logprobs": (np.float32, top),
        }
    )
