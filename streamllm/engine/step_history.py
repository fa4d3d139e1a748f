"""The engine's last steps: when each of their phases began and ended, and what they computed.

The latest are kept one by one, those before them in spans of :data:`SPAN` steps. A request's steps are looked
up here by time when somebody asks, so that no request costs a step anything.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

SPAN = 64
"""Steps that become one span."""

PHASES = ("schedule", "submit", "mask", "wait", "update", "deliver")
"""What a step does on the event loop: choose what it computes; hand that to the executor; fill the masks of
grammars; wait for the forward and the sampled tokens; take them in; turn them into text and pass it to the
streams (while the next step runs, if there is one)."""


@dataclass(slots=True)
class StepRecord:
    """One step. Times are seconds of ``time.monotonic()``, 0 where it has not come that far.

    Attributes:
        number: the batch's.
        num_sequences: rows of the batch.
        num_tokens: tokens computed, those of prompts included.
        num_prompt_tokens: of them, those of prompts, and those recomputed after a preemption.
        num_running, num_waiting: sequences in the batch and in the queue when it was scheduled.
        num_used_blocks: KV blocks held then.
        began, scheduled: when its scheduling began and was done.
        submitted: when the executor had it.
        mask_began, masked: around the filling of masks.
        wait_began, returned: when the loop began to wait for it, and it came back.
        updated: when its tokens had been taken in.
        deliver_began, delivered: around the delivery of its tokens.
        failed: it raised, or a step before it did.
    """

    number: int
    num_sequences: int
    num_tokens: int
    num_prompt_tokens: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    began: float
    scheduled: float
    submitted: float = 0.0
    mask_began: float = 0.0
    masked: float = 0.0
    wait_began: float = 0.0
    returned: float = 0.0
    updated: float = 0.0
    deliver_began: float = 0.0
    delivered: float = 0.0
    failed: bool = False

    @property
    def phases(self) -> tuple[tuple[float, float], ...]:
        """(beginning, end) of each of :data:`PHASES`."""
        return (
            (self.began, self.scheduled),
            (self.scheduled, self.submitted),
            (self.mask_began, self.masked),
            (self.wait_began, self.returned),
            (self.returned, self.updated),
            (self.deliver_began, self.delivered),
        )


@dataclass(slots=True)
class Delivery:
    """What one delivery handed to the streams.

    Attributes:
        time: when, in seconds of ``time.monotonic()``.
        gaps: when a sequence had its token before -> how many sequences that had one then have got another.
        first_tokens: seconds from the arrival of requests to the first token, which they have got.
    """

    time: float
    gaps: defaultdict[float, int] = field(default_factory=lambda: defaultdict(int))
    first_tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step or several, one after the other.

    Attributes:
        start, end: from the first one's scheduling to the last one's return, ``time.monotonic()``.
        num_steps: how many.
        num_sequences, num_tokens, num_prompt_tokens: their sums of what :class:`StepRecord` says.
        seconds: together, from when each was scheduled (or the one before it had returned) to its return.
    """

    start: float
    end: float
    num_steps: int
    num_sequences: int
    num_tokens: int
    num_prompt_tokens: int
    seconds: float


StepObserver = Callable[[StepRecord, Delivery], None]


class StepHistory:
    """
    Args:
        size: steps kept one by one.
        num_spans: spans kept of steps before these.

    Attributes:
        latest: the last steps whose tokens have been delivered, the oldest first.
    """

    def __init__(self, size: int = 4096, num_spans: int = 4096) -> None:
        self.latest: deque[StepRecord] = deque(maxlen=size)
        self._spans: deque[StepSpan] = deque(maxlen=num_spans)
        self._undone: list[StepRecord] = []
        self._observers: list[StepObserver] = []

    def on_step(self, observer: StepObserver) -> None:
        """Call ``observer`` with every step from now on, when its tokens have been delivered."""
        self._observers.append(observer)

    def add(self, record: StepRecord, delivery: Delivery) -> None:
        """Keep a step that is done with."""
        self.latest.append(record)
        self._undone.append(record)
        if len(self._undone) == SPAN:
            self._spans.append(_span_of(self._undone))
            self._undone = []
        for observer in self._observers:
            observer(record, delivery)

    def spans(self, start: float, end: float, limit: int = 200) -> list[StepSpan]:
        """The steps that ran between two times, as at most ``limit`` spans of about as many steps each.

        Args:
            start, end: seconds of ``time.monotonic()``.
        """
        oldest = self.latest[0].began if self.latest else end
        spans = [s for s in self._spans if s.end <= oldest and s.end > start and s.start < end]
        spans += [s for s in _spans_of(self.latest) if s.end > start and s.start < end]
        size = -(-len(spans) // limit) or 1
        return [_joined(spans[first : first + size]) for first in range(0, len(spans), size)]


def _span_of(records: Sequence[StepRecord], free_at: float = 0.0) -> StepSpan:
    """Records as one span.

    Args:
        free_at: when the step before them had returned.
    """
    seconds = 0.0
    for record in records:
        seconds += record.returned - (record.began if record.began > free_at else free_at)
        free_at = record.returned
    return StepSpan(
        start=records[0].began,
        end=free_at,
        num_steps=len(records),
        num_sequences=sum([record.num_sequences for record in records]),
        num_tokens=sum([record.num_tokens for record in records]),
        num_prompt_tokens=sum([record.num_prompt_tokens for record in records]),
        seconds=seconds,
    )


def _spans_of(records: Iterable[StepRecord]) -> list[StepSpan]:
    spans: list[StepSpan] = []
    for record in records:
        spans.append(_span_of([record], spans[-1].end if spans else 0.0))
    return spans


def _joined(spans: Sequence[StepSpan]) -> StepSpan:
    return StepSpan(
        start=spans[0].start,
        end=spans[-1].end,
        num_steps=sum(span.num_steps for span in spans),
        num_sequences=sum(span.num_sequences for span in spans),
        num_tokens=sum(span.num_tokens for span in spans),
        num_prompt_tokens=sum(span.num_prompt_tokens for span in spans),
        seconds=sum(span.seconds for span in spans),
    )
