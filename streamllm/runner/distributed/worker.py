"""A worker: holds a shard of the model, computes steps as the engine says, ends with its engine.

An event loop takes the engine's messages and drives the shard's executor, as the engine's loop does where
the model is in its own process; a thread beside it does what takes long (loading, adapters). The loop answers
pings all the while, and sees at once when the engine is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamllm import __version__
from streamllm.logs import quieten_libraries, stderr_handler
from streamllm.ops.lora import LoraAdapter
from streamllm.runner.distributed.fingerprint import fingerprint
from streamllm.runner.distributed.group import join_groups, open_store, use_interface_of
from streamllm.runner.distributed.messages import (
    AdapterReference,
    Answer,
    Call,
    Failure,
    Hello,
    Opened,
    Ping,
    Pong,
    Returned,
    Sample,
    Submit,
    WorkerSetup,
    WorkerStart,
)
from streamllm.runner.distributed.transport import FrameChannel, connect, packed, send_blocking
from streamllm.runner.executor import Executor, RunningStep
from streamllm.runner.messages import ScheduledBatch
from streamllm.runner.micro_batches import without_outputs
from streamllm.runner.model_runner import ModelRunner
from streamllm.runner.pending_runner import PendingRunner, RunnerSize, Share
from streamllm.sources import resolve

logger = logging.getLogger("streamllm.worker")


def run_worker(start: WorkerStart) -> None:
    """Serves the engine until that is gone or says so; then the process ends, whatever it is doing.

    Raises:
        OSError: there is no engine at the address.
        AuthenticationError: it does not know the key.
    """
    _log_with_rank(start.rank, start.log_level)
    import uvloop

    uvloop.run(_serve(start))


async def _serve(start: WorkerStart) -> None:
    asyncio.get_running_loop().set_exception_handler(_fail)
    shard = Shard(start.rank)
    with ThreadPoolExecutor(1, "streamllm-shard") as thread:
        calls = _channel(start, "calls", lambda call: asyncio.ensure_future(answer(call)))

        async def answer(call: Call) -> None:
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(thread, _called, shard, call)
            calls.send(reply)

        steps = StepServer(shard)
        steps.channel = _channel(start, "steps", steps.take)
        await steps.run()


def _channel(start: WorkerStart, role: Any, on_message: Any) -> FrameChannel:
    """A connection to the engine that has been told whose it is."""
    connection = connect(start.address, start.key)
    hello: Hello = (__version__, start.rank, role, os.getpid(), platform.node())
    send_blocking(connection, packed(hello))
    return FrameChannel(connection, on_message, _leave)


def _leave() -> None:
    """Ends the process at once: native threads, collectives that wait for others and all."""
    logging.shutdown()
    os._exit(0)


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong on the loop would leave the engine waiting."""
    logger.critical("%s", context["message"], exc_info=context.get("exception"))
    logging.shutdown()
    os._exit(1)


def _called(shard: Shard, call: Call) -> bytes:
    """The packed answer to a call."""
    try:
        return packed(Answer(getattr(shard, call.method)(*call.arguments)))
    except Exception as error:
        return packed(Answer(failure=Failure.of(error)))


