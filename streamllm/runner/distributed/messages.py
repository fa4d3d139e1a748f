"""What the engine and its workers say to each other.

Every worker has two connections. On the first the engine calls its methods (:class:`Call`, one at a time) and
gets an :class:`Answer`; that may take minutes, and carries adapters of any size. On the second go the steps,
in order and never behind anything large.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from streamllm.config import EngineConfig
from streamllm.ops.lora import LoraAdapter
from streamllm.runner.distributed.transport import Address
from streamllm.runner.messages import OutputRow, ScheduledBatch, ScheduledRow, StepOutput
from streamllm.runner.pending_runner import PendingRunner, Share
from streamllm.sources.model_files import ModelFiles

LoadShard = Callable[[EngineConfig, ModelFiles, int, Share], PendingRunner]
"""(configuration, files, sampled vocabulary, the worker's share) -> its part of the model. A function of a
module: it travels by its name."""

Hello = tuple[str, int, Literal["calls", "steps"], int, str]
"""What a worker says first on each connection: (its version of streamllm, rank, which connection this is, its
process, its machine)."""


@dataclass(frozen=True)
class WorkerStart:
    """What a worker must know to find its engine.

    Attributes:
        address, key: where the engine listens, and what it must be shown there.
        rank: the worker's, ``stage * tensor_parallel_size + rank within the stage``.
        log_level: of what it logs.
    """

    address: Address
    key: bytes
    rank: int
    log_level: int


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is to run.

    Attributes:
        files: the model on this machine; ``None``: the worker finds (or fetches) it on its own.
        host: the worker's address for the others.
        world_size: workers in all.
        threads: of the CPU kernels.
        num_here: workers on the same machine.
    """

    config: EngineConfig
    files: ModelFiles | None
    load: LoadShard
    sampled_vocab_size: int
    host: str
    world_size: int
    threads: int | None
    num_here: int


@dataclass(frozen=True)
class Opened:
    """A worker has found the model.

    Attributes:
        fingerprint: of the model's files, see :mod:`streamllm.runner.distributed.fingerprint`.
        rendezvous: rank 0's: host and port where the others meet it.
    """

    fingerprint: dict[str, str]
    rendezvous: tuple[str, int] | None


@dataclass(frozen=True)
class Call:
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Failure:
    """What a worker raised.

    Attributes:
        error: of its own class if that can be sent, else a RuntimeError with its text.
        trace: the worker's traceback.
    """

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            copy = pickle.loads(pickle.dumps(error))
            sendable = type(copy) is type(error) and str(copy) == str(error)
        except Exception:
            sendable = False
        return cls(error if sendable else RuntimeError(str(error)), trace)

    def unpacked(self, worker: str) -> Exception:
        """The error, with the worker's traceback as what caused it."""
        self.error.__cause__ = WorkerTraceback(worker, self.trace)
        return self.error


class WorkerTraceback(Exception):
    """Where an error came from, in another process.

    Attributes:
        worker: its name.
    """

    def __init__(self, worker: str, trace: str) -> None:
        super().__init__(f"in {worker}:\n{trace}")
        self.worker = worker


@dataclass(frozen=True)
class Answer:
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Submit:
    """A step's forward is to begin, behind those before it.

    Rows travel as columns: of hundreds of small objects pickle writes each one's class and fields, which is
    several times as slow.
    """

    batch: ScheduledBatch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self.batch
        rows = [
            (r.slot, r.num_computed_tokens, r.num_tokens, r.new_token_ids, r.block_updates)
            for r in batch.rows
        ]
        outputs = [(row.row, row.sequence_id, row.purpose) for row in batch.output_rows]
        rest = replace(batch, rows=[], output_rows=[])
        return _submit, (rest, list(zip(*rows, strict=True)), list(zip(*outputs, strict=True)))


def _submit(batch: ScheduledBatch, rows: list[tuple], outputs: list[tuple]) -> Submit:
    batch.rows = list(map(ScheduledRow, *rows)) if rows else []
    batch.output_rows = list(map(OutputRow, *outputs)) if outputs else []
    return Submit(batch)


@dataclass(frozen=True)
class Sample:
    """The step submitted last may draw its tokens."""

    masks: Mapping[int, np.ndarray] | None


@dataclass(frozen=True)
class Returned:
    """A step is done; steps return in order.

    Attributes:
        output: rank 0's; the others' is ``None``.
    """

    output: StepOutput | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Ping:
    """Answered by a :class:`Pong` as soon as the worker's event loop gets to it."""


@dataclass(frozen=True)
class Pong:
    pass


@dataclass(frozen=True)
class AdapterReference:
    """An adapter that the workers have been sent already, in the place of its weights."""

    content: bytes


@dataclass(frozen=True, eq=False)
class SentAdapter(LoraAdapter):
    """An adapter as the engine keeps it: the workers have the weights.

    Attributes:
        sent_bytes: what its updates took.
    """

    sent_bytes: int

    @classmethod
    def of(cls, adapter: LoraAdapter) -> SentAdapter:
        return cls(adapter.name, adapter.content, adapter.rank, {}, adapter.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.sent_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return AdapterReference, (self.content,)
