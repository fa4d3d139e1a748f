"""The config of a model that streamllm has no description of, and that runs through Transformers.

Nothing here imports torch or transformers before such a model is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import ConfigFields
from streamllm.models.model_config import ModelConfig

INSTALL = "pip install 'streamllm[gpu]'"
HEAD_MULTIPLE = 8
"""Heads are widened to a multiple of it: what the kernels take."""

_LAYER_TYPES = frozenset(["full_attention", "sliding_attention"])
_PER_SEQUENCE_ROPES = frozenset(["dynamic", "longrope"])
"""Rotary embeddings whose angles Transformers chooses by the longest sequence of a batch."""


_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

NO_INTERFACE = "it does not attend through Transformers' attention interface"


class UnsupportedModelError(Exception):
    """Why a model cannot run through paged attention: the end of a sentence."""


@dataclass(frozen=True)
class AttentionCall:
    """How one layer attends.

    Attributes:
        module: the name of the module that calls the attention function.
        num_heads, num_kv_heads: heads of q, and of k and v.
        key_dim, value_dim: width of a head of q and k, and of v.
        scale: factor of the scores.
        window: positions that a row sees, its own included; ``None`` for all before it.
        soft_cap: 0 for none.
        sinks: the module's parameter ``[num_heads]`` that joins each head's softmax, or ``None``.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float
    sinks: str | None


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """A model that Transformers runs. ``head_dim`` is that of the KV cache.

    Attributes:
        folder: with config.json and the weights.
        trust_remote_code: code in the folder may run.
        attention: how each layer attends.
        rope_factor: what the scaling of the rotary embedding multiplies ``max_position_embeddings`` by.
    """

    through_transformers: ClassVar[bool] = True

    folder: Path
    trust_remote_code: bool
    attention: tuple[AttentionCall, ...]
    rope_factor: float = 1.0

    @property
    def context_length(self) -> int:
        return int(self.max_position_embeddings * self.rope_factor)


def read_transformers_config(fields: ConfigFields, *, trust_remote_code: bool) -> TransformersConfig:
    """Reads a ``config.json`` as Transformers does, and tries the model on shapes.

    Args:
        trust_remote_code: code in the folder may run, if Transformers has none for the model.

    Raises:
        ModelLoadError: Transformers is not installed or does not know the model, or paged attention cannot
            carry it.
    """
    architectures = fields.get("architectures")
    architecture = ", ".join(map(str, architectures or [fields.get("model_type")]))
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ModelLoadError(
                f"{fields.path}: {architecture} has no description of its own; install `{INSTALL}` to run it "
                "through Transformers."
            )
    # Torch's idle threads else spin, where others want the cores: ours in attention, and other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    trust_remote_code = _needs_remote_code(fields, architecture, trust_remote_code)
    config = _auto_config(fields, trust_remote_code)
    try:
        return _checked(fields, architecture, config, trust_remote_code)
    except UnsupportedModelError as error:
        raise ModelLoadError(
            f"{fields.path}: {architecture} is not supported: it has no description of its own, and through "
            f"Transformers it cannot run: {error}."
        ) from error


def _needs_remote_code(fields: ConfigFields, architecture: str, trust_remote_code: bool) -> bool:
    """Whether the model's code is the folder's own.

    Raises:
        ModelLoadError: it is, and may not run; or there is no code for the model at all.
    """
    import transformers

    model_type, auto_map = fields.get("model_type"), fields.get("auto_map")
    if isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING:
        return False
    code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    if not isinstance(code, str):
        raise ModelLoadError(
            f"{fields.path}: {architecture} is not supported: neither streamllm nor Transformers "
            f"{transformers.__version__} knows the model_type {model_type!r}."
        )
    if not trust_remote_code:
        raise ModelLoadError(
            f"{fields.path}: {architecture} is code that comes with the model ({code.split('.')[0]}.py); run "
            "it with --trust-remote-code if you trust its authors."
        )
    return True


