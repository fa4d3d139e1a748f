"""Where streamllm and Transformers meet: our attention by its name, and a model cut before its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

PAGED = "streamllm"
"""The name of our attention. No function that makes masks is registered under it, so models make none."""

ATTEND_HERE = "streamllm_attend"
"""The attribute of a module that says what its attention is: called with q ``[1, heads, tokens, dim]``, k, v,
the mask, and a dictionary of what else the model gives; returns ``[1, tokens, heads, value_dim]``."""


def register(name: str) -> None:
    """Makes our attention known to Transformers under ``name``."""
    AttentionInterface.register(name, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    """The signature of Transformers' attention functions; nothing wants to see the weights."""
    return getattr(module, ATTEND_HERE)(query, key, value, attention_mask, arguments), None


class SplitModel:
    """A causal model, cut between its last hidden states and its logits.

    The logits are those of the model's own forward (which may scale or cap them), in which its decoder
    answers what it is told to.

    Attributes:
        decoder: the module that makes hidden states.
    """

    def __init__(self, causal: PreTrainedModel):
        self._causal = causal
        decoder = causal.get_decoder()
        self.decoder = causal.base_model if decoder is causal else decoder
        self._run_decoder = self.decoder.forward
        self.decoder.forward = self._decode
        self._given: Tensor | None = None
        self._output_type: type[ModelOutput] = BaseModelOutputWithPast

    def hidden(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states ``[tokens, hidden_size]`` of int64 ``[tokens]`` ids at these positions.

        Args:
            mask: int64 ``[tokens]``, 1 for a token that counts; our attention needs none.
        """
        output = self.decoder(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=None if mask is None else mask[None],
            use_cache=False,
            return_dict=True,
        )
        self._output_type = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab_size]`` of hidden states ``[rows, hidden_size]``, which :meth:`hidden` once gave."""
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            output = self._causal(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        finally:
            self._given = None
        logits: Tensor = output.logits[0]
        return logits

    def _decode(self, *arguments: Any, **keywords: Any) -> Any:
        if self._given is None:
            return self._run_decoder(*arguments, **keywords)
        return self._output_type(last_hidden_state=self._given)


@contextlib.contextmanager
def quiet(*, progress: bool) -> Iterator[None]:
    """Keeps Transformers from logging what is no error and, without ``progress``, from drawing bars."""
    library = transformers.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    if not progress:
        library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """What an exception of another library says, short enough for a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]
