"""Which of a model's matrices adapters can change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamllm.errors import ConfigError
from streamllm.models.model_config import ModelConfig
from streamllm.models.tensor_shapes import tensor_shapes
from streamllm.ops.lora import LoraLimits

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint
    from streamllm.models.sharding import ShardingPlan
    from streamllm.models.weights import WeightMode

_IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class AdaptableMatrix:
    """
    Attributes:
        name: of its first part; what ``LoraAdapter.updates`` calls it.
        parts: the layers that it is stacked of, by their Hugging Face names, and their rows.
        columns: of all of them.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)


def check_adaptable(config: ModelConfig) -> None:
    """
    Raises:
        ConfigError: there can be no adapters of such a model.
    """
    if config.through_transformers:
        raise ConfigError(
            f"--enable-lora does not go with {config.architecture}, which runs through Transformers; leave "
            "it out, or serve the model with the adapter merged into its weights."
        )


def is_adaptable(parts: Sequence[tuple[str, int]]) -> bool:
    """Whether a matrix of these layers is: those in the model's layers are (but for experts', which are
    loaded another way); embeddings and the head are not."""
    return all(_IN_A_LAYER.search(name) for name, _ in parts)


def adaptable_matrices(config: ModelConfig) -> tuple[AdaptableMatrix, ...]:
    """Those of a model with this config, in the order of loading."""
    return tuple(
        AdaptableMatrix(parts[0][0], tuple(parts), columns)
        for parts, columns in tensor_shapes(config).matrices
        if is_adaptable(parts)
    )


def lora_bytes(
    config: ModelConfig,
    limits: LoraLimits | None,
    checkpoint: Checkpoint,
    weight_mode: WeightMode,
    *,
    dense_itemsize: int = 4,
    plan: ShardingPlan | None = None,
) -> int:
    """Memory that ``max_loras`` adapters take which change every matrix at ``max_rank``.

    Args:
        limits: ``None``: there are no adapters.
        dense_itemsize: bytes of an element beside matrices that are not kept as stored.
        plan: of the rank whose parts of them are meant; ``None``: whole ones.
    """
    if limits is None:
        return 0
    elements = {4: 0, 2: 0}
    for matrix in adaptable_matrices(config):
        if not checkpoint.has(f"{matrix.name}.weight"):
            continue  # in a layer that another process has
        matrix = plan.local_matrix(matrix) if plan else matrix
        is_dense = weight_mode == "float32" or checkpoint.format(f"{matrix.name}.weight") == "float32"
        count = matrix.columns * len(matrix.parts) + matrix.rows
        elements[dense_itemsize if is_dense else 2] += count
    return limits.max_rank * limits.max_loras * sum(itemsize * count for itemsize, count in elements.items())
