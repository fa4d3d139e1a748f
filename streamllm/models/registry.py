"""Which module carries which architecture; it is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from streamllm.errors import ModelLoadError
from streamllm.models.stored_layout import StoredLayout
from streamllm.ops import Batch, Buffer, Ops

if TYPE_CHECKING:
    from streamllm.models.config_fields import ConfigFields
    from streamllm.models.gguf_config import GGUFFields
    from streamllm.models.model_config import ModelConfig
    from streamllm.models.weights import WeightLoader


class Family(Protocol):
    """What a family's module offers. The config and the model that it makes are its own: to everyone else the
    one is a :class:`ModelConfig`, the other opaque.

    A module whose models come as GGUF has ``GGUF_NAMES`` too: what llama.cpp calls the tensors of a layer
    that :mod:`streamllm.models.gguf_checkpoint` does not know (or names otherwise), and Hugging Face's names.
    One whose files differ from what its ``load_weights`` asks for has ``STORED``, a
    :class:`~streamllm.models.stored_layout.StoredLayout`.
    """

    GGUF_NAMES: Mapping[str, str]

    def read_config(self, fields: ConfigFields, architecture: str) -> ModelConfig:
        """The config in a ``config.json``."""

    def read_gguf_config(self, fields: GGUFFields, architecture: str) -> ModelConfig:
        """The config in a GGUF's metadata and tensors."""

    def load_weights(self, loader: WeightLoader, config: Any) -> Any:
        """Reads the weights, one tensor after the other."""

    def forward(self, model: Any, ops: Ops, batch: Batch) -> Buffer:
        """The hidden state after the final norm of every token: ``[tokens, hidden_size]``."""

    def logits(self, model: Any, ops: Ops, hidden: Buffer) -> Buffer:
        """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``;
        ``None`` where another process computes them."""


_MODULES: dict[str, dict[str, str]] = {
    "llama": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    },
    "phi": {"phi3": "Phi3ForCausalLM"},
    "gemma": {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"},
    "olmo": {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"},
    "granite": {"granite": "GraniteForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM"},
    "opt": {"opt": "OPTForCausalLM"},
    "gpt2": {"gpt2": "GPT2LMHeadModel"},
    "moe": {
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    },
    "gpt_oss": {"gpt_oss": "GptOssForCausalLM"},
}
"""Per module, ``model_type`` and ``architectures`` of the configs that it reads."""


@dataclass(frozen=True)
class GGUFArchitecture:
    """A value of ``general.architecture``.

    Attributes:
        architecture: what it is called in a ``config.json``.
        with_experts: the same for a model with experts, where that is another.
        interleaved: llama.cpp rotates neighbouring dimensions, and its converter has reordered the rows of
            the query and key projections for that.
    """

    architecture: str
    interleaved: bool = False
    with_experts: str | None = None


GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    # A Mistral says llama too, and so does a Mixtral.
    "llama": GGUFArchitecture("LlamaForCausalLM", interleaved=True, with_experts="MixtralForCausalLM"),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "mistral3": GGUFArchitecture("Ministral3ForCausalLM", interleaved=True),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", interleaved=True),
    "phi3": GGUFArchitecture("Phi3ForCausalLM"),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM"),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM"),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM"),  # an OLMo 3 says so too
    "granite": GGUFArchitecture("GraniteForCausalLM", interleaved=True),
    "gpt2": GGUFArchitecture("GPT2LMHeadModel"),
    "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM"),
    "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM"),
    "gpt-oss": GGUFArchitecture("GptOssForCausalLM"),
}


def supported_architectures() -> list[str]:
    return [architecture for types in _MODULES.values() for architecture in types.values()]


def family_of(architecture: str) -> Family:
    """The module that runs ``architecture``.

    Raises:
        ModelLoadError: none does.
    """
    for module, types in _MODULES.items():
        if architecture in types.values():
            return cast(Family, importlib.import_module(f"streamllm.models.{module}"))
    raise ModelLoadError(
        f"The architecture {architecture} is not supported; supported are "
        f"{', '.join(supported_architectures())}."
    )


def stored_layout(architecture: str) -> StoredLayout:
    """How the files of an architecture's models differ from what its ``load_weights`` asks for."""
    return getattr(family_of(architecture), "STORED", None) or StoredLayout()


def family_of_config(fields: ConfigFields) -> tuple[str, Family] | None:
    """(architecture, its module) by ``architectures``, or by ``model_type`` where that field is missing or
    has another name for a causal model (without code of its own); ``None`` where no module describes it.

    Raises:
        ModelLoadError: ``architectures`` is no list.
    """
    architectures, model_type = fields.get("architectures") or [], fields.get("model_type")
    if not isinstance(architectures, list):
        raise fields.wrong("architectures", "a list of names")
    for architecture in supported_architectures():
        if architecture in architectures:
            return architecture, family_of(architecture)
    is_causal = all(str(name).endswith("ForCausalLM") for name in architectures)
    if is_causal and not (architectures and fields.get("auto_map")):
        for types in _MODULES.values():
            if isinstance(model_type, str) and model_type in types:
                return types[model_type], family_of(types[model_type])
    return None
