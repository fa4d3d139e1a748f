"""What the runner remembers of each sequence in the batch, and how a step's arrays are made of it."""

from __future__ import annotations

from array import array

import numpy as np

from streamllm.ops.lora import NO_ADAPTER
from streamllm.ops.step_inputs import ROW_EDITS, UNKNOWN_TOKEN, SamplingBuffers, StepInputs
from streamllm.runner.messages import NewSequence, ScheduledBatch
from streamllm.runner.processor_pass import ProcessorCall
from streamllm.runner.token_rules import SequenceRules, TokenRules

_MASK64 = 2**64 - 1


class BatchState:
    """Sequences by slot. Their memory grows with tokens and blocks, not with the context's limit.

    Args:
        max_num_seqs: number of slots.
        num_groups: KV groups, each with a block table of its own.
        queued: several steps may be in flight: the backend keeps block tables and drawn tokens by slot, and a
            row's token may be one whose id has yet to come.
    """

    def __init__(self, max_num_seqs: int, num_groups: int = 1, *, queued: bool = False):
        self._num_groups = num_groups
        self._queued = queued
        self._tokens: list[array[int] | None] = [None] * max_num_seqs
        # By group, then slot.
        self._blocks = [[array("i") for _ in range(max_num_seqs)] for _ in range(num_groups)]
        self._block_addresses = [[0] * max_num_seqs for _ in range(num_groups)]
        self._slot_of: dict[int, int] = {}
        self._sequence_ids: list[int] = [-1] * max_num_seqs
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._angle_length = np.zeros(max_num_seqs, np.int32)
        self._lora_slot = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        self._num_adapted = 0  # sequences with an adapter
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._logprobs_mode = np.zeros(max_num_seqs, np.int32)
        # Slots with rules; for the others the addresses are 0.
        self._rules: dict[int, SequenceRules] = {}
        self._edits = np.zeros(max_num_seqs, ROW_EDITS)
        self._edits_address = np.zeros(max_num_seqs, np.int64)
        self._allowed_mask_address = np.zeros(max_num_seqs, np.int64)

    @property
    def num_sequences(self) -> int:
        return len(self._slot_of)

    def token_ids(self, slot: int) -> list[int]:
        """All tokens known of the sequence in ``slot``."""
        tokens = self._tokens[slot]
        return [] if tokens is None else tokens.tolist()

    def block_ids(self, slot: int) -> list[list[int]]:
        """Its blocks in logical order, one list a KV group."""
        return [blocks[slot].tolist() for blocks in self._blocks]

    def update(self, batch: ScheduledBatch) -> None:
        """Takes finished sequences out, new ones in, and appends each row's new tokens and blocks.

        Raises:
            ValueError: a new sequence's slot is taken, or a row's slot is empty.
        """
        for slot in batch.finished_slots:
            self._remove(slot)
        for sequence in batch.new_sequences:
            self._add(sequence)
        for row in batch.rows:
            slot = row.slot
            tokens = self._tokens[slot]
            if tokens is None:
                raise ValueError(f"slot {slot} is scheduled but holds no sequence")
            if row.new_token_ids:
                tokens.extend(row.new_token_ids)
                if slot in self._rules:
                    self._rules[slot].append(row.new_token_ids)
            for group, first, block_ids in row.block_updates:
                blocks = self._blocks[group][slot]
                blocks[first:] = array("i", block_ids)
                self._block_addresses[group][slot] = blocks.buffer_info()[0]

    def fill(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        """Writes the forward's arrays. ``inputs.rope_rows`` gets each token's position.

        Raises:
            ValueError: a row's token is not known, and only one step may be in flight.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        query_start, context_lens = [0], []
        for row in batch.rows:
            tokens, start = self._tokens[row.slot], row.num_computed_tokens
            assert tokens is not None
            end = start + row.num_tokens
            if row.num_tokens == 1:
                token_ids.append(tokens[start] if start < len(tokens) else self._unknown_token(row.slot))
                positions.append(start)
            else:
                token_ids.extend(tokens[start:end])
                positions.extend(range(start, end))
            query_start.append(len(positions))
            context_lens.append(end)
        num_tokens, num_sequences = len(positions), len(context_lens)
        inputs.token_ids[:num_tokens] = token_ids
        inputs.rope_rows[:num_tokens] = positions
        inputs.query_start[: num_sequences + 1] = query_start
        inputs.context_lens[:num_sequences] = context_lens
        inputs.num_tokens, inputs.num_sequences = num_tokens, num_sequences
        for group in range(self._num_groups):
            self._fill_group(batch, inputs, group)
        if self._queued:
            inputs.slots[:num_sequences] = [row.slot for row in batch.rows]
        self._fill_adapters(batch, inputs)

    def _fill_adapters(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        """Which adapter each token's sequence has."""
        inputs.has_adapters = False
        if not self._num_adapted:
            inputs.lora_slots[: inputs.num_tokens] = NO_ADAPTER
            return
        slots = self._lora_slot[[row.slot for row in batch.rows]]
        inputs.lora_slots[: inputs.num_tokens] = np.repeat(slots, [row.num_tokens for row in batch.rows])
        inputs.has_adapters = bool((slots != NO_ADAPTER).any())

    def _unknown_token(self, slot: int) -> int:
        if not self._queued:
            raise ValueError(f"slot {slot} is scheduled beyond its last token")
        return UNKNOWN_TOKEN

    def _fill_group(self, batch: ScheduledBatch, inputs: StepInputs, group: int) -> None:
        """Where each token's K and V go, and where each sequence's blocks stand, for one KV group."""
        block_size = inputs.kv_cache.block_size
        tables = self._blocks[group]
        slots: list[int] = []
        for row in batch.rows:
            blocks, start = tables[row.slot], row.num_computed_tokens
            if row.num_tokens == 1:
                slots.append(blocks[start // block_size] * block_size + start % block_size)
            else:
                slots.extend(
                    blocks[position // block_size] * block_size + position % block_size
                    for position in range(start, start + row.num_tokens)
                )
        inputs.slot_mapping[group, : inputs.num_tokens] = slots
        if not self._queued:
            addresses = self._block_addresses[group]
            inputs.block_tables[group, : inputs.num_sequences] = [addresses[row.slot] for row in batch.rows]

    def angle_lengths(self, batch: ScheduledBatch) -> np.ndarray:
        """For each token of the step the length that its sequence has at least for embeddings whose angles
        depend on it: its prompt's, or that at which it started over; int32 ``[num_tokens]``."""
        slots = [row.slot for row in batch.rows]
        return np.repeat(self._angle_length[slots], [row.num_tokens for row in batch.rows])

    def fill_outputs(self, batch: ScheduledBatch, inputs: StepInputs, sampling: SamplingBuffers) -> None:
        """Writes the sampling's arrays, one entry for each of ``batch.output_rows``: those of grammars and
        logits processors, which come later, as if there were none."""
        count = inputs.num_outputs = len(batch.output_rows)
        if not count:
            return
        slot_list = [self._slot_of[output.sequence_id] for output in batch.output_rows]
        slots = np.array(slot_list)
        rows = np.array([output.row for output in batch.output_rows])
        inputs.output_rows[:count] = inputs.query_start[rows + 1] - 1
        if self._queued:
            inputs.output_slots[:count] = slots
        # An output row is its sequence's last token, also while that is not known.
        lengths = inputs.context_lens[rows]
        sampling.position[:count] = lengths - self._num_prompt_tokens[slots]
        sampling.temperature[:count] = self._temperature[slots]
        sampling.top_k[:count] = self._top_k[slots]
        sampling.top_p[:count] = self._top_p[slots]
        sampling.min_p[:count] = self._min_p[slots]
        sampling.seed[:count] = self._seed[slots]
        sampling.choice[:count] = self._choice[slots]
        sampling.num_logprobs[:count] = self._num_logprobs[slots]
        sampling.logprobs_mode[:count] = self._logprobs_mode[slots]
        if self._rules:
            length_of = dict(zip(slot_list, lengths.tolist(), strict=True))
            for slot in self._rules.keys() & length_of.keys():
                self._rules[slot].refresh(self._tokens[slot], length_of[slot])  # type: ignore[arg-type]
        sampling.edits[:count] = self._edits_address[slots]
        sampling.allowed_mask[:count] = self._allowed_mask_address[slots]
        sampling.grammar_mask[:count] = sampling.replacement[:count] = 0
        sampling.target[:count] = -1

    def processor_calls(self, batch: ScheduledBatch) -> list[ProcessorCall]:
        """The output rows whose logits pass through processors."""
        if not self._rules:
            return []
        calls = []
        for row, output in enumerate(batch.output_rows):
            slot = self._slot_of[output.sequence_id]
            tokens, known = self._tokens[slot], self._rules.get(slot)
            if known is not None and known.rules.processors:
                assert tokens is not None
                output_ids = tokens[known.num_prompt_tokens :].tolist()
                calls.append(ProcessorCall(row, known.prompt_token_ids, output_ids, known.rules.processors))
        return calls

    def rules(self, sequence_id: int) -> TokenRules | None:
        """The rules of a sequence's request, if it has any."""
        rules = self._rules.get(self._slot_of[sequence_id])
        return None if rules is None else rules.rules

    def _remove(self, slot: int) -> None:
        """Empties a slot; an empty one stays so (its sequence may have failed on its way in)."""
        self._slot_of.pop(self._sequence_ids[slot], None)
        self._sequence_ids[slot] = -1
        self._tokens[slot] = None
        self._num_adapted -= int(self._lora_slot[slot] != NO_ADAPTER)
        self._lora_slot[slot] = NO_ADAPTER
        if self._rules.pop(slot, None) is not None:
            self._edits_address[slot] = self._allowed_mask_address[slot] = 0
        for blocks, addresses in zip(self._blocks, self._block_addresses, strict=True):
            blocks[slot] = array("i")
            addresses[slot] = 0

    def _add(self, sequence: NewSequence) -> None:
        slot, params = sequence.slot, sequence.params
        if self._tokens[slot] is not None:
            raise ValueError(f"slot {slot} already holds sequence {self._sequence_ids[slot]}")
        self._tokens[slot] = array("i", sequence.token_ids)
        for group, block_ids in enumerate(sequence.block_ids):
            blocks = self._blocks[group][slot] = array("i", block_ids)
            self._block_addresses[group][slot] = blocks.buffer_info()[0]
        self._slot_of[sequence.sequence_id] = slot
        self._sequence_ids[slot] = sequence.sequence_id
        self._num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self._angle_length[slot] = max(sequence.num_prompt_tokens, sequence.restart_length)
        self._lora_slot[slot] = sequence.lora_slot
        self._num_adapted += int(sequence.lora_slot != NO_ADAPTER)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = sequence.seed & _MASK64
        self._choice[slot] = sequence.choice_index
        self._num_logprobs[slot] = -1 if sequence.num_logprobs is None else sequence.num_logprobs
        self._logprobs_mode[slot] = sequence.logprobs_mode
        if sequence.rules is not None:
            self._add_rules(slot, sequence.rules)

    def _add_rules(self, slot: int, rules: TokenRules) -> None:
        tokens = self._tokens[slot]
        assert tokens is not None
        record = self._edits[slot]
        self._rules[slot] = SequenceRules(rules, tokens, int(self._num_prompt_tokens[slot]), record)
        if rules.edits_logits:
            self._edits_address[slot] = self._edits.ctypes.data + slot * ROW_EDITS.itemsize
        if rules.allowed_mask is not None:
            self._allowed_mask_address[slot] = rules.allowed_mask.ctypes.data
