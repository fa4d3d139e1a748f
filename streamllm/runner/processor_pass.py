"""Logits processors of one step: user code between the model's logits and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamllm.ops.step_inputs import LARGEST_LOGIT, SamplingBuffers
from streamllm.runner.token_rules import LogitsProcessor


@dataclass(frozen=True)
class ProcessorCall:
    """An output row whose logits pass through processors.

    Attributes:
        row: of the step's output rows.
        prompt_token_ids, output_token_ids: what its sequence holds so far.
        processors: called in this order.
    """

    row: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    processors: Sequence[LogitsProcessor]


class ProcessorPass:
    """Calls the processors of a step's rows; each row on its own, so that one that fails is alone in that.

    Attributes:
        errors: row -> why its processors failed.
    """

    def __init__(self, calls: Sequence[ProcessorCall]) -> None:
        self._calls = calls
        self._results: list[np.ndarray] = []
        self.errors: dict[int, str] = {}

    def run(self, logits: np.ndarray, sampling: SamplingBuffers) -> None:
        """Takes float32 ``logits [outputs, vocab_size]`` and sets ``sampling.replacement``. The results live
        as long as this object."""
        for call in self._calls:
            try:
                result = _processed(call, logits[call.row].copy())
            except Exception as error:
                self.errors[call.row] = f"a logits processor failed: {error or type(error).__name__}"
                continue
            self._results.append(result)
            sampling.replacement[call.row] = result.ctypes.data


def _processed(call: ProcessorCall, logits: np.ndarray) -> np.ndarray:
    shape = logits.shape
    for processor in call.processors:
        logits = processor(call.prompt_token_ids, call.output_token_ids, logits)
    result = np.ascontiguousarray(logits, np.float32)
    if result.shape != shape:
        raise ValueError(f"it returned the shape {result.shape} instead of {shape}")
    if not (result <= LARGEST_LOGIT).all():
        raise ValueError("it returned NaN or infinity")
    return result
