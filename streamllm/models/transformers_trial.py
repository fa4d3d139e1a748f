"""What a model of Transformers asks of attention, found out by running it on shapes alone.

A config does not say which layers attend, over which window, with which scale: the code of the model does.
So the model is made without memory (torch's meta device) and run once over a few tokens that have no values;
each layer's call of the attention interface is noted, with the mask that the model made for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from streamllm.models.transformers_config import NO_INTERFACE, AttentionCall, UnsupportedModelError
from streamllm.models.transformers_interface import ATTEND_HERE, SplitModel, first_line, quiet, register

TRIAL = "streamllm-trial"
"""Our attention's name in a trial: under this one models make masks, which say what a row may see."""

NUM_TOKENS = 4
FAR = 2**20
"""A position that no window and no chunk of a real model lies around by chance."""

_KNOWN_TENSORS = frozenset(["position_ids", "cache_position", "s_aux"])
"""Tensors that an attention function may be given besides q, k, v and the mask, and that we know about."""


@dataclass(frozen=True)
class Trial:
    """What a trial finds: the calls in the order of the layers, and the widths of the ends."""

    calls: list[AttentionCall]
    hidden_size: int
    vocab_size: int


def try_on_shapes(config: Any, trust_remote_code: bool) -> Trial:
    """
    Args:
        config: Transformers' config of a causal model.

    Raises:
        UnsupportedModelError: paged attention cannot carry the model.
    """
    register(TRIAL)
    AttentionMaskInterface.register(TRIAL, _noted_mask)
    try:
        with torch.device("meta"), quiet(progress=False):
            causal = AutoModelForCausalLM.from_config(
                config,
                # Transformers' product over experts takes no float32 on this device.
                dtype=torch.bfloat16,
                attn_implementation=TRIAL,
                trust_remote_code=trust_remote_code,
            ).eval()
            return _run(causal)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a boundary: the code of any model
        if isinstance(error, KeyError) and error.args == (TRIAL,):
            raise UnsupportedModelError(NO_INTERFACE) from error
        raise UnsupportedModelError(f"its code fails in a trial ({first_line(error)})") from error


def _run(causal: PreTrainedModel) -> Trial:
    if getattr(causal, "_is_stateful", False):
        raise UnsupportedModelError("it has a recurrent state besides its keys and values")
    split, notes = SplitModel(causal), CallNotes(causal)
    if "position_ids" not in inspect.signature(type(split.decoder).forward).parameters:
        raise UnsupportedModelError("its decoder takes no position_ids")
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64, device="meta")
    with ShapesOnly(), _no_autocast(), torch.no_grad():
        # Without a mask Transformers looks for several sequences in the row, by its positions.
        hidden = split.hidden(ids, ids, torch.ones_like(ids))
        notes.are_complete = True
        logits = split.logits(hidden)
    return Trial(notes.calls, hidden.shape[-1], logits.shape[-1])


class CallNotes:
    """Notes the attention calls of a model.

    Attributes:
        calls: one a layer, in their order.
        are_complete: another call would be one too many.
    """

    def __init__(self, model: PreTrainedModel):
        self.calls: list[AttentionCall] = []
        self.are_complete = False
        for name, module in model.named_modules():
            setattr(module, ATTEND_HERE, functools.partial(self._note, name, module))

    def _note(
        self,
        name: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> Tensor:
        if self.are_complete:
            raise UnsupportedModelError("its logits are not made from its decoder's hidden states")
        unknown = [
            argument
            for argument, given in arguments.items()
            if isinstance(given, Tensor) and argument not in _KNOWN_TENSORS
        ]
        if unknown:
            raise UnsupportedModelError(f"its attention ({name}) depends on {', '.join(unknown)}")
        if any(call.module == name for call in self.calls):
            raise UnsupportedModelError(f"its attention {name} is called more than once a forward")
        if {query.shape[2], key.shape[2], value.shape[2]} != {NUM_TOKENS}:
            raise UnsupportedModelError(f"its attention {name} sees other keys than those of its tokens")
        window = arguments.get("sliding_window") or None
        _check_mask(name, module, mask, window, arguments)
        scale = arguments.get("scaling")
        self.calls.append(
            AttentionCall(
                module=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=window,
                soft_cap=float(arguments.get("softcap") or 0.0),
                sinks=_parameter_name(name, module, arguments.get("s_aux")),
            )
        )
        return query.new_empty(1, NUM_TOKENS, query.shape[1], value.shape[3])


class ShapesOnly(TorchDispatchMode):
    """Lets code go on that looks at values where there are only shapes: experts that no token chose, tests
    that are true."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Lets code go on that switches autocast off for the device of its tensors: this one has none."""
    former = torch.autocast
    torch.autocast = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = former  # type: ignore[misc]


def _noted_mask(*, batch_size: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """A mask without values that remembers its function."""
    mask = torch.empty(batch_size, 1, kv_length, kv_length, dtype=torch.bool, device="meta")
    mask.streamllm_function = mask_function  # type: ignore[attr-defined]
    return mask


def _check_mask(
    name: str, module: nn.Module, mask: Any, window: int | None, arguments: dict[str, Any]
) -> None:
    """
    Raises:
        UnsupportedModelError: the layer does not see exactly the last ``window`` positions, or all.
    """
    if mask is None:
        is_causal = arguments.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise UnsupportedModelError(f"its attention {name} is not causal")
        return
    function = getattr(mask, "streamllm_function", None)
    if function is None:
        raise UnsupportedModelError(f"its attention {name} has a mask of its own")
    expected = {FAR: True, FAR + 1: False, FAR - (window or FAR) + 1: True}
    if window:
        expected[FAR - window] = False
    try:
        seen = {key: _sees(function, FAR, key) for key in expected}
    except (NotImplementedError, RuntimeError, IndexError):  # a mask that depends on the tokens
        seen = {}
    if seen != expected:
        kind = f"a window of {window} positions" if window else "all positions before a token"
        raise UnsupportedModelError(f"its attention {name} does not see exactly {kind}")


def _sees(function: Any, row: int, position: int) -> bool:
    first, row_index, position_index = torch.tensor([0, row, position], device="cpu")
    return bool(function(first, first, row_index, position_index))


def _parameter_name(name: str, module: nn.Module, sinks: Tensor | None) -> str | None:
    if sinks is None:
        return None
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return parameter_name
    raise UnsupportedModelError(f"its attention {name} has sinks that are no parameter")
