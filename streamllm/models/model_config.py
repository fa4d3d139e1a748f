"""What a model is, whatever file it came from: sizes, attention, rotary embedding, ids that end a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from streamllm.sources.model_files import ModelFiles

RopeType = Literal["default", "linear", "llama3", "dynamic", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A rotary position embedding over two halves of a head (GPT-NeoX's layout, as in Hugging Face).

    Attributes:
        rope_type: how frequencies are scaled beyond the trained length.
        theta: the base of the frequencies.
        rotary_dim: how many of a head's dimensions are rotated; even.
        factor: the scaling factor (all types but ``"default"``).
        original_max_position_embeddings: the trained length, in positions (``"llama3"``, ``"dynamic"``,
            ``"yarn"``; 0 otherwise).
        low_freq_factor: ``"llama3"`` only.
        high_freq_factor: ``"llama3"`` only.
        attention_factor: what cosine and sine are multiplied by (``"yarn"``); ``None``: what the paper
            recommends for ``factor``.
        beta_fast: ``"yarn"``: rotations above which a frequency is left alone.
        beta_slow: ``"yarn"``: rotations below which a frequency is divided by ``factor``.
        mscale: ``"yarn"``: weight of log(factor) in the attention factor (only together with the next).
        mscale_all_dim: ``"yarn"``: the same in its denominator.
        truncate: ``"yarn"``: round the range between the two betas to whole dimensions.
        frequency_factors: ``rotary_dim / 2`` divisors, one a frequency, where the file carries them (a GGUF
            of Llama 3); applied to the frequencies of ``rope_type``.
    """

    rope_type: RopeType
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family, with every default filled in.

    Attributes:
        architecture: ``"LlamaForCausalLM"``, ``"MistralForCausalLM"``, ``"Qwen2ForCausalLM"`` or
            ``"Qwen3ForCausalLM"``.
        vocab_size: rows of the embedding, and logits per token.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: dimensions of a head (not always ``hidden_size / num_heads``).
        rms_norm_eps: added to the mean square in every RMSNorm.
        max_position_embeddings: as the file says; see :attr:`context_length`.
        rope: the rotary embedding.
        tie_word_embeddings: the logits are computed with the embedding matrix. This is what the weights
            are, not only what the config says: where both matrices are stored and differ, it is false.
        qkv_bias: the query, key and value projections have biases.
        attention_out_bias: the attention's output projection has one.
        mlp_bias: the MLP's three projections have them.
        qk_norm: queries and keys pass an RMSNorm over each head before the rotation.
        hidden_act: ``"silu"``.
        layer_windows: for each layer how many positions a query sees, its own included; ``None``: all.
        eos_token_ids: ids that end a text, from the config and the generation config.
        bos_token_id: the id that begins a text, if any.
        default_sampling: sampling fields that the model's authors recommend (``temperature``, ``top_p``,
            ``top_k``, ``min_p``, ``repetition_penalty``): those they set.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hidden_act: str = "silu"
    default_sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def context_length(self) -> int:
        """How many positions the model is made for, in tokens: with the scaling of its rotary embedding.

        The rule is vLLM's: ``linear`` and ``dynamic`` extend ``max_position_embeddings``, ``yarn`` its
        original length; ``llama3`` counts its scaling in already.
        """
        rope = self.rope
        if rope.rope_type == "yarn":
            return int(rope.original_max_position_embeddings * rope.factor)
        if rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        return self.max_position_embeddings

    @staticmethod
    def from_files(files: ModelFiles) -> ModelConfig:
        """Reads ``config.json`` and ``generation_config.json``, or a GGUF's metadata.

        Raises:
            ModelLoadError: one line: a file is missing or broken, a field has a value that cannot be, or the
                architecture, rope type or activation is not supported.
        """
        if files.kind == "gguf":
            from streamllm.models.gguf_config import read_gguf_config

            return read_gguf_config(files.path)
        from streamllm.models.hf_config import read_hf_config

        return read_hf_config(files.path)
