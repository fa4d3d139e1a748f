"""Which module carries which architecture."""

from __future__ import annotations

from typing import Any, Protocol, cast

from streamllm.errors import ModelLoadError
from streamllm.models import llama
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Ops


class Family(Protocol):
    """What a family's module offers. The model it loads is opaque to everyone else."""

    def load_weights(self, loader: WeightLoader, config: ModelConfig) -> Any: ...

    def forward(self, model: Any, ops: Ops, batch: Batch) -> Buffer: ...

    def logits(self, model: Any, ops: Ops, hidden: Buffer) -> Buffer: ...


FAMILIES: dict[str, Any] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": llama,
}


def family_of(architecture: str) -> Family:
    """The module that runs ``architecture``.

    Raises:
        ModelLoadError: none does.
    """
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"Architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}."
        )
    return cast(Family, FAMILIES[architecture])
