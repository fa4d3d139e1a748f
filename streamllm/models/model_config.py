"""What a model is, whatever file it came from: sizes, attention, rotary embedding, ids that end a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from streamllm.models.kv_layout import KVLayout, kv_layout
from streamllm.sources.model_files import ModelFiles

RopeType = Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A rotary position embedding over two halves of a head (GPT-NeoX's layout, as in Hugging Face).

    Attributes:
        rope_type: how frequencies are scaled beyond the trained length.
        theta: the base of the frequencies.
        rotary_dim: how many of a head's dimensions are rotated; even.
        factor: the scaling factor (all types but ``"default"``).
        original_max_position_embeddings: the trained length, in positions (``"llama3"``, ``"dynamic"``,
            ``"yarn"``, ``"longrope"``; 0 otherwise).
        low_freq_factor: ``"llama3"`` only.
        high_freq_factor: ``"llama3"`` only.
        attention_factor: what cosine and sine are multiplied by (``"yarn"``, ``"longrope"``); ``None``: what
            the paper recommends for ``factor``.
        beta_fast: ``"yarn"``: rotations above which a frequency is left alone.
        beta_slow: ``"yarn"``: rotations below which a frequency is divided by ``factor``.
        mscale: ``"yarn"``: weight of log(factor) in the attention factor (only together with the next).
        mscale_all_dim: ``"yarn"``: the same in its denominator.
        truncate: ``"yarn"``: round the range between the two betas to whole dimensions.
        short_factors: ``"longrope"``: ``rotary_dim / 2`` divisors of the frequencies, for sequences up to the
            trained length.
        long_factors: ``"longrope"``: those for longer ones.
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
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What everyone needs to know of a decoder, with every default filled in.

    What only its own forward needs stands in the subclass of its family.

    Attributes:
        architecture: as in ``config.json``: ``"LlamaForCausalLM"``.
        vocab_size: rows of the embedding, and logits per token.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: dimensions of a head (not always ``hidden_size / num_heads``).
        max_position_embeddings: as the file says; see :attr:`context_length`.
        ropes: the rotary embeddings of its layers, that of full attention first; none where positions are
            learned.
        tie_word_embeddings: the logits are computed with the embedding matrix. This is what the weights
            are, not only what the config says: where both matrices are stored and differ, it is false.
        layer_windows: for each layer how many positions a query sees, its own included; ``None``: all.
        eos_token_ids: ids that end a text, from the config and the generation config.
        bos_token_id: the id that begins a text, if any.
        default_sampling: sampling fields that the model's authors recommend (``temperature``, ``top_p``,
            ``top_k``, ``min_p``, ``repetition_penalty``): those they set.
        own_layers: the layers that this process has of the model; ``None``: all.
    """

    through_transformers: ClassVar[bool] = False
    """Whether there is no description of the model here: its forward is Transformers' code."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    ropes: tuple[RopeConfig, ...]
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: dict[str, Any] = field(default_factory=dict)
    own_layers: range | None = None

    @property
    def kv_layout(self) -> KVLayout:
        """Where its layers' keys and values lie."""
        return kv_layout(self.layer_windows, self.own_layers)

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def context_length(self) -> int:
        """How many positions the model is made for, in tokens: with the scaling of its rotary embedding.

        The rule is vLLM's: ``linear`` and ``dynamic`` extend ``max_position_embeddings``, ``yarn`` its
        original length; ``llama3`` and ``longrope`` count theirs in already.
        """
        if not self.ropes:
            return self.max_position_embeddings
        rope = self.ropes[0]
        if rope.rope_type == "yarn":
            return int(rope.original_max_position_embeddings * rope.factor)
        if rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        return self.max_position_embeddings

    @staticmethod
    def from_files(files: ModelFiles, *, trust_remote_code: bool = False) -> ModelConfig:
        """Reads ``config.json`` and ``generation_config.json``, or a GGUF's metadata.

        Args:
            trust_remote_code: code that comes with a model may run, if there is none for it elsewhere.

        Raises:
            ModelLoadError: one line: a file is missing or broken, a field has a value that cannot be, or the
                architecture, rope type or activation is not supported.
        """
        if files.kind == "gguf":
            from streamllm.models.gguf_config import read_gguf_config

            return read_gguf_config(files.path)
        from streamllm.models.hf_config import read_hf_config

        return read_hf_config(files.path, trust_remote_code=trust_remote_code)
