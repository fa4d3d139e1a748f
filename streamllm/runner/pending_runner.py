"""A model that waits to be told how many KV blocks it has: several workers settle on one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamllm.ops.lora import LoraAdapter
from streamllm.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class PendingRunner:
    """
    Attributes:
        num_blocks: KV blocks that there is room for.
        make_runner: the runner with a pool of so many blocks; where it was not necessary to know how many
            there can be, it loads the weights. Raises ConfigError where ``--max-model-len`` does not fit into
            the pool, ModelLoadError where memory does not suffice or the model's files are broken.
        place: what the runner runs on, for people.
        shard_adapter: an adapter's part that belongs to this shard of the model.
    """

    num_blocks: int
    make_runner: Callable[[int], ModelRunner]
    place: str
    shard_adapter: Callable[[LoraAdapter], LoraAdapter]


@dataclass(frozen=True)
class Share:
    """What a process has of the model, and of the machine; as it stands, all of both.

    Attributes:
        rank, size: its place among those that divide every layer.
        collectives: what they do together (:class:`streamllm.ops.collectives.Collectives`), where ``size`` is
            above 1.
        stage, num_stages: its place among those that have some of the layers each.
        neighbours: how these, by their stages, speak with each other, where ``num_stages`` is above 1.
        threads: of the CPU kernels; ``None``: as ``--threads`` says.
        num_here: processes that take the machine's memory in equal parts.
    """

    rank: int = 0
    size: int = 1
    collectives: Any = None
    threads: int | None = None
    num_here: int = 1
    stage: int = 0
    num_stages: int = 1
    neighbours: Any = None

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits and draws from them."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class RunnerSize:
    """What has been loaded.

    Attributes:
        num_blocks: of the KV pool.
        max_model_len: positions of a sequence at most.
        weight_bytes, kv_cache_bytes: memory that the weights and the KV pool take.
        queue_depth: steps that may be in flight at once.
        place: what it runs on, for people.
    """

    num_blocks: int
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    queue_depth: int
    place: str

    @classmethod
    def of(cls, runner: ModelRunner, place: str) -> RunnerSize:
        return cls(
            runner.num_blocks,
            runner.max_model_len,
            runner.weight_bytes,
            runner.kv_cache_bytes,
            runner.queue_depth,
            place,
        )
