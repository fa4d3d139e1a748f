"""Rows for the sampler with edits, masks and replacements, and the native kernel to run them."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamllm.ops.step_inputs import ROW_EDITS, SamplingBuffers


class RowRules:
    """Edits, masks and replacements of the rows of sampling buffers; keeps their memory."""

    def __init__(self, sampling: SamplingBuffers) -> None:
        self.sampling = sampling
        self._records = np.zeros(len(sampling.token), ROW_EDITS)
        self._kept: list[np.ndarray] = []

    def edit(
        self,
        row: int,
        *,
        bias: dict[int, float] | None = None,
        seen: dict[int, int] | None = None,
        penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
        banned: list[int] | None = None,
    ) -> None:
        """Sets a row's edits.

        Args:
            bias: id -> value.
            seen: id -> how often the output holds it.
            penalties: repetition, frequency, presence.
        """
        record = self._records[row]
        bias, seen, banned = bias or {}, seen or {}, banned or []
        record["bias_ids"], record["num_biases"] = self._keep(list(bias), np.int32), len(bias)
        record["bias_values"] = self._keep(list(bias.values()), np.float32)
        record["seen_ids"], record["num_seen"] = self._keep(list(seen), np.int32), len(seen)
        record["output_counts"] = self._keep(list(seen.values()), np.int32)
        record["banned_ids"], record["num_banned"] = self._keep(banned, np.int32), len(banned)
        for name, value in zip(("repetition", "frequency", "presence"), penalties, strict=True):
            record[f"{name}_penalty"] = value
        self.sampling.edits[row] = self._records.ctypes.data + row * ROW_EDITS.itemsize

    def allow(self, row: int, allowed: np.ndarray, *, grammar: bool = False) -> None:
        """Sets one of a row's masks from bool ``[vocab_size]``."""
        packed = np.packbits(allowed, bitorder="little")
        words = np.zeros(-(-len(allowed) // 32) * 4, np.uint8)
        words[: len(packed)] = packed
        target = self.sampling.grammar_mask if grammar else self.sampling.allowed_mask
        target[row] = self._keep(words.view(np.uint32), np.uint32)

    def replace(self, row: int, logits: np.ndarray) -> None:
        """Puts other logits in the place of a row's."""
        self.sampling.replacement[row] = self._keep(logits, np.float32)

    def wipe(self) -> None:
        """Overwrites all that the rows point to."""
        for array in (self._records, *self._kept):
            array.view(np.uint8)[:] = 0xFF

    def _keep(self, values: Any, dtype: Any) -> int:
        array = np.array(values, dtype)
        self._kept.append(array)
        return array.ctypes.data


def native_sample(logits: np.ndarray, vocab_size: int, sampling: SamplingBuffers) -> None:
    """The native sampler on float32 ``logits [rows, stride]``."""
    from streamllm.ops.cpu_plan import CpuOps
    from streamllm.ops.plan_recorder import PlanBuffer

    ops = CpuOps(threads=2, max_tokens=1, max_outputs=len(logits))
    ops.sample(PlanBuffer(True, vocab_size, logits.shape[1], logits.ctypes.data), vocab_size, sampling)
    ops.compile().native.run(0, 0, len(logits))


def copy_buffers(sampling: SamplingBuffers) -> SamplingBuffers:
    """Buffers with the same settings; the addresses still point to the same memory."""
    other = SamplingBuffers.allocate(len(sampling.token))
    for name in SamplingBuffers.__slots__:
        getattr(other, name)[...] = getattr(sampling, name)
    return other
