"""An executor without a model: the next token is a hash of all tokens before it.

The scheduler, the engine and the server see what a real model gives them: deterministic tokens that depend on
the whole context and on nothing else. The executor keeps its own copy of every sequence from the incremental
messages alone, and fails loudly if a message contradicts it, so that each test also checks the protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_adapter import choice_of, read_fake_adapter

from streamllm.ops.lora import LoraAdapter
from streamllm.outputs import Logprob
from streamllm.runner.messages import PromptLogprobChunk, ScheduledBatch, StepOutput, TokenLogprobs
from streamllm.runner.pooler import Pooler

VOCAB_SIZE = 256
HIDDEN_SIZE = 6


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


def prompt_logprob(token_ids: list[int], position: int) -> float:
    """What the fake model says of a prompt's token, given what stands before it."""
    value = 14695981039346656037
    for token_id in token_ids[: position + 1]:
        value = (value ^ token_id) * 1099511628211 % 2**64
    return -(value % 1000) / 100


def prompt_chunk(token_ids: list[int], first: int, end: int, count: int) -> PromptLogprobChunk:
    """Logprobs of the tokens at ``[first, end)`` with ``count`` candidates each."""
    ranked = [ranked_tokens(token_ids[:position], count) for position in range(first, end)]
    return PromptLogprobChunk(
        first=first,
        logprobs=np.array(
            [prompt_logprob(token_ids, position) for position in range(first, end)], np.float32
        ),
        ranks=np.full(end - first, count + 1, np.int32),
        top_ids=np.array([[token for token, _ in top] for top in ranked], np.int32).reshape(
            end - first, count
        ),
        top_logprobs=np.array([[value for _, value in top] for top in ranked], np.float32).reshape(
            end - first, count
        ),
    )


def expected_prompt_logprobs(token_ids: list[int], count: int) -> list[dict[int, Logprob] | None]:
    """What a request with ``prompt_logprobs=count`` must return."""
    entries: list[dict[int, Logprob] | None] = [None]
    chunk = prompt_chunk(token_ids, 1, len(token_ids), count)
    text_of = ByteTokenizer().token_text
    for position in range(1, len(token_ids)):
        token_id = token_ids[position]
        entry = {token_id: Logprob(float(chunk.logprobs[position - 1]), count + 1, text_of(token_id))}
        for rank in range(count):
            candidate = int(chunk.top_ids[position - 1, rank])
            value = float(chunk.top_logprobs[position - 1, rank])
            entry.setdefault(candidate, Logprob(value, rank + 1, text_of(candidate)))
        entries.append(entry)
    return entries


def hidden_state(token_ids: list[int]) -> np.ndarray:
    """The hidden state of the last of ``token_ids``: float32 ``[HIDDEN_SIZE]``, never zero."""
    value = 14695981039346656037
    for token_id in token_ids:
        value = (value ^ token_id) * 1099511628211 % 2**64
    return np.array([(value >> 8 * part) % 251 - 125.5 for part in range(HIDDEN_SIZE)], np.float32)


