"""Any causal model of Transformers, its attention replaced by ours.

The module offers what a :class:`streamllm.models.registry.Family` does, but for its own way to load weights.
A step's tokens are one ragged row: ``input_ids [1, tokens]`` with the position of each token, no mask and no
cache of Transformers' own. Everything but attention acts on single tokens; attention writes the keys and
values of the row into their blocks and reads each sequence's context from there.

What torch's products sum in which order depends on the number of rows, so that here, other than with our own
descriptions, a request's last bits may depend on the batch.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamllm.errors import ModelLoadError
from streamllm.models.loading_progress import LoadingProgress
from streamllm.models.transformers_config import AttentionCall, TransformersConfig
from streamllm.models.transformers_interface import (
    ATTEND_HERE,
    PAGED,
    SplitModel,
    first_line,
    quiet,
    register,
)
from streamllm.ops import Attention

logger = logging.getLogger("streamllm.models")


class TensorOps(Protocol):
    """What is needed of operations: those on torch tensors have it.

    Attributes:
        device, dtype: of activations and weights.
        weight_bytes: memory that the weights take.
    """

    device: torch.device
    dtype: torch.dtype
    weight_bytes: int

    def rotary_and_cache(self, qkv: Tensor, batch: Any, attention: Attention) -> Tensor: ...

    def paged_attention(self, q: Tensor, batch: Any, attention: Attention) -> Tensor: ...


class TransformersModel:
    """A loaded model.

    Attributes:
        ops, batch: those of the forward that is running, for the attention of its layers.
    """

    ops: TensorOps
    batch: Any

    def __init__(self, causal: PreTrainedModel, config: TransformersConfig):
        self.split = SplitModel(causal)
        modules = dict(causal.named_modules())
        places = config.kv_layout.places
        for call, (group, place) in zip(config.attention, places, strict=True):
            module = modules[call.module]
            attention = _attention(call, module, config, group, place)
            setattr(module, ATTEND_HERE, _PagedLayer(self, attention, call.value_dim))


class _PagedLayer:
    """One layer's attention over the blocks of the running step's sequences."""

    def __init__(self, model: TransformersModel, attention: Attention, value_dim: int):
        self._model, self._attention, self._value_dim = model, attention, value_dim

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, arguments: dict[str, Any]
    ) -> Tensor:
        ops, batch, attention = self._model.ops, self._model.batch, self._attention
        heads = torch.cat([self._widened(part) for part in (query, key, value)], dim=1)
        # Some models keep parts in float32 whatever the dtype.
        qkv = heads[0].transpose(0, 1).reshape(heads.shape[2], -1).to(ops.dtype)
        out = ops.paged_attention(ops.rotary_and_cache(qkv, batch, attention), batch, attention)
        out = out.to(query.dtype).view(1, len(out), attention.num_heads, attention.head_dim)
        return out[..., : self._value_dim]

    def _widened(self, heads: Tensor) -> Tensor:
        """Heads with zeros up to the width of the cache, which change no score and no other output."""
        missing = self._attention.head_dim - heads.shape[3]
        return nn.functional.pad(heads, (0, missing)) if missing else heads


def load_model(
    config: TransformersConfig, ops: TensorOps, *, num_bytes: int, progress: bool
) -> TransformersModel:
    """Reads the weights as Transformers does.

    Args:
        num_bytes: of the weights in their files.
        progress: show Transformers' bar.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the model's, or memory is too small.
    """
    register(PAGED)
    loading = LoadingProgress(num_bytes, show=False)
    with quiet(progress=progress):
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                config.folder,
                dtype=ops.dtype,
                attn_implementation=PAGED,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a boundary: torch, safetensors and remote code raise all kinds
            raise ModelLoadError(
                f"Transformers cannot load the weights in {config.folder}: {first_line(error)}."
            ) from error
    causal, info = loaded
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"The weights in {config.folder} lack the tensor {missing[0]}{more}.")
    causal.requires_grad_(False).eval().to(ops.device)
    loading.add(num_bytes)
    loading.finish()
    ops.weight_bytes += causal.get_memory_footprint()
    logger.info(
        "%s has no description of its own here and runs through Transformers %s, eagerly, in %s",
        config.architecture, transformers.__version__, str(ops.dtype).removeprefix("torch."),
    )  # fmt: skip
    return TransformersModel(causal, config)


@torch.no_grad()
def forward(model: TransformersModel, ops: TensorOps, batch: Any) -> Tensor:
    """The hidden state after the final norm of every token in the batch: ``[tokens, hidden_size]``."""
    model.ops, model.batch = ops, batch
    count = batch.num_tokens
    # A model without rotary tables of ours: the rows of such tables are positions.
    ids, positions = (torch.as_tensor(array[:count]).long() for array in (batch.token_ids, batch.rope_rows))
    return model.split.hidden(ids, positions)


@torch.no_grad()
def logits(model: TransformersModel, ops: TensorOps, hidden: Tensor) -> Tensor:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: float32 ``[rows, vocab_size]``."""
    return model.split.logits(hidden).float()


def _attention(
    call: AttentionCall, module: nn.Module, config: TransformersConfig, group: int, place: int
) -> Attention:
    return Attention(
        group=group,
        place=place,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0,
        scale=call.scale,
        window=call.window or 0,
        soft_cap=call.soft_cap,
        sinks=getattr(module, call.sinks).detach().float() if call.sinks else None,
    )
