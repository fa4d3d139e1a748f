"""A model runner in several stages, each a runner in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from helpers.sharded_runner import SETTINGS, files_of, make_backend
from helpers.thread_collectives import ThreadGroup

from streamllm.engine.model_shard import ModelShard
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightMode
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.runner.backends import load_model
from streamllm.runner.messages import LoraLoad, ScheduledBatch, StepOutput
from streamllm.runner.micro_batches import merge, split, without_outputs
from streamllm.runner.model_runner import ModelRunner
from streamllm.runner.pending_runner import Share


class StagedRunner:
    """Steps like a :class:`ModelRunner`.

    Attributes:
        ranks: the runners, by stage and then by their place in the stage.
        shards: what each of them has.
        num_parts: into how many micro-batches steps are cut.
    """

    def __init__(
        self,
        path: Path,
        num_stages: int,
        *,
        size: int = 1,
        num_parts: int = 1,
        backend: str = "cpu",
        weight_mode: WeightMode = "float32",
        lora: LoraLimits | None = None,
    ) -> None:
        files = files_of(path)
        config = ModelConfig.from_files(files)
        checkpoint = open_checkpoint(files, config)
        pipelines = [ThreadGroup(num_stages) for _ in range(size)]
        stages = [ThreadGroup(size) for _ in range(num_stages)]
        self.groups = pipelines + stages
        self.num_parts = num_parts
        self._size = size

        def load(world_rank: int) -> tuple[ModelShard, ModelRunner]:
            stage, rank = divmod(world_rank, size)
            share = Share(
                rank,
                size,
                stages[stage].rank(rank) if size > 1 else None,
                stage=stage,
                num_stages=num_stages,
                neighbours=pipelines[rank].rank(stage) if num_stages > 1 else None,
            )
            shard = ModelShard.of(config, checkpoint, share)
            own_backend = make_backend(backend, lora)
            loaded = load_model(config, own_backend, checkpoint, False, weight_mode, shard.parallel)
            return shard, ModelRunner(shard.config, checkpoint, loaded=loaded, **SETTINGS)

        self._threads = ThreadPoolExecutor(num_stages * size)
        made = list(self._threads.map(load, range(num_stages * size)))
        self.shards = [shard for shard, _ in made]
        self.ranks = [runner for _, runner in made]
        last = self.ranks[-size]
        self.num_groups, self.num_blocks = last.num_groups, last.num_blocks

    def step(self, batch: ScheduledBatch) -> StepOutput:
        parts = split(batch, self.num_parts)

        def run(rank: int) -> list[StepOutput]:
            runner, is_last = self.ranks[rank], rank >= len(self.ranks) - self._size
            outputs, logits = [], []
            for part in parts:
                own = part if is_last else without_outputs(part)
                outputs.append(runner.step(self._adapted(own, self.shards[rank])))
                if own.output_rows:
                    logits.append(runner.logits())
            self._logits[rank] = logits
            return outputs

        self._logits: list[list[np.ndarray]] = [[] for _ in self.ranks]
        futures = [self._threads.submit(run, rank) for rank in range(len(self.ranks))]
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.close)
            outputs = [future.result() for future in futures]
            stack.pop_all()
        return merge(batch, parts, outputs[-self._size])

    def logits(self) -> np.ndarray:
        """Of the last step, whose output rows were in the order of its rows."""
        return np.concatenate(self._logits[-self._size])

    def close(self) -> None:
        for runner in self.ranks:
            runner.close()
        self._threads.shutdown()

    @staticmethod
    def _adapted(batch: ScheduledBatch, shard: ModelShard) -> ScheduledBatch:
        def own(adapter: LoraAdapter | None) -> LoraAdapter | None:
            return adapter and shard.shard_adapter(adapter)

        loads = [LoraLoad(load.slot, own(load.adapter)) for load in batch.lora_loads]
        return replace(batch, lora_loads=loads)


@contextlib.contextmanager
def staged(path: Path, num_stages: int, **settings) -> Iterator[StagedRunner]:
    runner = StagedRunner(path, num_stages, **settings)
    try:
        yield runner
    finally:
        runner.close()
