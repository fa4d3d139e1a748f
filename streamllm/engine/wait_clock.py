"""How long the queue has waited for what: one running total a reason, whoever waits.

The queue is served in order, so what keeps its head from starting keeps all behind it: a request's time in
the queue, by reason, is how far the totals have moved on meanwhile. That costs a step one addition, however
many wait.
"""

from __future__ import annotations

from typing import Literal, get_args

WaitReason = Literal["next_step", "slots", "kv_blocks", "token_budget", "lora_slots", "prompts_in_progress"]
"""What the head of the queue waits for: the end of the step under way; one of the ``max_num_seqs`` places in
the batch; free KV blocks; room in the step's token budget; one of the ``max_loras`` slots for its adapter;
prompts in progress (too many over several steps already, or one that begins as it does)."""

WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)

Mark = tuple[float, ...]
"""The totals at one time, in the order of :data:`WAIT_REASONS`."""


class WaitClock:
    """Totals in seconds of ``time.monotonic()`` by reason; time in which nobody waits is in ``next_step``."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(WAIT_REASONS, 0.0)
        self._reason: WaitReason = "next_step"
        self._since = 0.0

    def turn(self, reason: WaitReason | None, now: float) -> None:
        """From now on the head of the queue waits for ``reason``; ``None``: nobody waits."""
        self._totals[self._reason] += now - self._since
        self._reason = reason or "next_step"
        self._since = now

    def mark(self, now: float) -> Mark:
        """The totals now, for :meth:`since`."""
        self.turn(self._reason, now)
        return tuple(self._totals.values())

    def since(self, mark: Mark, now: float) -> dict[str, float]:
        """Seconds since a mark by reason, those that are not zero; together they are all of the time."""
        moved = zip(WAIT_REASONS, mark, self.mark(now), strict=True)
        return {reason: after - before for reason, before, after in moved if after > before}
