"""Logprobs of prompt tokens: logits exist for a slice of the prompt's rows at a time.

All rows of a chunk at once would take chunk x vocabulary floats (a prompt of 8,000 tokens and a vocabulary of
150,000: 5 GB); a slice takes no more than a batch of sampled rows.

They are those of the model's own logits whatever ``--logprobs-mode`` says, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streamllm.ops.step_inputs import LogprobsMode, SamplingBuffers, StepInputs
from streamllm.runner.messages import PromptLogprobChunk, ScheduledBatch

SLICE_ROWS = 64
"""Rows whose logits are computed together: enough to read the output weights seldom."""


class PromptRowsPass:
    """Takes one step's prompt rows through the sampling kernel, slice after slice.

    For each slice: :meth:`fill`, run logits and sampling, :meth:`gather`; then :meth:`chunks`.

    Args:
        batch: the step, whose ``prompt_rows`` are meant.
        inputs: the step's arrays, filled for its forward.
    """

    def __init__(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        self._entries = entries = batch.prompt_rows
        counts = [len(entry.token_ids) for entry in entries]
        self._ends = np.cumsum(counts).tolist()
        self._rows = np.concatenate(
            [
                inputs.query_start[entry.row]
                + np.arange(count, dtype=np.int32)
                + (entry.first - 1 - batch.rows[entry.row].num_computed_tokens)
                for entry, count in zip(entries, counts, strict=True)
            ]
        )
        self._targets = np.concatenate([np.array(entry.token_ids, np.int32) for entry in entries])
        self._num_logprobs = np.repeat(np.array([entry.num_logprobs for entry in entries], np.int32), counts)
        total, widest = len(self._rows), max(entry.num_logprobs for entry in entries)
        self._finite = np.zeros(total, bool)
        self._logprobs = np.zeros(total, np.float32)
        self._ranks = np.zeros(total, np.int32)
        self._top_ids = np.zeros((total, widest), np.int32)
        self._top_logprobs = np.zeros((total, widest), np.float32)

    def slices(self) -> Iterator[slice]:
        """The rows in pieces of at most ``SLICE_ROWS``."""
        for start in range(0, len(self._rows), SLICE_ROWS):
            yield slice(start, min(start + SLICE_ROWS, len(self._rows)))

    def fill(self, part: slice, inputs: StepInputs, sampling: SamplingBuffers) -> None:
        """Makes a slice's rows the output rows: nothing is drawn, the next prompt token is the target."""
        count = inputs.num_outputs = part.stop - part.start
        inputs.output_rows[:count] = self._rows[part]
        sampling.target[:count] = self._targets[part]
        sampling.num_logprobs[:count] = self._num_logprobs[part]
        sampling.logprobs_mode[:count] = LogprobsMode.RAW_LOGPROBS

    def gather(self, part: slice, sampling: SamplingBuffers) -> None:
        """Takes a slice's results out of the buffers."""
        count, width = part.stop - part.start, self._top_ids.shape[1]
        self._finite[part] = sampling.token[:count] >= 0
        self._logprobs[part] = sampling.logprob[:count]
        self._ranks[part] = sampling.rank[:count]
        self._top_ids[part] = sampling.top_ids[:count, :width]
        self._top_logprobs[part] = sampling.top_logprobs[:count, :width]

    def chunks(self, vocab_size: int, error: str) -> list[PromptLogprobChunk | str]:
        """One result for each of the batch's ``prompt_rows``.

        Args:
            vocab_size: no more alternatives than this are reported.
            error: stands for a chunk with logits that are not finite.
        """
        results: list[PromptLogprobChunk | str] = []
        start = 0
        for entry, end in zip(self._entries, self._ends, strict=True):
            width = min(entry.num_logprobs, vocab_size)
            results.append(
                PromptLogprobChunk(
                    first=entry.first,
                    logprobs=self._logprobs[start:end],
                    ranks=self._ranks[start:end],
                    top_ids=self._top_ids[start:end, :width],
                    top_logprobs=self._top_logprobs[start:end, :width],
                )
                if self._finite[start:end].all()
                else error
            )
            start = end
        return results
