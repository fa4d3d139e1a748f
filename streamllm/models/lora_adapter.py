"""Reading adapters as the PEFT library saves them: a folder with ``adapter_config.json`` and
``adapter_model.safetensors`` (or ``.bin``).

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Each adapted layer has two tensors under
its name in the base model, ``lora_A.weight [rank, inputs]`` and ``lora_B.weight [outputs, rank]``; they alone
say which layers those are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.lora_targets import adaptable_matrices
from streamllm.models.mapped_tensor import MappedTensor
from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import stored_layout
from streamllm.models.safetensors_file import open_safetensors
from streamllm.models.tensor_source import TensorPart
from streamllm.models.torch_file import open_torch_file
from streamllm.ops.lora import LoraAdapter, LoraUpdate

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_MERGE = "Merge the adapter into the base model (PEFT's merge_and_unload) and serve that"
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the base model's own weights too."""


@dataclass(frozen=True)
class _Target:
    """Rows of a model's matrix that an adapter's layer changes.

    Attributes:
        matrix: its name in ``LoraAdapter.updates``.
        first_row, rows: one of its parts.
        columns: of the matrix.
        layer_rows: which rows of the adapter's layer they are.
    """

    matrix: str
    first_row: int
    rows: int
    columns: int
    layer_rows: slice


@dataclass(frozen=True)
class _Layer:
    """What an adapter holds for one layer of the base model.

    Attributes:
        key: what its tensors' names begin with.
        a, b: its tensors, as float32.
    """

    key: str
    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


def read_adapter(name: str, path: Path, config: ModelConfig, *, max_rank: int) -> LoraAdapter:
    """
    Args:
        name: what requests will call it.
        path: its folder.
        config: of the base model.
        max_rank: ranks above are refused.

    Raises:
        ModelLoadError: one line that names file, tensor and remedy: files are missing or damaged, the adapter
            is of a kind that is not supported, or does not fit the model.
    """
    config_path, weights_path = path / CONFIG, _weights_file(path)
    settings = _read_settings(config_path)
    open_file = open_torch_file if weights_path.suffix == ".bin" else open_safetensors
    # Whoever trains the adapter may write it anew at any time.
    tensors, targets = open_file(weights_path, copied=True), _targets(config)
    updates: dict[str, list[LoraUpdate]] = {}
    largest = 0
    for layer, stored in _by_layer(weights_path, tensors).items():
        known = targets.get(stored_layout(config.architecture).name_of(layer))
        if known is None:
            raise _unmatched(weights_path, layer, config)
        read = _read_layer(weights_path, layer, stored)
        rank = _check_layer(weights_path, read, known, max_rank)
        scale = settings.scale(layer, rank, weights_path)
        largest = max(largest, rank)
        for target in known:
            update = LoraUpdate(target.first_row, read.a, read.b[target.layer_rows] * np.float32(scale))
            updates.setdefault(target.matrix, []).append(update)
    if not updates:
        raise ModelLoadError(f"The adapter {weights_path} has no tensors (lora_A and lora_B of some layers).")
    return LoraAdapter(
        name, _digest(updates), largest, {matrix: tuple(found) for matrix, found in updates.items()}
    )


def _digest(updates: Mapping[str, Sequence[LoraUpdate]]) -> bytes:
    """Of all that outputs depend on, and nothing else."""
    content = hashlib.sha256()
    for matrix, found in sorted(updates.items()):
        for update in found:
            content.update(repr((matrix, update.first_row, update.a.shape, update.b.shape)).encode())
            content.update(update.a.tobytes())
            content.update(update.b.tobytes())
    return content.digest()


