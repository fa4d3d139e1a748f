"""Steps of a whole model in the engine: their time on the device, and its idle time between them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from gpu_device import Device

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.runner.backends import LoadedModel, load_model
from streamllm.runner.executor import Executor
from streamllm.runner.gpu_backend import GpuBackend
from streamllm.runner.graphs import CudaGraphRecorder
from streamllm.runner.messages import ScheduledBatch
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams
from streamllm.server.run import calm_garbage_collector
from streamllm.sources.model_files import ModelFiles
from streamllm.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
EDGE_STEPS = 3
"""Steps at either end of a workload that do not count: the batch fills and empties there."""


@dataclass(frozen=True)
class Workload:
    """Prompts that come at once.

    Attributes:
        name: what the table calls it.
        batch: sequences.
        prompt_len, output_len: tokens of each.
        counts_prefill: whether its prompt steps are measured, not its decodes.
    """

    name: str
    batch: int
    prompt_len: int
    output_len: int
    counts_prefill: bool = False


FULL = (
    Workload("decode, batch 1, context 128", 1, 128, 128),
    Workload("decode, batch 32, context 1,024", 32, 1000, 48),
    Workload("decode, batch 64, context 256", 64, 240, 48),
    Workload("prefill, 2,048 tokens a step", 8, 2048, 1, counts_prefill=True),
)
SMALL = (
    Workload("decode, batch 1, context 8", 1, 8, 16),
    Workload("decode, batch 3, context 20", 3, 20, 16),
    Workload("prefill, 32 tokens a step", 6, 32, 1, counts_prefill=True),
)


@dataclass
class StepTimes:
    """One step, in seconds from a common beginning, on the device's clock.

    Attributes:
        num_tokens, num_sequences: of its batch.
        begin: its inputs have been copied to the device.
        end: its results have been copied back.
    """

    num_tokens: int
    num_sequences: int
    begin: float
    end: float


class DeviceClock:
    """Moments in a stream; on a CPU, where work is done when it is submitted, those of the host."""

    def __init__(self, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._first = self.moment()

    def moment(self) -> Any:
        """Now in the current stream."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        """Since the clock was made; waits for the moment."""
        if not self._is_gpu:
            return float(moment - self._first)
        moment.synchronize()
        return float(self._first.elapsed_time(moment)) / 1e3


class TimedBackend(GpuBackend):
    """Notes when the device has a step's inputs and when it has copied back its results.

    What it waits for in between two steps counts as idle: that no inputs are there, or the host's launch of
    their copy. Where a step is launched kernel by kernel, gaps between its kernels count as its own time.
    """

    def prepare(self, *arguments: Any, **options: Any) -> None:
        super().prepare(*arguments, **options)
        self._clock = DeviceClock(self._stream is not None)
        self._moments: list[tuple[int, int, Any, Any]] = []
        send_forward = self._device_inputs.send_forward

        def timed_send_forward(*arguments: Any, **options: Any) -> Any:
            batch = send_forward(*arguments, **options)
            self._begin = self._clock.moment()
            return batch

        self._device_inputs.send_forward = timed_send_forward  # type: ignore[method-assign]

    def submit_forward(self, batch: ScheduledBatch) -> None:
        super().submit_forward(batch)
        self._sizes = batch.num_tokens, len(batch.rows)

    def mark(self) -> None:
        super().mark()
        with self._on_stream():
            self._moments.append((*self._sizes, self._begin, self._clock.moment()))

    def take_steps(self) -> list[StepTimes]:
        """The steps since the last call; none may be under way."""
        steps = [
            StepTimes(tokens, sequences, self._clock.seconds(begin), self._clock.seconds(end))
            for tokens, sequences, begin, end in self._moments
        ]
        self._moments.clear()
        # Times since an event have the precision of a float32.
        self._clock = DeviceClock(self._stream is not None)
        return steps


@dataclass(frozen=True)
class StepFigures:
    """Of a workload's full steps.

    Attributes:
        num_steps: how many.
        period: seconds from one step's end to the next one's, median.
        busy: seconds from a step's begin to its end, median.
        idle: share of the time between the first step's end and the last one's in which no step was under
            way.
    """

    num_steps: int
    period: float
    busy: float
    idle: float


def figures(steps: list[StepTimes], workload: Workload, max_tokens: int) -> StepFigures:
    """
    Args:
        max_tokens: of a step.

    Raises:
        ValueError: too few steps were full.
    """
    if workload.counts_prefill:
        full = [step for step in steps if step.num_tokens > max_tokens // 2]
    else:
        full = [step for step in steps if step.num_tokens == step.num_sequences == workload.batch]
        full = full[EDGE_STEPS:-EDGE_STEPS]
    if len(full) < 3:
        raise ValueError(f"{workload.name}: only {len(full)} of {len(steps)} steps were full")
    pairs = list(itertools.pairwise(full))
    waited = sum(max(later.begin - earlier.end, 0.0) for earlier, later in pairs)
    return StepFigures(
        num_steps=len(full),
        period=statistics.median(later.end - earlier.end for earlier, later in pairs),
        busy=statistics.median(step.end - step.begin for step in full),
        idle=waited / (full[-1].end - full[0].end),
    )


class StepBenchmark:
    """A model on a device; its weights are read once.

    Args:
        files: the model's folder.
        max_tokens: of a step.
    """

    def __init__(self, files: ModelFiles, device: Device, kernels: GpuKernels, max_tokens: int) -> None:
        self._files, self._device, self._kernels, self._max_tokens = files, device, kernels, max_tokens
        self._config = ModelConfig.from_files(files)
        self._tokenizer = Tokenizer.from_folder(files.path)
        backend = GpuBackend(kernels, device.device, torch.bfloat16)
        checkpoint = open_checkpoint(files, self._config)
        self._loaded = load_model(self._config, backend, checkpoint, False, "packed")
        backend.close()

    def run(self, workloads: tuple[Workload, ...], *, graphs: bool) -> dict[str, StepFigures]:
        """Every workload in an engine with graphs, or in one without."""
        return asyncio.run(self._run(workloads, graphs))

    async def _run(self, workloads: tuple[Workload, ...], graphs: bool) -> dict[str, StepFigures]:
        lengths = [w.prompt_len + w.output_len for w in workloads]
        num_blocks = max(w.batch * (-(-n // BLOCK_SIZE) + 1) for w, n in zip(workloads, lengths, strict=True))
        recorder = CudaGraphRecorder() if graphs else None
        backend = TimedBackend(self._kernels, self._device.device, torch.bfloat16, recorder=recorder)
        config = EngineConfig(
            model=str(self._files.path),
            max_num_seqs=max(w.batch for w in workloads),
            max_num_batched_tokens=self._max_tokens,
            enable_prefix_caching=False,
        )
        runner = ModelRunner(
            self._config,
            open_checkpoint(self._files, self._config),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_batched_tokens=self._max_tokens,
            max_num_seqs=config.max_num_seqs,
            kv_cache_dtype="bfloat16",
            max_model_len=max(lengths),
            threads=1,
            progress=False,
            sampled_vocab_size=min(self._tokenizer.vocab_size, self._config.vocab_size),
            loaded=LoadedModel(self._loaded.family, backend, self._loaded.model),
        )
        engine = AsyncEngine(
            config=config,
            model_name=self._files.served_name,
            model_config=self._config,
            tokenizer=self._tokenizer,
            chat_template=None,
            executor=Executor(runner),
            num_blocks=num_blocks,
            max_model_len=max(lengths),
            default_sampling={},
        )
        await engine.start()
        thresholds = gc.get_threshold()
        calm_garbage_collector()
        try:
            found = {}
            for workload in workloads:
                await self._serve(engine, workload)  # compiles what was not needed before
                backend.take_steps()
                await self._serve(engine, workload)
                found[workload.name] = figures(backend.take_steps(), workload, self._max_tokens)
            return found
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            await engine.stop()

    async def _serve(self, engine: AsyncEngine, workload: Workload) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
        ids = torch.randint(2, self._config.vocab_size, (workload.batch, workload.prompt_len)).tolist()
        streams = await engine.add_requests(ids, [params] * workload.batch)

        async def read(stream: Any) -> None:
            async for _ in stream:
                pass

        await asyncio.gather(*(read(stream) for stream in streams))
