"""A runner whose steps are cut into micro-batches."""

from __future__ import annotations

from typing import Any

from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.micro_batches import merge, split


class InParts:
    """Steps like the runner that it is around.

    Attributes:
        num_cut: steps that came in several parts.
    """

    def __init__(self, runner: Any, num_parts: int) -> None:
        self._runner, self._num_parts = runner, num_parts
        self.num_cut = 0

    def step(self, batch: ScheduledBatch) -> StepOutput:
        parts = split(batch, self._num_parts)
        self.num_cut += len(parts) > 1
        return merge(batch, parts, [self._runner.step(part) for part in parts])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