@dataclass(frozen=True)
class _Settings:
    """What of ``adapter_config.json`` makes a difference to the tensors' meaning."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool

    def scale(self, layer: str, rank: int, path: Path) -> float:
        """The factor of a layer's product, whose tensors have ``rank``."""
        expected = _by_pattern(self.ranks, layer, self.rank)
        if rank != expected:
            raise ModelLoadError(
                f"The tensors of {layer} in {path} have rank {rank}; by its {CONFIG} it must be {expected}."
            )
        alpha = _by_pattern(self.alphas, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _by_pattern(values: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """The value of the first pattern that fits a layer's name, or its end from a dot on."""
    for pattern, value in values.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer):
            return value
    return otherwise


def _read_settings(path: Path) -> _Settings:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(
            f"The adapter's {path} cannot be read: {error.strerror or error}. An adapter is a folder as PEFT "
            "saves it."
        ) from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must be a JSON object.")
    _check_kind(path, values)
    settings = _Settings(
        rank=values.get("r", 8),
        alpha=values.get("lora_alpha", 8),
        ranks=values.get("rank_pattern") or {},
        alphas=values.get("alpha_pattern") or {},
        by_root=bool(values.get("use_rslora")),
    )
    for field, given, kind in (
        ("r", [settings.rank], int),
        ("lora_alpha", [settings.alpha], (int, float)),
        ("rank_pattern", _values_of(settings.ranks), int),
        ("alpha_pattern", _values_of(settings.alphas), (int, float)),
    ):
        if any(isinstance(value, bool) or not isinstance(value, kind) for value in given):
            raise ModelLoadError(f"{path}: {field} must hold numbers, got {values.get(field)!r}.")
    for pattern in [*settings.ranks, *settings.alphas]:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadError(f"{path}: the pattern {pattern!r} is no regular expression.") from error
    return settings


def _values_of(patterns: Any) -> list[Any]:
    return list(patterns.values()) if isinstance(patterns, dict) else [None]


def _check_kind(path: Path, values: Mapping[str, Any]) -> None:
    """
    Raises:
        ModelLoadError: the adapter is more, or something else, than a low-rank sum.
    """
    if (kind := values.get("peft_type", "LORA")) != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {kind}; only LORA is supported.")
    if (bias := values.get("bias", "none")) != "none" or values.get("lora_bias"):
        field = f"bias {bias!r}" if bias != "none" else "lora_bias"
        raise ModelLoadError(
            f"{path}: adapters with biases ({field}) are not supported; train with bias='none'."
        )
    for field, kind in (
        ("use_dora", "DoRA"),
        ("modules_to_save", "trained copies of whole layers"),
        ("target_parameters", "adapters of parameters that are no layer"),
        ("trainable_token_indices", "trained token embeddings"),
        ("layer_replication", "replicated layers"),
        ("alora_invocation_tokens", "activated LoRA"),
        ("use_qalora", "QALoRA"),
        ("megatron_config", "Megatron's layers"),
    ):
        if values.get(field):
            raise ModelLoadError(
                f"{path}: {field} is {json.dumps(values[field])}; {kind} are not supported. {_MERGE}."
            )
    initialised = values.get("init_lora_weights", True)
    if isinstance(initialised, str) and initialised.lower().startswith(_CHANGES_BASE):
        raise ModelLoadError(
            f"{path}: init_lora_weights is {initialised!r}, which changes the base model's weights too; save "
            "the adapter converted to plain LoRA (PEFT's path_initial_model_for_weight_conversion)."
        )


def _weights_file(folder: Path) -> Path:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        raise ModelLoadError(f"There is no folder {folder}; an adapter is a folder as PEFT saves it.")
    raise ModelLoadError(f"The folder {folder} holds no adapter: neither {' nor '.join(_WEIGHTS)}.")


def _by_layer(path: Path, tensors: Mapping[str, MappedTensor]) -> dict[str, dict[str, MappedTensor]]:
    """The tensors of each layer by side, ``"A"`` and ``"B"``; layers by their names in the base model."""
    layers: dict[str, dict[str, MappedTensor]] = {}
    for key, tensor in tensors.items():
        match = _LORA_KEY.fullmatch(key)
        if match is None:
            raise ModelLoadError(
                f"The adapter {path} has the tensor {key}, which is no lora_A or lora_B of a layer. {_MERGE}."
            )
        layers.setdefault(match["layer"].removeprefix(_PREFIX), {})[match["side"]] = tensor
    for layer, found in layers.items():
        if len(found) != 2:
            missing = "B" if "A" in found else "A"
            raise ModelLoadError(f"The adapter {path} lacks the tensor lora_{missing}.weight of {layer}.")
    return layers


def _read_layer(path: Path, layer: str, stored: Mapping[str, MappedTensor]) -> _Layer:
    values = {}
    for side, tensor in stored.items():
        name = f"{layer}.lora_{side}.weight"
        if len(tensor.shape) != 2:
            raise ModelLoadError(f"The tensor {name} in {path} has shape {list(tensor.shape)}: no matrix.")
        values[side] = np.array(tensor.values(name), np.float32)
        if not np.isfinite(values[side]).all():
            raise ModelLoadError(f"The tensor {name} in {path} holds numbers that are not finite.")
    return _Layer(layer, values["A"], values["B"])


def _check_layer(path: Path, layer: _Layer, targets: list[_Target], max_rank: int) -> int:
    """The layer's rank.

    Raises:
        ModelLoadError: shapes are not the base model's, or the rank is too large.
    """
    rank, rows, columns = len(layer.a), sum(target.rows for target in targets), targets[0].columns
    if rank < 1 or layer.a.shape != (rank, columns) or layer.b.shape != (rows, rank):
        raise ModelLoadError(
            f"The tensors of {layer.key} in {path} have shapes {list(layer.a.shape)} (lora_A) and "
            f"{list(layer.b.shape)} (lora_B); for this model they must be [rank, {columns}] and "
            f"[{rows}, rank]. The adapter was made for another base model."
        )
    if rank > max_rank:
        raise ModelLoadError(
            f"The adapter {path} has rank {rank} ({layer.key}); --max-lora-rank allows {max_rank}. Raise it "
            f"to {rank}."
        )
    return rank


def _unmatched(path: Path, layer: str, config: ModelConfig) -> ModelLoadError:
    start = f"The adapter {path} changes the layer {layer}"
    if layer.rpartition(".")[2] in ("embed_tokens", "lm_head", "wte", "wpe"):
        return ModelLoadError(
            f"{start}; adapters of the embedding and the head are not supported. Train it without them "
            f"(target_modules). {_MERGE}."
        )
    if ".experts" in layer:
        return ModelLoadError(
            f"{start}; adapters of experts are not supported. Train it without them (target_modules). "
            f"{_MERGE}."
        )
    return ModelLoadError(
        f"{start}, which this model ({config.architecture} with {config.num_layers} layers) does not have. "
        "The adapter was made for another base model."
    )


def _targets(config: ModelConfig) -> dict[str, list[_Target]]:
    """What the adaptable layers of a model are, by the names that adapters call them."""
    sources = stored_layout(config.architecture).sources(config, cast(Checkpoint, _NoFiles()))
    targets: dict[str, list[_Target]] = {}
    for matrix in adaptable_matrices(config):
        first_row = 0
        for part, rows in matrix.parts:
            source, layer, layer_rows = sources.get(f"{part}.weight"), part, slice(None)
            if isinstance(source, TensorPart):
                # The base model's own layer, where it is another one: several parts may come from it.
                layer, layer_rows = source.name.removesuffix(".weight"), source.rows
            target = _Target(matrix.name, first_row, rows, matrix.columns, layer_rows)
            targets.setdefault(layer, []).append(target)
            first_row += rows
    return targets


class _NoFiles:
    """A checkpoint without tensors: the layers of a family's own folders are meant."""

    def has(self, name: str) -> bool:
        return False
