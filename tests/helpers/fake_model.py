"""An executor without a model: the next token is a hash of all tokens before it.

The scheduler, the engine and the server see what a real model gives them: deterministic tokens that depend on
the whole context and on nothing else. The executor keeps its own copy of every sequence from the incremental
messages alone, and fails loudly if a message contradicts it, so that each test also checks the protocol.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from streamllm.runner.messages import ScheduledBatch, StepOutput, TokenLogprobs

VOCAB_SIZE = 256


def next_token(token_ids: list[int], choice_index: int = 0) -> int:
    """The token that follows ``token_ids``: letters and spaces, so that any text is readable."""
    value = 1469598103934665603 + choice_index
    for token_id in [*token_ids[-8:], len(token_ids)]:
        value = (value ^ token_id) * 1099511628211 % 2**64
    return ord("abcdefghijklmnopqrstuvwxyz ABCDE"[value >> 40 & 31])


def continuation(prompt: list[int], count: int, choice_index: int = 0) -> list[int]:
    """The ``count`` tokens that follow a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids, choice_index))
    return token_ids[len(prompt) :]


@dataclass
class _Slot:
    sequence_id: int
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    choice_index: int
    num_logprobs: int | None


class FakeRunner:
    """Keeps sequences as the real runner does and checks every message against them."""

    def __init__(self, *, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots: dict[int, _Slot] = {}
        self.batches: list[ScheduledBatch] = []

    def step(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        assert 0 < batch.num_tokens <= self.max_num_batched_tokens
        for slot in batch.finished_slots:
            self.slots.pop(slot, None)
        for new in batch.new_sequences:
            assert new.slot not in self.slots, "a slot is in use"
            self.slots[new.slot] = _Slot(
                new.sequence_id,
                list(new.token_ids),
                list(new.block_ids),
                new.num_computed_tokens,
                new.choice_index,
                new.params.logprobs,
            )
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        for row in batch.rows:
            self._advance(row)
        self._check_blocks()
        output = StepOutput([], [], [])
        for output_row in batch.output_rows:
            state = self.slots[batch.rows[output_row.row].slot]
            assert state.sequence_id == output_row.sequence_id
            assert state.num_computed == len(state.token_ids)
            output.token_ids.append([next_token(state.token_ids, state.choice_index)])
            logprobs = None if state.num_logprobs is None else [TokenLogprobs(-0.5, 1, [], [])]
            output.logprobs.append(logprobs)
            output.errors.append(None)
        return output

    def _advance(self, row) -> None:
        state = self.slots[row.slot]
        state.token_ids += row.new_token_ids
        state.block_ids += row.new_block_ids
        assert row.num_computed_tokens == state.num_computed
        assert row.num_tokens > 0
        state.num_computed += row.num_tokens
        assert state.num_computed <= len(state.token_ids)
        assert state.num_computed <= len(state.block_ids) * self.block_size, "no block for a token"

    def _check_blocks(self) -> None:
        held = [block for state in self.slots.values() for block in state.block_ids]
        assert len(held) == len(set(held)), "two sequences write one block"


class FakeExecutor:
    """The executor's interface over :class:`FakeRunner`, with faults on request.

    Args:
        step_seconds: how long a forward takes.
    """

    def __init__(self, runner: FakeRunner, step_seconds: float = 0.0) -> None:
        self.runner = runner
        self.step_seconds = step_seconds
        self.fail_next: list[Exception] = []
        self.closed = False
        self._output: StepOutput | None = None

    def submit(self, batch: ScheduledBatch) -> None:
        self._output = self.runner.step(batch)

    async def forward_done(self) -> None:
        await asyncio.sleep(self.step_seconds)
        if self.fail_next:
            raise self.fail_next.pop(0)

    async def sample(self) -> StepOutput:
        assert self._output is not None
        return self._output

    def close(self) -> None:
        self.closed = True
