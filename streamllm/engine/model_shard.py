"""A model as one of the processes that divide it sees it."""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.models.checkpoint import Checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.parallel_family import Parallel
from streamllm.models.pipeline import StageCheckpoint, StagePlan, make_stage_plan
from streamllm.models.sharded_checkpoint import ShardedCheckpoint
from streamllm.models.sharding import ShardingPlan
from streamllm.models.sharding_plan import make_sharding_plan
from streamllm.ops.lora import LoraAdapter
from streamllm.runner.pending_runner import Share


@dataclass(frozen=True)
class ModelShard:
    """
    Attributes:
        config: of a model with the layers and heads that this process has; for its KV cache and its runner.
        checkpoint: with the tensors, rows and columns that it has, to count them.
        parallel: what loading the weights takes; ``None``: it has all of them.
        stage, plan: which layers it has, and what of each; ``None``: all.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    parallel: Parallel | None = None
    stage: StagePlan | None = None
    plan: ShardingPlan | None = None

    @classmethod
    def of(cls, config: ModelConfig, checkpoint: Checkpoint, share: Share) -> ModelShard:
        """
        Args:
            config, checkpoint: of the whole model.

        Raises:
            ConfigError: the model cannot be divided among so many.
        """
        stage = plan = None
        own_config, own_checkpoint = config, checkpoint
        if share.num_stages > 1:
            stage = make_stage_plan(
                config, checkpoint.num_bytes, stage=share.stage, num_stages=share.num_stages
            )
            own_config, own_checkpoint = stage.local_config(config), StageCheckpoint(checkpoint, stage)
        if share.size > 1:
            plan = make_sharding_plan(config, checkpoint.format, rank=share.rank, size=share.size)
            own_config = plan.local_config(own_config)
            own_checkpoint = ShardedCheckpoint(own_checkpoint, plan)
        if stage is None and plan is None:
            return cls(config, checkpoint)
        parallel = Parallel(
            share.rank, share.size, share.collectives, share.stage, share.num_stages, share.neighbours
        )
        return cls(own_config, own_checkpoint, parallel, stage, plan)

    def shard_adapter(self, adapter: LoraAdapter) -> LoraAdapter:
        """This process's part of an adapter of the whole model."""
        if self.stage is not None:
            adapter = self.stage.stage_adapter(adapter)
        return adapter if self.plan is None else self.plan.shard_adapter(adapter)