@dataclass
class _Slot:
    """A sequence as the messages tell it, and what has been drawn for it, by position: a step may go on from
    a token before the messages bring it."""

    sequence_id: int
    token_ids: list[int]
    block_ids: list[list[int]]
    num_computed: int
    choice_index: int
    num_logprobs: int | None
    lora_slot: int
    adapter: bytes | None
    drawn: dict[int, int] = field(default_factory=dict)
    assumed: dict[int, int] = field(default_factory=dict)

    def hear_of(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            assumed = self.assumed.pop(len(self.token_ids), token_id)
            assert token_id == assumed, "a step went on from another token"
            self.token_ids.append(token_id)

    def first(self, length: int) -> list[int]:
        """The leading tokens: those it has heard of, then those drawn."""
        for position in range(len(self.token_ids), length):
            self.assumed[position] = self.drawn[position]
        unheard = [self.drawn[position] for position in range(len(self.token_ids), length)]
        return self.token_ids[:length] + unheard


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
        self.adapters: dict[int, LoraAdapter] = {}
        self.memory: dict[int, dict[int, tuple[int, int]]] = {}
        self.written: set[tuple[int, int]] = set()
        self.batches: list[ScheduledBatch] = []
        self.num_drawn: Counter[int] = Counter()
        self.max_adapters = 0
        self.pooler = Pooler()

    def step(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        self.written.clear()
        assert 0 < batch.num_tokens <= self.max_num_batched_tokens
        for slot in batch.finished_slots:
            self.slots.pop(slot, None)
        self.pooler.forget(batch.finished_slots)
        self._load(batch)
        for new in batch.new_sequences:
            assert new.slot not in self.slots, "a slot is in use"
            self.slots[new.slot] = _Slot(
                new.sequence_id,
                list(new.token_ids),
                [list(blocks) for blocks in new.block_ids],
                new.num_computed_tokens,
                new.choice_index,
                new.num_logprobs,
                new.lora_slot,
                None if new.lora_slot < 0 else self.adapters[new.lora_slot].content,
            )
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        self._copy(batch.block_copies)
        for row in batch.rows:
            self._check_adapter(self.slots[row.slot])
            self._advance(row)
        for row in batch.rows:
            self._check_context(self.slots[row.slot])
        output = StepOutput([], [], [])
        slot_of = {state.sequence_id: slot for slot, state in self.slots.items()}
        for output_row in batch.output_rows:
            row = self.slots[batch.rows[output_row.row].slot]
            state = self.slots[slot_of[output_row.sequence_id]]
            assert row.num_computed >= len(row.token_ids)
            token_ids = row.first(row.num_computed)
            assert state.first(row.num_computed) == token_ids, "an output row of another sequence's tokens"
            state.num_computed = row.num_computed
            choice = choice_of(state.adapter, state.choice_index)
            state.drawn[len(token_ids)] = token_id = self.draw(token_ids, choice)
            self.num_drawn[state.sequence_id] += 1
            output.token_ids.append([token_id])
            output.logprobs.append(self._logprobs(state, token_ids))
            output.errors.append(None)
        for prompt in batch.prompt_rows:
            row = batch.rows[prompt.row]
            end = prompt.first + len(prompt.token_ids)
            token_ids = self.slots[row.slot].token_ids
            assert token_ids[prompt.first : end] == prompt.token_ids and prompt.token_ids
            assert row.num_computed_tokens < prompt.first, "judged by a row that another step computed"
            assert end <= row.num_computed_tokens + row.num_tokens + 1
            output.prompt_logprobs.append(prompt_chunk(token_ids, prompt.first, end, prompt.num_logprobs))
        if batch.pool_rows:
            output.pooled = self._pool(batch)
        return output

    def draw(self, token_ids: list[int], choice_index: int) -> int:
        """The token that follows ``token_ids``."""
        return next_token(token_ids, choice_index)

    def _load(self, batch: ScheduledBatch) -> None:
        """A slot is loaded at most once a step, and never while a sequence of the batch has it."""
        slots = [load.slot for load in batch.lora_loads]
        assert len(set(slots)) == len(slots)
        for load in batch.lora_loads:
            assert all(state.lora_slot != load.slot for state in self.slots.values()), "a slot is in use"
            if load.adapter is None:
                del self.adapters[load.slot]
            else:
                self.adapters[load.slot] = load.adapter
        self.max_adapters = max(self.max_adapters, len({s.adapter for s in self.slots.values()} - {None}))

    def _check_adapter(self, state: _Slot) -> None:
        """What is in a sequence's slot is the adapter with which it began."""
        if state.adapter is not None:
            assert self.adapters[state.lora_slot].content == state.adapter

    def _pool(self, batch: ScheduledBatch) -> list[np.ndarray | str | None]:
        """By the real pooler, over the fake hidden states of the whole step."""
        start = np.cumsum([0] + [row.num_tokens for row in batch.rows])
        hidden = np.zeros((start[-1], HIDDEN_SIZE), np.float32)
        for pooled in batch.pool_rows:
            row = batch.rows[pooled.row]
            token_ids = self.slots[row.slot].token_ids
            for index in range(row.num_tokens):
                end = row.num_computed_tokens + index + 1
                hidden[start[pooled.row] + index] = hidden_state(token_ids[:end])
            assert pooled.complete == (end == len(token_ids))
        return self.pooler.pool(batch, start, hidden)

    def _logprobs(self, state: _Slot, token_ids: list[int]) -> list[TokenLogprobs] | None:
        if state.num_logprobs is None:
            return None
        top = ranked_tokens(token_ids, state.num_logprobs)
        return [TokenLogprobs(-0.5, 1, [token for token, _ in top], [logprob for _, logprob in top])]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        contents = [dict(self.memory.get(source, {})) for source, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            self.memory[destination] = content

    def _advance(self, row) -> None:
        """Write the chunk into its blocks: what a position holds is all tokens up to there."""
        state = self.slots[row.slot]
        state.hear_of(row.new_token_ids)
        for group, first, block_ids in row.block_updates:
            assert first <= len(state.block_ids[group])
            state.block_ids[group][first:] = block_ids
        assert row.num_computed_tokens == state.num_computed
        assert row.num_tokens > 0
        end = state.num_computed + row.num_tokens
        assert end <= len(state.token_ids) or row.num_tokens == 1
        token_ids = state.first(end)
        for position in range(state.num_computed, end):
            for group, blocks in enumerate(state.block_ids):
                block = blocks[position // self.block_size]
                assert block >= 0
                where = (block, position % self.block_size)
                assert where not in self.written, "two sequences write one slot"
                self.written.add(where)
                content = self.memory.setdefault(block, {})
                content[position % self.block_size] = (group, self._hash(state, token_ids, position))
        state.num_computed = end

    def _check_context(self, state: _Slot) -> None:
        """Everything that the sequence attends to is what it should be, whoever wrote it."""
        token_ids = state.first(state.num_computed)
        for group, (blocks, window) in enumerate(zip(state.block_ids, self.windows, strict=True)):
            first = 0 if window is None else max(state.num_computed - window, 0)
            for position in range(first, state.num_computed):
                found = self.memory[blocks[position // self.block_size]].get(position % self.block_size)
                assert found == (group, self._hash(state, token_ids, position)), (
                    f"position {position} of {token_ids} reads another content"
                )

    @staticmethod
    def _hash(state: _Slot, token_ids: list[int], position: int) -> int:
        """What K and V of a position depend on: the adapter, and all tokens up to there."""
        return hash((state.adapter, *token_ids[: position + 1]))


class FakeExecutor:
    """The executor's interface over :class:`FakeRunner`, with faults on request.

    A step is computed as it is submitted, and returns when those before it have.

    Args:
        step_seconds: how long a step takes.
        queue_depth: steps that may be in flight at once.

    Attributes:
        fail_next: what the next steps to return raise, one each.
    """

    def __init__(self, runner: FakeRunner, step_seconds: float = 0.0, queue_depth: int = 1) -> None:
        self.runner = runner
        self.step_seconds = step_seconds
        self.queue_depth = queue_depth
        self.fail_next: list[Exception] = []
        self.closed = False
        self.adapters_read: list[str] = []
        self.num_in_flight = 0
        self.free_at = 0.0

    def start(self, on_failure) -> None:
        self.on_failure = on_failure

    def prepare_processors(self, processors):
        return processors

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        self.adapters_read.append(path)
        return read_fake_adapter(name, path)

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        assert self.num_in_flight < self.queue_depth
        self.num_in_flight += 1
        return FakeStep(self, self.runner.step(batch))

    def close(self) -> None:
        self.closed = True


class FakeStep:
    """A step of :class:`FakeExecutor`."""

    def __init__(self, executor: FakeExecutor, output: StepOutput) -> None:
        self.exclusive = executor.queue_depth == 1
        self._executor = executor
        self._output = output
        self._done_at = executor.free_at = max(executor.free_at, time.monotonic()) + executor.step_seconds

    def sample(self, masks=None) -> None:
        pass

    async def output(self) -> StepOutput:
        executor = self._executor
        await asyncio.sleep(max(self._done_at - time.monotonic(), 0) if executor.step_seconds else 0)
        executor.num_in_flight -= 1
        if executor.fail_next:
            raise executor.fail_next.pop(0)
        return self._output
