"""A model's weights by name, whatever file they lie in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.model_config import ModelConfig
from streamllm.ops.stored_rows import StoredRows
from streamllm.sources.model_files import ModelFiles


class Checkpoint(Protocol):
    """Named tensors, read one at a time.

    Names are Hugging Face's: ``"model.embed_tokens.weight"``, ``"model.layers.0.self_attn.q_proj.weight"``,
    ``"model.norm.weight"``, ``"lm_head.weight"`` (not there where the embedding serves as the head).
    """

    def names(self) -> set[str]:
        """All tensors of the model."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, matrices as [rows (outputs), columns (inputs)]. ``ModelLoadError`` without it."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, C-contiguous; may be a read-only view of the file.

        Raises:
            ModelLoadError: the tensor is missing, or stored in a type that cannot be read.
        """

    def format(self, name: str) -> str:
        """How a tensor is stored: ``"float32"``, ``"bfloat16"``, ``"q4_1"``, ...
        (:class:`streamllm.ops.stored_rows.StoredRows` has the names)."""

    def num_bytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file."""

    def read_stored(self, name: str) -> StoredRows:
        """A matrix as stored, its rows in the order of :meth:`read`; may be a read-only view of the file.

        Raises:
            ModelLoadError: the tensor is missing.
        """


def open_checkpoint(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    """Opens a model's weights and checks them against its config, without reading their data.

    Raises:
        ModelLoadError: one line that names the file or tensor: no weights, a file that is damaged or cut
            short, a missing tensor, a shape that contradicts the config.
    """
    checkpoint: Checkpoint
    if files.kind == "gguf":
        from streamllm.models.gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(files.path, config)
    else:
        from streamllm.models.safetensors_checkpoint import SafetensorsCheckpoint

        checkpoint = SafetensorsCheckpoint(files.path, tied=config.tie_word_embeddings)
    for name, expected in expected_shapes(config).items():
        if not checkpoint.has(name):
            hint = ""
            if name == "lm_head.weight":
                hint = " (and the config says that it is not tied to the embedding)"
            raise ModelLoadError(f"The weights in {files.path} lack the tensor {name}{hint}.")
        actual = checkpoint.shape(name)
        if actual != expected:
            raise ModelLoadError(
                f"The tensor {name} in {files.path} has shape {list(actual)}; by the model's config it must "
                f"be {list(expected)}."
            )
    return checkpoint


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model with this config has, and its shape."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_out_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}.{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
