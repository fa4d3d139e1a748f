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


def ranked_tokens(token_ids: list[int], count: int) -> list[tuple[int, float]]:
    """``count`` candidates for the next token with logprobs, likeliest first."""
    value = 14695981039346656037
    for token_id in token_ids[-4:]:
        value = (value ^ token_id) * 1099511628211 % 2**64
    order = sorted(range(65, 65 + 26), key=lambda token: (value >> 20) * (token * 2654435761) % 1000003)
    return [(token, -0.3 - 0.37 * rank - (value >> 13) % 7 / 50) for rank, token in enumerate(order[:count])]


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
    block_ids: list[list[int]]
    num_computed: int
    choice_index: int
    num_logprobs: int | None


class FakeRunner:
    """Keeps sequences as the real runner does and checks every message against them.

    Its KV memory holds, in each slot of each block, a hash of all tokens up to there: so a block that was
    shared, copied, reused or forgotten wrongly is found by the first sequence that attends to it.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.windows = windows
        self.slots: dict[int, _Slot] = {}
        self.memory: dict[int, dict[int, tuple[int, int]]] = {}
        self.written: set[tuple[int, int]] = set()
        self.batches: list[ScheduledBatch] = []

    def step(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        self.written.clear()
        assert 0 < batch.num_tokens <= self.max_num_batched_tokens
        for slot in batch.finished_slots:
            self.slots.pop(slot, None)
        for new in batch.new_sequences:
            assert new.slot not in self.slots, "a slot is in use"
            self.slots[new.slot] = _Slot(
                new.sequence_id,
                list(new.token_ids),
                [list(blocks) for blocks in new.block_ids],
                new.num_computed_tokens,
                new.choice_index,
                new.num_logprobs,
            )
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        self._copy(batch.block_copies)
        for row in batch.rows:
            self._advance(row)
        for row in batch.rows:
            self._check_context(self.slots[row.slot])
        output = StepOutput([], [], [])
        slot_of = {state.sequence_id: slot for slot, state in self.slots.items()}
        for output_row in batch.output_rows:
            row = self.slots[batch.rows[output_row.row].slot]
            state = self.slots[slot_of[output_row.sequence_id]]
            assert state.token_ids == row.token_ids, "an output row of another sequence's tokens"
            assert row.num_computed == len(row.token_ids)
            state.num_computed = row.num_computed
            output.token_ids.append([next_token(state.token_ids, state.choice_index)])
            output.logprobs.append(self._logprobs(state))
            output.errors.append(None)
        return output

    def _logprobs(self, state: _Slot) -> list[TokenLogprobs] | None:
        if state.num_logprobs is None:
            return None
        top = ranked_tokens(state.token_ids, state.num_logprobs)
        return [TokenLogprobs(-0.5, 1, [token for token, _ in top], [logprob for _, logprob in top])]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        contents = [dict(self.memory.get(source, {})) for source, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            self.memory[destination] = content

    def _advance(self, row) -> None:
        """Write the chunk into its blocks: what a position holds is all tokens up to there."""
        state = self.slots[row.slot]
        state.token_ids += row.new_token_ids
        for group, first, block_ids in row.block_updates:
            assert first <= len(state.block_ids[group])
            state.block_ids[group][first:] = block_ids
        assert row.num_computed_tokens == state.num_computed
        assert row.num_tokens > 0
        end = state.num_computed + row.num_tokens
        assert end <= len(state.token_ids)
        for position in range(state.num_computed, end):
            for group, blocks in enumerate(state.block_ids):
                block = blocks[position // self.block_size]
                assert block >= 0
                where = (block, position % self.block_size)
                assert where not in self.written, "two sequences write one slot"
                self.written.add(where)
                content = self.memory.setdefault(block, {})
                content[position % self.block_size] = (group, hash(tuple(state.token_ids[: position + 1])))
        state.num_computed = end

    def _check_context(self, state: _Slot) -> None:
        """Everything that the sequence attends to is what it should be, whoever wrote it."""
        for group, (blocks, window) in enumerate(zip(state.block_ids, self.windows, strict=True)):
            first = 0 if window is None else max(state.num_computed - window, 0)
            for position in range(first, state.num_computed):
                found = self.memory[blocks[position // self.block_size]].get(position % self.block_size)
                assert found == (group, hash(tuple(state.token_ids[: position + 1]))), (
                    f"position {position} of {state.token_ids} reads another content"
                )


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
