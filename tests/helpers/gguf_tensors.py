"""What llama.cpp's converter makes of the tensors of families whose layout it changes.

Source: ``GPT2Model``, ``MixtralModel`` (of ``LlamaModel``), ``Qwen2MoeModel`` and ``GptOssModel`` in
https://github.com/ggml-org/llama.cpp/tree/master/conversion. Names stay Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Tensors = Iterator[tuple[str, np.ndarray]]


def as_they_are(name: str, values: np.ndarray) -> Tensors:
    yield name, values


def gpt2_tensors(name: str, values: np.ndarray) -> Tensors:
    """Matrices of layers as [outputs, inputs]."""
    is_matrix = ".h." in name and values.ndim == 2
    yield name, values.T if is_matrix else values


def joined_expert_tensors(name: str, values: np.ndarray) -> Tensors:
    """All experts in stacks, as ``--fuse-gate-up-exps`` leaves them, and the gate of the shared one without
    its dimension of 1, as ``llama-quantize`` does."""
    is_stack = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    yield f"{name}.weight" if is_stack else name, values.reshape(values.shape[values.shape[0] == 1 :])


def expert_tensors(name: str, values: np.ndarray) -> Tensors:
    """Gates and ups of all experts in stacks of their own."""
    stem, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        inner = values.shape[1] // 2
        yield f"{stem}.gate_proj.weight", values[:, :inner]
        yield f"{stem}.up_proj.weight", values[:, inner:]
    elif part == "down_proj":
        yield f"{stem}.down_proj.weight", values
    else:
        yield name, values


def gpt_oss_tensors(name: str, values: np.ndarray) -> Tensors:
    """The same where gates and ups take turns, and matrices are [inputs, outputs]."""
    stem, _, part = name.rpartition(".")
    if part == "sinks":
        yield f"{name}.weight", values
    elif part in ("gate_up_proj", "gate_up_proj_bias"):
        rows = values if part.endswith("bias") else values.swapaxes(1, 2)
        suffix = "bias" if part.endswith("bias") else "weight"
        yield f"{stem}.gate_proj.{suffix}", rows[:, ::2]
        yield f"{stem}.up_proj.{suffix}", rows[:, 1::2]
    elif part == "down_proj":
        yield f"{stem}.down_proj.weight", values.swapaxes(1, 2)
    elif part == "down_proj_bias":
        yield f"{stem}.down_proj.bias", values
    else:
        yield name, values
