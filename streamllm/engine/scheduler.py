"""Which tokens each step computes: continuous batching with one token budget.

There are no prefill and decode phases. A sequence has tokens that are not computed yet: many for a new
prompt, one for a sequence that generates. Each step hands out ``max_num_batched_tokens``, to decodes first,
so that they always advance, then to prompts, which are cut into chunks that fill the budget (Orca, OSDI 2022;
Sarathi-Serve, OSDI 2024). Prompts in progress share the budget evenly and leave a share for newcomers, so
that neither a long prompt starves short ones nor the other way round.

Plain data structures: neither torch nor asyncio, so that a test can step it a million times.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from streamllm.engine import beam_group, embedding, prompt_logprobs, run_ahead
from streamllm.engine.batch_maker import BatchMaker
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.debug import check_blocks
from streamllm.engine.events import EventLog
from streamllm.engine.lora_slots import LoraSlots
from streamllm.engine.request import Request, Sequence, SequenceStatus, SequenceUpdate, ending
from streamllm.engine.step import InFlight, Limits, PrefixCacheCounters, Step
from streamllm.engine.wait_clock import WaitReason
from streamllm.engine.wait_queue import WaitQueue
from streamllm.runner.messages import ScheduledBatch, StepOutput, TokenLogprobs

MAX_HELD_BACK = 64
"""Sequences that a step looks past, at most, to find one that can start."""


class Scheduler:
    """First come, first served, or by priority (lower first, ties by arrival). Out of blocks, the sequence
    that would be served last is preempted, and recomputed later.

    Args:
        pool: the KV blocks. It must hold at least one sequence of the longest length that is admitted, so
            that the first in order can always run to its end.
        limits: sizes of steps and batch.
        events: where to note what happens.
        debug: check every block's owners and generation in every step.
    """

    def __init__(
        self, pool: BlockPool, limits: Limits, *, events: EventLog | None = None, debug: bool = False
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.events = events or EventLog()
        self.num_preemptions = 0
        self.prefix_cache = PrefixCacheCounters()
        self._debug = debug
        self._watermark_blocks = max(int(limits.watermark * pool.num_blocks), 1)
        self._waiting = WaitQueue()
        self._running: list[Sequence] = []
        self._num_pending = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.lora_slots = LoraSlots(limits.max_loras, self._waiting)
        self._batches = BatchMaker(self._fork_siblings, self.lora_slots)
        self._in_flight = self._batches.in_flight
        self._short_of_blocks = False
        self._blocked: tuple[Sequence, int] | None = None
        self._last_sequence_id = 0

    # -- what others may ask -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, siblings of a prompt that is still computed included."""
        return len(self._waiting) + self._num_pending

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def wait_reason(self) -> WaitReason | None:
        """What keeps the head of the queue from starting, unless it is the token budget."""
        if self._waiting.peek() is None:
            return "lora_slots" if self._waiting else None
        if not self._free_slots:
            return "slots"
        return "kv_blocks" if self._short_of_blocks or self._is_blocked() else "prompts_in_progress"

    def in_flight(self, batch: ScheduledBatch) -> InFlight:
        """The sequences of a step that has not returned."""
        return self._in_flight[batch.step]

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that runs or waits, running ones first."""
        yield from self._running
        yield from self._waiting

    def _holders(self) -> Iterator[Sequence]:
        """Every sequence that holds blocks: one that has ended does until its steps have returned."""
        yield from self.sequences()
        for in_flight in self._in_flight.values():
            yield from in_flight.rows
            yield from in_flight.outputs

    # -- requests come and go ------------------------------------------------------------------------------

    def new_sequence_id(self) -> int:
        """Sequences are numbered in order of arrival."""
        self._last_sequence_id += 1
        return self._last_sequence_id

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt is computed once, by its first sequence; the others are forked then."""
        leader, *siblings = request.sequences
        if self.limits.queue_depth > 1:
            run_ahead.allow(request)
        self._waiting.push(leader)
        for sibling in siblings:
            sibling.status = SequenceStatus.PENDING
        self._num_pending += len(siblings)
        num_tokens = len(request.prompt_token_ids)
        request.metrics.queued_time = self.events.record("queued", request.request_id, num_tokens)

    def finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence now, at any time. Blocks that steps in flight use are freed when they return."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._num_pending -= 1
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if not sequence.in_flight:
            self._release(sequence)

    # -- a step --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """The next step's work, or ``None`` if there is none, or none before the steps in flight return.

        Steps are computed in the order of their batches, and :meth:`update` takes them in that order.
        """
        if self._short_of_blocks and self._in_flight:
            return None  # somebody is to be preempted, which must not hit a step in flight
        step = self._plan_step()
        self._short_of_blocks = step.short_of_blocks and bool(self._in_flight)
        while not step.chunks and self._running and not self._in_flight:
            # Beam groups wait for each other's slots or blocks: the one that is served last gives way.
            self._preempt(step, self._running[-1])
            step = self._plan_step()
        if not step.chunks:
            return None
        if step.budget > 0 and step.num_partial_prefills:
            self._extend_prefills(step)
        batch = self._batches.make(step)
        if self._debug:
            check_blocks(self.pool, self._holders())
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[SequenceUpdate]:
        """Take in what a step gave: append tokens, end sequences by id or length, free what is done with."""
        in_flight = self._land(batch)
        updates = embedding.land(self, in_flight, output.pooled)
        updates += prompt_logprobs.land(self, in_flight, output.prompt_logprobs)
        for sequence, token_ids, logprobs, error in zip(
            in_flight.outputs, output.token_ids, output.logprobs, output.errors, strict=True
        ):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if error is not None:
                self.finish(sequence, "error")
                updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=error))
            elif sequence.request.beams is not None:
                assert logprobs is not None
                updates.extend(beam_group.report(self, sequence, logprobs[0]))
            else:
                updates.append(self._append(sequence, token_ids, logprobs))
        return updates

    def fail_step(self, batch: ScheduledBatch, error: str) -> list[SequenceUpdate]:
        """A step raised: every sequence in it ends with an error, and nothing that it wrote is kept. So it
        is with the steps behind it, which may read what it should have written: when they return,
        :meth:`drop_step` takes them."""
        failed = [in_flight for number, in_flight in self._in_flight.items() if number >= batch.step]
        self._land(batch)
        updates = []
        for in_flight in failed:
            self.pool.withdraw(in_flight.registered)
            self.lora_slots.distrust(in_flight.lora_slots)
            for sequence in dict.fromkeys(in_flight.rows + in_flight.outputs):
                if sequence.status is not SequenceStatus.FINISHED:
                    self.finish(sequence, "error")
                    updates.append(SequenceUpdate(sequence, [], finish_reason="error", error=error))
        return updates

    def drop_step(self, batch: ScheduledBatch) -> None:
        """A step has returned whose sequences have all ended with a step before it."""
        self._land(batch)

    def _plan_step(self) -> Step:
        step = Step(budget=self.limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.short_of_blocks:
            # Admission would hand the blocks that a preemption frees straight back.
            self._admit_waiting(step)
        return step

    # -- running sequences ---------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> None:
        """Give running sequences their tokens: decodes one each, prompts an even share of the rest."""
        running = self._running
        num_decodes = sum(
            1 for s in running if len(s.token_ids) + s.num_pending_tokens - s.num_computed_tokens == 1
        )
        newcomers = 1 if self._waiting and self._free_slots else 0
        share = self.limits.prefill_share(step.budget - num_decodes, len(running) - num_decodes + newcomers)
        index = 0
        while index < len(running):
            sequence = running[index]
            known = len(sequence.token_ids) + sequence.num_pending_tokens
            uncomputed = known - sequence.num_computed_tokens
            # A beam that waits for the others of its group, or one whose next token is not known, has none.
            if uncomputed > 0:
                chunk = 1 if uncomputed == 1 else min(uncomputed, share)
                if self._make_room(step, sequence, chunk):
                    self._take(step, sequence, chunk)
                elif sequence.status is not SequenceStatus.RUNNING:
                    # A beam group may have been preempted with members before this one.
                    index = min(index, len(running))
                    continue
            index += 1

    def _make_room(self, step: Step, sequence: Sequence, chunk: int) -> bool:
        """Blocks for a running sequence's chunk, preempting whoever is served last; ``False`` if that was
        the sequence itself, or if there are none and steps are in flight: then nobody is preempted.

        A sequence that grows beyond the limits' ``restart_length`` is preempted, to be recomputed."""
        blocks, computed = sequence.blocks, sequence.num_computed_tokens
        if self.limits.starts_over(sequence, computed + chunk):
            if self._in_flight:
                step.short_of_blocks = True
            else:
                self._preempt(step, sequence)
            return False
        if chunk == 1 and not blocks.forked and computed % self.pool.block_size:
            return True
        # A step in flight may still read what is dropped; who gets it writes to it in a later one.
        blocks.drop_outside_window(computed)
        while (copies := blocks.grow(computed + chunk, computed)) is None:
            step.short_of_blocks = True
            if self._in_flight:
                return False
            self._preempt(step, self._running[-1])
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        step.copies.extend(copies)
        return True

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """Back into the queue, to be recomputed; its tokens stay. A beam group goes as a whole."""
        members = victim.request.sequences if victim.request.beams is not None else [victim]
        for sequence in members:
            if sequence.status is SequenceStatus.RUNNING:
                self._running.remove(sequence)
            elif sequence.status is SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            else:
                continue
            step.take_back(sequence, self.pool)
            self.events.record("preempted", sequence.request.request_id, sequence.num_computed_tokens)
            self._release(sequence)
            sequence.num_computed_tokens = 0
            if self.limits.starts_over(sequence, len(sequence.token_ids)):
                sequence.start_over(self.pool.block_size)
            sequence.status = SequenceStatus.WAITING
            self._waiting.push(sequence)
        victim.request.beam_reports.clear()
        victim.request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    # -- waiting sequences ---------------------------------------------------------------------------------

    def _admit_waiting(self, step: Step) -> None:
        self.lora_slots.call_back()
        if not self._waiting or self._is_blocked():
            return
        promised = step.promised_blocks(self._blocks_to_come)
        held_back: list[Sequence] = []
        num_too_long = 0
        while step.budget > 0 and self._free_slots:
            sequence = self._waiting.peek()
            if sequence is None or len(held_back) > MAX_HELD_BACK:
                break
            if not self.lora_slots.admits(sequence):
                continue
            if step.computes_prefix_of(sequence, self.pool.block_size):
                held_back.append(self._waiting.pop())
                continue
            adopted = self._adopt_prefix(sequence)
            needed = self._blocks_to_come(sequence, sequence.num_computed_tokens)
            if needed + promised + self._watermark(sequence) > self.pool.num_free:
                self._put_back_prefix(sequence, adopted)
                self._blocked = (sequence, self.pool.num_free)
                break
            chunk = self.limits.first_chunk(
                sequence.num_uncomputed_tokens, step.budget, step.num_partial_prefills
            )
            if chunk == 0:
                # It would be one prompt in progress too many; shorter ones behind it may pass.
                self._put_back_prefix(sequence, adopted)
                held_back.append(self._waiting.pop())
                num_too_long += 1
                if num_too_long > self.limits.max_num_partial_prefills:
                    break
                continue
            computed = sequence.num_computed_tokens
            step.copies.extend(sequence.blocks.grow(computed + chunk, computed) or [])
            promised += self._blocks_to_come(sequence, computed + chunk)
            self._waiting.pop()
            self._start(sequence)
            self._take(step, sequence, chunk)
        for sequence in held_back:
            self._waiting.push(sequence)

    def _is_blocked(self) -> bool:
        """Whether the next in the queue found too few blocks, and no more are free since: looking up a long
        prefix in vain at every step would cost milliseconds."""
        if self._blocked is None or not self._running:
            return False
        sequence, num_free = self._blocked
        return self._waiting.peek() is sequence and self.pool.num_free <= num_free

    def _watermark(self, sequence: Sequence) -> int:
        """Blocks that stay free beyond what a newcomer needs, so that its admission does not soon preempt
        it or others: half of the running sequences, and all of its choices, are about to take one more."""
        request = sequence.request
        # The first sequence and the beams of a group that runs already must get in.
        if not self._running or (request.beams is not None and request.admitted):
            return 0
        siblings = 0 if request.admitted else len(request.sequences) - 1
        return max(self._watermark_blocks, len(self._running) // 2) + siblings

    def _blocks_to_come(self, sequence: Sequence, num_computed: int) -> int:
        """Blocks that a sequence takes until all its present tokens are computed."""
        return sequence.blocks.blocks_promised(
            len(sequence.token_ids), num_computed, self.limits.max_num_batched_tokens
        )

    def _adopt_prefix(self, sequence: Sequence) -> int:
        """Hold what the prefix cache has of a waiting sequence; returns the number of tokens."""
        if not sequence.block_hashes or sequence.num_computed_tokens:
            return 0
        size = self.pool.block_size
        max_blocks = sequence.num_adoptable_tokens // size
        adopted = size * sequence.blocks.adopt_prefix(sequence.block_hashes, max_blocks)
        sequence.num_computed_tokens = adopted
        self._waiting.num_tokens -= adopted
        return adopted

    def _put_back_prefix(self, sequence: Sequence, adopted: int) -> None:
        if adopted:
            sequence.blocks.release()
            sequence.num_computed_tokens = 0
            self._waiting.num_tokens += adopted

    def _start(self, sequence: Sequence) -> None:
        self._run(sequence)
        request, metrics = sequence.request, sequence.request.metrics
        now = self.events.record("scheduled", request.request_id, sequence.num_computed_tokens)
        if metrics.first_token_time is None:
            metrics.last_scheduled_time = now
        if not request.admitted:
            request.admitted = True
            request.num_cached_tokens = sequence.num_computed_tokens
            metrics.first_scheduled_time = now
            self.prefix_cache.count(request)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self._batches.enter(sequence)
        insort(self._running, sequence, key=attrgetter("key"))

    # -- what a step takes ---------------------------------------------------------------------------------

    def _take(self, step: Step, sequence: Sequence, chunk: int) -> None:
        """Note a chunk whose blocks are there; full blocks can be shared from now on, since every layer
        writes all of the step's K and V before it attends."""
        computed = sequence.num_computed_tokens
        end = sequence.num_computed_tokens = computed + chunk
        step.budget -= chunk
        step.chunks.append((sequence, chunk))
        if end < len(sequence.token_ids):
            step.num_partial_prefills += 1
        size = self.pool.block_size
        if end // size != computed // size:
            step.registered += sequence.register_blocks(computed, end, size)

    def _extend_prefills(self, step: Step) -> None:
        """What newcomers left of the budget goes to prompts in progress, in order of service."""
        threshold = self.limits.long_prefill_token_threshold
        for index, (sequence, chunk) in enumerate(step.chunks):
            computed = sequence.num_computed_tokens
            uncomputed = len(sequence.token_ids) - computed
            more = min(uncomputed, step.budget, threshold - chunk if threshold else uncomputed)
            if more <= 0:
                continue
            sequence.blocks.drop_outside_window(computed - chunk)
            copies = sequence.blocks.grow(computed + more, computed)
            if copies is None:
                return
            step.copies.extend(copies)
            step.budget -= more
            sequence.num_computed_tokens = computed + more
            step.chunks[index] = (sequence, chunk + more)
            step.registered += sequence.register_blocks(computed, computed + more, self.pool.block_size)

    def _fork_siblings(self, leader: Sequence) -> Iterator[Sequence]:
        """The prompt will be computed when this step returns: its siblings draw their first token from the
        same row. Those that find no slot queue for themselves (and find the prompt in the prefix cache)."""
        if not self._num_pending:
            return
        for sibling in leader.request.sequences:
            if sibling.status is not SequenceStatus.PENDING:
                continue
            self._num_pending -= 1
            sibling.block_hashes = list(leader.block_hashes)
            if not self._free_slots:
                sibling.status = SequenceStatus.WAITING
                self._waiting.push(sibling)
                continue
            sibling.blocks = leader.blocks.fork()
            sibling.num_computed_tokens = leader.num_computed_tokens
            sibling.num_pending_tokens = leader.num_pending_tokens
            self._run(sibling)
            yield sibling

    # -- after a step --------------------------------------------------------------------------------------

    def _land(self, batch: ScheduledBatch) -> InFlight:
        """A step has returned: what it used and is done with can be freed."""
        in_flight = self._in_flight.pop(batch.step)
        for sequence in in_flight.land():
            self._release(sequence)
        return in_flight

    def _append(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> SequenceUpdate:
        update = SequenceUpdate(sequence, token_ids, logprobs)
        ran_ahead = sequence.num_pending_tokens
        if ran_ahead:
            sequence.num_pending_tokens -= 1
        for count, token_id in enumerate(token_ids, start=1):
            sequence.token_ids.append(token_id)
            end = ending(sequence, token_id)
            if end is not None:
                update.finish_reason, update.stop_reason, update.ended_by_id = end
                update.token_ids = token_ids[:count]
                self.finish(sequence, end.finish_reason, end.stop_reason)
                break
        if ran_ahead:
            self._register_known(sequence)
        return update

    def _register_known(self, sequence: Sequence) -> None:
        """The last token of a block may be known only now, while a step in flight computes it."""
        length, size = len(sequence.token_ids), self.pool.block_size
        if length % size == 0 and sequence.in_flight:
            newest = next(reversed(self._in_flight.values()))
            newest.registered += sequence.register_blocks(length - 1, length, size)

    def _release(self, sequence: Sequence) -> None:
        sequence.blocks.release()
        self._batches.leave(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def start_fork(self, sequence: Sequence) -> None:
        """Let a beam's fork run; without a free slot it waits, and keeps its blocks."""
        if self._free_slots:
            self._run(sequence)
        else:
            sequence.status = SequenceStatus.WAITING
            self._waiting.push(sequence)
