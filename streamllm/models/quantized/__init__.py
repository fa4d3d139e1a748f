"""Checkpoints of Hugging Face whose matrices are quantised, by the ``quantization_config`` that says how.

What one matrix comes to is made of several stored tensors under the name that its floats would have
(``model.layers.0.mlp.up_proj.weight``). Which matrices are quantised the files show: those that the config
leaves out (heads, routers, what ``ignore`` or ``modules_to_not_convert`` lists) are stored under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import ConfigFields
from streamllm.models.quantized import fp8
from streamllm.models.quantized.awq import AWQ
from streamllm.models.quantized.compressed_tensors import CompressedTensors
from streamllm.models.quantized.gptq import GPTQ
from streamllm.models.quantized.refusals import unsupported
from streamllm.models.stored_layout import ArrangedCheckpoint, Sources

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

QUANTIZATION_FIELDS = ("quantization", "quantization_config", "compression_config")
"""Where a config says that weights are quantised: the first is MLX's, the last an older name."""


class Scheme(Protocol):
    """What a ``quantization_config`` says, understood."""

    def sources(self, checkpoint: Checkpoint) -> Sources:
        """Every quantised matrix of the files, under the name that its floats would have.

        Raises:
            ModelLoadError: tensors that cannot be what the config says.
        """


_SCHEMES: dict[str, Callable[[ConfigFields], Scheme]] = {
    "gptq": GPTQ.read,
    "awq": AWQ.read,
    "compressed-tensors": CompressedTensors.read,
}
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older files say it, beside a ``config.json`` that does not."""


@dataclass(frozen=True)
class Quantization:
    """
    Attributes:
        method: ``quant_method``.
        fields: of the ``quantization_config``.
    """

    method: str
    fields: ConfigFields


def find_quantization(fields: ConfigFields) -> Quantization | None:
    """What a folder's ``config.json`` (or a file beside it) says; ``None`` where weights are not quantised.

    Raises:
        ModelLoadError: a file that cannot be read.
    """
    text = fields.get("text_config")
    for values in (fields.values, text if isinstance(text, dict) else {}):
        for name in QUANTIZATION_FIELDS:
            if said := values.get(name):
                said = said if isinstance(said, dict) else {}
                method = said.get("quant_method", "mlx" if name == "quantization" else "?")
                return Quantization(str(method).lower(), ConfigFields(fields.path, said))
    for name, method in _OWN_FILES.items():
        if (path := fields.path.with_name(name)).is_file():
            return Quantization(method, ConfigFields.read(path))
    return None


def check_quantization(quantization: Quantization) -> None:
    """
    Raises:
        ModelLoadError: nobody reads it.
    """
    if quantization.method in _SCHEMES or not fp8.handles(quantization.fields.values):
        _scheme(quantization)


def refused(quantization: Quantization, where: str = "") -> ModelLoadError:
    """The error of a method that is not read, or not for models ``where`` they are used."""
    return unsupported(quantization.fields.path, f"weights quantised with {quantization.method!r}{where} are")


def _scheme(quantization: Quantization) -> Scheme:
    if quantization.method not in _SCHEMES:
        raise refused(quantization)
    return _SCHEMES[quantization.method](quantization.fields)


def with_quantised_matrices(
    files: Checkpoint, folder: Path, *, known: frozenset[str] = frozenset()
) -> Checkpoint:
    """The tensors of a folder with its quantised matrices in one piece each; ``files`` where there are none.

    Args:
        known: methods whose tensors somebody else puts together.

    Raises:
        ModelLoadError: nobody reads them, or tensors are missing or contradict the ``quantization_config``.
    """
    quantization = find_quantization(ConfigFields.read(folder / "config.json"))
    if quantization is not None and quantization.method in known:
        return files
    sources = _sources(quantization, files, folder)
    if not sources:
        return files
    for name, source in sources.items():
        _check(files, folder, name, source.stored)
    parts = {stored for source in sources.values() for stored in source.stored}
    return ArrangedCheckpoint(files, sources, (files.names() - parts) | set(sources))


def _sources(quantization: Quantization | None, files: Checkpoint, folder: Path) -> Sources:
    if quantization is None:
        return fp8.sources(None, files, folder)
    values: Mapping[str, Any] = quantization.fields.values
    if not fp8.handles(values):
        return _scheme(quantization).sources(files)
    sources = fp8.sources(values, files, folder)
    if quantization.method in _SCHEMES:
        sources.update(_scheme(quantization).sources(files))
    return sources


def _check(files: Checkpoint, folder: Path, name: str, stored: Mapping[str, tuple[int, ...]]) -> None:
    for part, expected in stored.items():
        if not files.has(part):
            raise ModelLoadError(
                f"The weights in {folder} lack the tensor {part}, a part of the quantised {name}."
            )
        actual = files.shape(part)
        if actual != expected:
            raise ModelLoadError(
                f"The tensor {part} in {folder} has shape {list(actual)}; by the quantization_config and the "
                f"other parts of {name} it must be {list(expected)}."
            )
