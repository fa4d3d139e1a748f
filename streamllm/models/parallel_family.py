"""A family whose models are divided among ranks (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from streamllm.models.registry import Family
from streamllm.models.sharded_ops import LocalViews, ShardedLoader, ShardedOps
from streamllm.models.sharding import ShardingPlan
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Ops
from streamllm.ops.collectives import Collectives, buffer_collectives


@dataclass(frozen=True)
class Parallel:
    """One of the ranks that divide a model.

    Attributes:
        rank, size: its place among those that divide every layer of a stage, from 0.
        collectives: what these do together, where ``size`` is above 1.
        stage, num_stages: its place among those that have some of the layers each, from 0.
        neighbours: how these, by their stages, speak with each other, where ``num_stages`` is above 1.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    stage: int = 0
    num_stages: int = 1
    neighbours: Collectives | None = None


class ParallelFamily:
    """A family as one rank runs it. To a backend it is a :class:`~streamllm.models.registry.Family`: hidden
    states and logits are the family's, on every rank.

    Args:
        family: of the whole model, or of a stage of it.
        plan: what the rank has of it.
        collectives: of all ranks; each calls ``forward`` and ``logits`` in the same order, for the same rows.
    """

    def __init__(self, family: Family, plan: ShardingPlan, collectives: Collectives) -> None:
        self._family = family
        self._plan = plan
        self._collectives = collectives
        self._views = LocalViews(plan)
        self._widths = tuple(map(len, plan.vocabulary))

    def load_weights(self, loader: WeightLoader, config: Any) -> Any:
        """The rank's part of the weights.

        Args:
            loader: over the rank's :class:`~streamllm.models.sharded_checkpoint.ShardedCheckpoint`.
            config: of the whole model.
        """
        return self._family.load_weights(ShardedLoader(loader, self._plan), config)

    def forward(self, model: Any, ops: Ops, batch: Batch) -> Buffer:
        sharded = ShardedOps(ops, buffer_collectives(ops, self._collectives), self._views)
        return self._family.forward(model, cast(Ops, sharded), batch)

    def logits(self, model: Any, ops: Ops, hidden: Buffer) -> Buffer:
        collectives = buffer_collectives(ops, self._collectives)
        own = self._family.logits(model, cast(Ops, ShardedOps(ops, collectives, self._views)), hidden)
        return None if own is None else collectives.gather_columns(own, self._widths)