def _auto_config(fields: ConfigFields, trust_remote_code: bool) -> Any:
    """Transformers' own config object."""
    import transformers

    from streamllm.models.transformers_interface import first_line, quiet

    try:
        with quiet(progress=False):
            return transformers.AutoConfig.from_pretrained(
                fields.path.parent, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # a boundary: configs check themselves in many ways, and may be remote code
        raise ModelLoadError(f"{fields.path}: Transformers cannot read it ({first_line(error)}).") from error


def _check_kind(config: Any, text: Any, trust_remote_code: bool) -> None:
    """
    Raises:
        UnsupportedModelError: by its config the model is no decoder of paged attention's kind.
    """
    import transformers

    has_other_head = any(name.endswith(_OTHER_HEADS) for name in config.architectures or ())
    is_known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if has_other_head or not (trust_remote_code or is_known):
        raise UnsupportedModelError("it is no causal language model")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder with a decoder")
    strange = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if strange:
        raise UnsupportedModelError(
            f"it has layers of other kinds than attention ({', '.join(sorted(strange))})"
        )
    ropes = {rope.get("rope_type", rope.get("type")) for rope in _ropes(text)} & _PER_SEQUENCE_ROPES
    if ropes:
        raise UnsupportedModelError(
            f"its rotary embedding ({ropes.pop()}) would follow the longest sequence of a batch"
        )


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary embeddings of a config: one object, or one a kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(parameters, dict):
        yield parameters
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _checked(
    fields: ConfigFields, architecture: str, config: Any, trust_remote_code: bool
) -> TransformersConfig:
    from streamllm.models.hf_config import read_generation_config
    from streamllm.models.transformers_trial import try_on_shapes

    text = config.get_text_config(decoder=True)
    _check_kind(config, text, trust_remote_code)
    trial = try_on_shapes(config, trust_remote_code)
    _check_layers(trial.calls, getattr(text, "num_hidden_layers", None))
    first, length = trial.calls[0], getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise fields.wrong("max_position_embeddings", "a positive integer")
    eos, default_sampling = read_generation_config(fields.path.parent)
    bos = _ids(text.bos_token_id)
    return TransformersConfig(
        architecture=architecture,
        vocab_size=trial.vocab_size,
        hidden_size=trial.hidden_size,
        num_layers=len(trial.calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=-(-max(first.key_dim, first.value_dim) // HEAD_MULTIPLE) * HEAD_MULTIPLE,
        max_position_embeddings=length,
        ropes=(),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        layer_windows=tuple(call.window for call in trial.calls),
        eos_token_ids=tuple(dict.fromkeys(_ids(text.eos_token_id) + eos)),
        bos_token_id=bos[0] if bos else None,
        default_sampling=default_sampling,
        folder=fields.path.parent,
        trust_remote_code=trust_remote_code,
        attention=tuple(trial.calls),
        rope_factor=_rope_factor(text, length),
    )


def _check_layers(calls: list[AttentionCall], num_layers: int | None) -> None:
    """
    Raises:
        UnsupportedModelError: not every layer attends through the interface, or not all alike.
    """
    if not calls:
        raise UnsupportedModelError(NO_INTERFACE)
    if num_layers not in (None, len(calls)):
        raise UnsupportedModelError(
            f"{len(calls)} of its {num_layers} layers attend through Transformers' attention interface, and "
            "all must"
        )
    for field in ("num_heads", "num_kv_heads", "key_dim", "value_dim"):
        sizes = sorted({getattr(call, field) for call in calls})
        if len(sizes) > 1:
            raise UnsupportedModelError(f"its layers differ in {field} ({', '.join(map(str, sizes))})")


def _rope_factor(text: Any, length: int) -> float:
    """vLLM's rule, as in :attr:`ModelConfig.context_length`."""
    for rope in _ropes(text):
        factor = rope.get("factor") or 1.0
        rope_type = rope.get("rope_type", rope.get("type"))
        if rope_type == "linear":
            return float(factor)
        if rope_type == "yarn":
            return float((rope.get("original_max_position_embeddings") or length) * factor / length)
    return 1.0


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(item for item in ids if isinstance(item, int) and item >= 0)
