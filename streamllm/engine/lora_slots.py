"""Which adapters are in the runner's slots, and which sequences wait for one.

At most as many different adapters run at once as there are slots. A slot belongs to an adapter while any of
its sequences runs; after that the adapter stays until its place is needed, the least recently used going
first. Sequences whose adapter finds no slot are set aside, so that whoever is behind them and can run does.
They are not starved: when :data:`MAX_PASSES` later ones have started in the slots that are taken, one slot
takes no new requests from behind them, and so becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamllm.engine.request import SequenceStatus
from streamllm.runner.messages import LoraLoad

if TYPE_CHECKING:
    from streamllm.engine.request import Sequence
    from streamllm.engine.wait_queue import WaitQueue
    from streamllm.ops.lora import LoraAdapter

MAX_PASSES = 64
"""Sequences that may start with a loaded adapter before one that came earlier and waits for a slot."""


class LoraSlots:
    """
    Args:
        num_slots: adapters that may be loaded at once; 0 if no request has one.
        waiting: the scheduler's queue, in which sequences are set aside under their adapter's content.
    """

    def __init__(self, num_slots: int, waiting: WaitQueue) -> None:
        self._waiting = waiting
        self._slot_of: dict[bytes, int] = {}
        self._contents: list[bytes | None] = [None] * num_slots
        self._num_users = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # Contents of the slots that nobody uses, the least recently used first.
        self._idle: dict[bytes, None] = {}
        self._loads: dict[int, LoraAdapter | None] = {}
        self._num_passes: dict[bytes, int] = {}
        self._overdue: Sequence | None = None
        self._draining: int | None = None

    # -- who may start -------------------------------------------------------------------------------------

    @property
    def num_parked(self) -> int:
        """Sequences set aside until there is a slot for their adapter."""
        return self._waiting.num_parked

    def call_back(self) -> None:
        """Before a step takes sequences in: put those back into the queue that may find a slot now."""
        if self._overdue is not None and not self._waits_for_slot(self._overdue):
            self._overdue = self._draining = None
        if not self._waiting.has_parked:
            return
        room = len(self._free) + len(self._idle)
        for content, first in self._waiting.parked():
            slot = self._slot_of.get(content)
            if slot is None and room > 0:
                room -= 1
                self._waiting.unpark(content)
            elif slot is not None and slot != self._draining:
                self._waiting.unpark(content)
            elif slot is None and self._overdue is None:
                self._drain_for(first, self._num_passes.get(content, 0))

    def admits(self, sequence: Sequence) -> bool:
        """Whether the sequence that is served next has a slot, or may take one; if not it is set aside."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self._slot_of.get(adapter.content)
        # What has begun goes on, whoever is overdue: beams wait for one another.
        gives_way = (
            self._overdue is not None and self._overdue.key < sequence.key and not sequence.request.admitted
        )
        if slot is None:
            fits = len(self._free) + len(self._idle) > gives_way
        else:
            fits = not (gives_way and slot == self._draining)
        if not fits:
            self._waiting.park(adapter.content)
        return fits

    def _waits_for_slot(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        assert adapter is not None
        return sequence.status is SequenceStatus.WAITING and adapter.content not in self._slot_of

    def _drain_for(self, sequence: Sequence, num_passes: int) -> None:
        if num_passes >= MAX_PASSES:
            self._overdue = sequence
            self._draining = min(range(len(self._num_users)), key=self._num_users.__getitem__)

    def _count_pass(self, sequence: Sequence) -> None:
        """A sequence starts in a slot that its adapter had: who was first of those that wait for one is
        passed if it came earlier."""
        for content, first in self._waiting.parked():
            if content not in self._slot_of:
                if first.key < sequence.key:
                    self._num_passes[content] = self._num_passes.get(content, 0) + 1
                return

    # -- who runs ------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """A sequence starts: its ``lora_slot`` is its adapter's until :meth:`leave`. There must be one, as
        :meth:`admits` says, or as another sequence of the same request has it."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        slot = self._slot_of.get(adapter.content)
        if slot is None:
            slot = self._load(adapter)
        else:
            self._idle.pop(adapter.content, None)
            if self._waiting.has_parked:
                self._count_pass(sequence)
        self._num_users[slot] += 1
        sequence.lora_slot = slot

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended or was preempted, and no step in flight has it."""
        slot = sequence.lora_slot
        if slot < 0:
            return
        sequence.lora_slot = -1
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            content = self._contents[slot]
            if content is None:
                self._free.append(slot)
            else:
                self._idle[content] = None

    def _load(self, adapter: LoraAdapter) -> int:
        """The slot that an adapter gets: an empty one, or that of the least recently used."""
        if not self._free:
            self._empty(next(iter(self._idle)))
        slot = self._free.pop()
        self._slot_of[adapter.content] = slot
        self._contents[slot] = adapter.content
        self._loads[slot] = adapter
        self._num_passes.pop(adapter.content, None)
        self._waiting.unpark(adapter.content)
        return slot

    def _empty(self, content: bytes) -> int:
        slot = self._slot_of.pop(content)
        del self._idle[content]
        self._contents[slot] = None
        self._free.append(slot)
        return slot

    # -- what is in the slots ------------------------------------------------------------------------------

    def take_loads(self) -> list[LoraLoad]:
        """What the runner must load with the next step, at most one adapter a slot."""
        loads, self._loads = self._loads, {}
        return [LoraLoad(slot, adapter) for slot, adapter in loads.items()]

    def distrust(self, slots: Iterable[int]) -> None:
        """The step failed that was to load these slots: what is in them is not known."""
        for slot in slots:
            content = self._contents[slot]
            if content in self._idle:
                self._empty(content)
            elif content is not None:
                del self._slot_of[content]
                self._contents[slot] = None

    def drop(self, content: bytes) -> None:
        """Let go of an adapter that nobody will ask for again, unless it is in use."""
        if content in self._idle:
            self._loads[self._empty(content)] = None