class Shard:
    """This worker's part of the model. All methods but :meth:`resolve_adapters` are called by the engine, one
    at a time and in this order, the last two any number of times.

    Attributes:
        executor: runs it, once there is a runner.
        share: what the worker has of the model.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.executor: Executor | None = None
        self.share = Share()
        self._store: Any = None
        self._adapters: dict[bytes, LoraAdapter] = {}

    def open(self, setup: WorkerSetup) -> Opened:
        """Finds the model; rank 0 of several opens the place where all meet.

        Raises:
            ModelLoadError: the model is not here and cannot be fetched.
        """
        self._setup = setup
        config = setup.config
        self._files = setup.files or resolve(config.model, revision=config.revision, progress=self.rank == 0)
        rendezvous = None
        if self.rank == 0 and setup.world_size > 1:
            self._store = open_store(setup.host, setup.world_size)
            rendezvous = setup.host, self._store.port
        return Opened(fingerprint(self._files), rendezvous)

    def load(self, rendezvous: tuple[str, int] | None) -> int:
        """Meets the others and gets ready; KV blocks that there is room for.

        Raises:
            ConfigError, ModelLoadError: as in one process.
        """
        setup = self._setup
        if rendezvous is not None:
            use_interface_of(setup.host)
            self.share = join_groups(setup.config, self._store, rendezvous, self.rank)
        share = dataclasses.replace(self.share, threads=setup.threads, num_here=setup.num_here)
        self._pending: PendingRunner = setup.load(setup.config, self._files, setup.sampled_vocab_size, share)
        return self._pending.num_blocks

    def make_runner(self, num_blocks: int) -> RunnerSize:
        """Makes the KV pool: the shard is ready for steps.

        Raises:
            ConfigError, ModelLoadError: as in one process.
        """
        self._runner: ModelRunner = self._pending.make_runner(num_blocks)
        self.executor = Executor(self._runner)
        return RunnerSize.of(self._runner, self._pending.place)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Keeps this shard's part of an adapter, ready for a slot."""
        part = self._pending.shard_adapter(adapter)
        self._runner.prepare_adapter(part)
        self._adapters[adapter.content] = part

    def drop_adapters(self, contents: list[bytes]) -> None:
        """Lets go of adapters that no step will load any more."""
        for content in contents:
            self._adapters.pop(content, None)

    def resolve_adapters(self, batch: ScheduledBatch) -> None:
        """Puts the adapters in the place of their references."""
        for load in batch.lora_loads:
            if isinstance(load.adapter, AdapterReference):
                load.adapter = self._adapters[load.adapter.content]


class StepServer:
    """Takes the steps' messages and sends what the steps give.

    Attributes:
        channel: to the engine.
    """

    channel: FrameChannel

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        # Of both there may be more than the executor takes at once: parts of a step for a pipeline.
        self._batches: deque[ScheduledBatch] = deque()
        self._samples: deque[Sample] = deque()
        self._submitted: RunningStep | None = None  # which waits for its Sample
        self._sampled: asyncio.Queue[RunningStep] = asyncio.Queue()
        self._num_in_flight = 0
        self._is_exclusive = False  # the newest in flight

    def take(self, message: Any) -> None:
        """A message has come."""
        if isinstance(message, Submit):
            self._shard.resolve_adapters(message.batch)
            if self._shard.share.has_logits:
                self._batches.append(message.batch)
            else:
                self._batches.append(without_outputs(message.batch))
                self._samples.append(Sample(None))
            self._go_on()
        elif isinstance(message, Sample):
            if self._shard.share.has_logits:
                self._samples.append(message)
                self._go_on()
        elif isinstance(message, Ping):
            self.channel.send(packed(Pong()))

    async def run(self) -> None:
        """Sends what steps give, in order, for ever."""
        while True:
            step = await self._sampled.get()
            try:
                output = await step.output()
                share = self._shard.share
                returned = Returned(output if share.has_logits and share.rank == 0 else None)
            except Exception as error:
                returned = Returned(failure=Failure.of(error))
            self._num_in_flight -= 1
            self._go_on()
            self.channel.send(packed(returned))

    def _go_on(self) -> None:
        """Submits steps and lets them draw, each as far as that may be done now."""
        executor = self._shard.executor
        assert executor is not None, "steps come when the runner is there"
        while True:
            if self._submitted is not None:
                if not self._samples:
                    return
                self._submitted.sample(self._samples.popleft().masks)
                self._sampled.put_nowait(self._submitted)
                self._submitted = None
            if not self._batches or not self._accepts_step(executor.queue_depth):
                return
            self._submitted = executor.submit(self._batches.popleft())
            self._is_exclusive = self._submitted.exclusive
            self._num_in_flight += 1

    def _accepts_step(self, queue_depth: int) -> bool:
        in_flight = self._num_in_flight
        return not in_flight or (in_flight < queue_depth and not self._is_exclusive)


def _log_with_rank(rank: int, level: int) -> None:
    """Logs to standard error, which is the engine's; what all workers have to say the first one says."""
    level = level if rank == 0 else max(level, logging.WARNING)
    logging.basicConfig(level=level, handlers=[stderr_handler(f"worker {rank}: ")])
    quieten_libraries()
