"""A backend with a queue, on a CPU: native plans behind a thread that stands for a device.

It keeps to the contract of :class:`streamllm.runner.backends.Backend` in the strictest way: what is submitted
works on copies made at submission, and later than that; results come at marks alone; what the host does not
know comes from the thread's own memory.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import queue
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner

from streamllm.models.model_config import ModelConfig
from streamllm.ops.step_inputs import ROW_EDITS, UNKNOWN_TOKEN, SamplingBuffers, StepInputs
from streamllm.runner.backends import PlanBackend, load_model
from streamllm.runner.messages import ScheduledBatch
from streamllm.runner.model_runner import ModelRunner
from streamllm.runner.prompt_rows import SLICE_ROWS
from streamllm.runner.sampler import RowEdits

RESULTS = ("token", "logprob", "rank", "top_ids", "top_logprobs")
COUNTS = ("num_tokens", "num_sequences", "num_outputs")


class QueuedBackend:
    """
    Args:
        delay: seconds that a phase takes longer at most, at random.

    Attributes:
        fail_next: what the next phases raise, one each; ``None`` for a phase that succeeds.
        most_marks: marks that were waiting to be waited for at once, at most.
    """

    queue_depth = 2

    def __init__(self, *, threads: int = 1, max_tokens: int, max_outputs: int, delay: float = 0.0) -> None:
        self._plans = PlanBackend(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
        self.event_fd: int | None = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.fail_next: list[Exception | None] = []
        self.most_marks = 0
        self._delay = delay
        self._random = random.Random(0)
        self._tables: dict[int, list[array[int]]] = {}
        self._num_marks = 0
        # What the device has.
        self._last_token: dict[int, int] = {}
        self._error: Exception | None = None
        self._drawn: dict[str, np.ndarray] = {}
        self._marks: deque[tuple[dict[str, np.ndarray], Exception | None]] = deque()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ops(self) -> Any:
        return self._plans.ops

    def make_cache(self, *args: Any, **sizes: Any) -> Any:
        return self._plans.make_cache(*args, **sizes)

    def prepare(self, family, model, inputs: StepInputs, sampling: SamplingBuffers, vocab_size: int) -> None:
        self._inputs, self._sampling, self._vocab_size = inputs, sampling, vocab_size
        arrays = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        own = {name: x.copy() for name, x in arrays.items() if isinstance(x, np.ndarray)}
        self._device_inputs = dataclasses.replace(inputs, **own)
        self._device_sampling = copy.deepcopy(sampling)
        self._plans.prepare(family, model, self._device_inputs, self._device_sampling, vocab_size)

    # -- submitting ----------------------------------------------------------------------------------------

    def submit_forward(self, batch: ScheduledBatch) -> None:
        for new in batch.new_sequences:
            self._tables[new.slot] = [array("i", blocks) for blocks in new.block_ids]
        for row in batch.rows:
            for group, first, block_ids in row.block_updates:
                self._tables[row.slot][group][first:] = array("i", block_ids)
        names = ("token_ids", "rope_rows", "slot_mapping", "query_start", "context_lens", "slots")
        arrays = self._copies(self._inputs, names)
        tables = [[array("i", table) for table in self._tables[row.slot]] for row in batch.rows]
        self._work.put(lambda: self._forward(batch, arrays, tables))

    def submit_sample(self) -> None:
        arrays, sampling, kept = self._sampling_copies()
        self._work.put(lambda: self._draw(arrays, sampling, kept, self._plans.submit_sample))

    def submit_logits(self) -> None:
        arrays = self._copies(self._inputs, ("output_rows",))

        def compute() -> None:
            self._set(self._device_inputs, arrays)
            self._plans.submit_logits()
            self._plans.wait()

        self._work.put(compute)

    def submit_draw(self) -> None:
        arrays, sampling, kept = self._sampling_copies()
        self._work.put(lambda: self._draw(arrays, sampling, kept, self._plans.submit_draw))

    def mark(self) -> None:
        self._num_marks += 1
        self.most_marks = max(self.most_marks, self._num_marks)
        self._work.put(self._reach_mark)

    def wait(self) -> None:
        assert self.event_fd is not None
        os.eventfd_read(self.event_fd)
        self._num_marks -= 1
        drawn, error = self._marks.popleft()
        if error is not None:
            raise error
        for name, values in drawn.items():
            getattr(self._sampling, name)[: len(values)] = values

    def hidden(self) -> np.ndarray:
        return self._plans.hidden()

    def logits(self) -> np.ndarray:
        return self._plans.logits()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        self._plans.close()
        if self.event_fd is not None:
            os.close(self.event_fd)
            self.event_fd = None

    # -- copies --------------------------------------------------------------------------------------------

    @staticmethod
    def _copies(source: Any, names: tuple[str, ...]) -> dict[str, Any]:
        arrays = {name: getattr(source, name).copy() for name in names}
        return arrays | {name: getattr(source, name) for name in COUNTS if hasattr(source, name)}

    def _sampling_copies(self) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        """The arrays, and copies of what they hold the address of, which must be kept alive."""
        sampling = self._copies(
            self._sampling,
            tuple(f.name for f in dataclasses.fields(self._sampling) if f.name not in RESULTS),
        )
        kept: list[Any] = []
        for row in range(self._inputs.num_outputs):
            if address := int(sampling["edits"][row]):
                sampling["edits"][row] = self._copied_edits(address, kept)
            for name, count, dtype in [
                ("allowed_mask", -(-self._vocab_size // 32), np.uint32),
                ("grammar_mask", -(-self._vocab_size // 32), np.uint32),
                ("replacement", self._vocab_size, np.float32),
            ]:
                if address := int(sampling[name][row]):
                    sampling[name][row] = self._copied(address, count, dtype, kept)
        return self._copies(self._inputs, ("output_rows", "output_slots")), sampling, kept

    @staticmethod
    def _copied(address: int, count: int, dtype: Any, kept: list[Any]) -> int:
        size = count * np.dtype(dtype).itemsize
        kept.append(np.zeros(max(size, 1), np.uint8))
        ctypes.memmove(kept[-1].ctypes.data, address, size)
        return kept[-1].ctypes.data

    def _copied_edits(self, address: int, kept: list[Any]) -> int:
        edits = RowEdits.at(address)
        record_at = self._copied(address, 1, ROW_EDITS, kept)
        record = kept[-1].view(ROW_EDITS)[0]
        for name in ("bias_ids", "bias_values", "seen_ids", "output_counts", "banned_ids"):
            kept.append(getattr(edits, name).copy())
            record[name] = kept[-1].ctypes.data
        return record_at

    @staticmethod
    def _set(target: Any, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                getattr(target, name)[...] = value
            else:
                setattr(target, name, value)

    # -- the device ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._random.random() * self._delay)
            try:
                work()
            except Exception as error:
                self._error = self._error or error

    def _forward(self, batch: ScheduledBatch, arrays: dict[str, Any], tables: list[list[array[int]]]) -> None:
        if self.fail_next and (error := self.fail_next.pop(0)) is not None:
            raise error
        inputs = self._device_inputs
        self._set(inputs, arrays)
        for row in range(inputs.num_sequences):
            for group, table in enumerate(tables[row]):
                inputs.block_tables[group, row] = table.buffer_info()[0]
            first = inputs.query_start[row]
            if inputs.token_ids[first] == UNKNOWN_TOKEN:
                assert inputs.query_start[row + 1] == first + 1
                inputs.token_ids[first] = self._last_token[int(inputs.slots[row])]
        assert (inputs.token_ids[: inputs.num_tokens] >= 0).all()
        self._plans.submit_forward(batch)
        self._plans.wait()

    def _draw(
        self,
        arrays: dict[str, Any],
        sampling: dict[str, Any],
        kept: list[Any],
        submit: Callable[[], None],
    ) -> None:
        inputs, device = self._device_inputs, self._device_sampling
        self._set(inputs, arrays)
        self._set(device, sampling)
        submit()
        self._plans.wait()
        count = inputs.num_outputs
        for slot, token, target in zip(
            inputs.output_slots[:count].tolist(), device.token[:count], device.target[:count], strict=True
        ):
            if target == -1:
                self._last_token[slot] = max(int(token), 0)
        self._drawn = {name: getattr(device, name)[:count].copy() for name in RESULTS}

    def _reach_mark(self) -> None:
        self._marks.append((self._drawn, self._error))
        self._drawn, self._error = {}, None
        assert self.event_fd is not None
        os.eventfd_write(self.event_fd, 1)


def queued_runner(config: ModelConfig = CONFIG, *, delay: float = 0.0, **settings: Any) -> ModelRunner:
    """As :func:`helpers.random_runner.make_runner`, over this backend."""
    checkpoint = RandomCheckpoint(config)
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4, **settings}
    backend = QueuedBackend(
        max_tokens=settings["max_num_batched_tokens"],
        max_outputs=max(settings["max_num_seqs"], SLICE_ROWS),
        delay=delay,
    )
    loaded = load_model(config, backend, checkpoint, False, "float32")
    return make_runner(checkpoint, config, loaded=loaded, **settings)
