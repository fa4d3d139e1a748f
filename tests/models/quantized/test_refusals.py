"""Quantised checkpoints that cannot be read: each refused by name, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import integer_checkpoints as written
from helpers.integer_checkpoints import Quantised, edit_config, save_quantised
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.sources.model_files import ModelFiles

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
UP = "model.layers.1.mlp.up_proj"
INSTEAD = r"\(with --quantization int8\) or a GGUF of it"


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**config, "config_groups": {"group_0": group}, **changes}


def open_folder(path: Path) -> Checkpoint:
    files = ModelFiles(name="m", served_name="m", kind="folder", path=path)
    return open_checkpoint(files, ModelConfig.from_files(files))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, f"'bitsandbytes' are not supported. Use .* {INSTEAD}"),
    ({"quant_method": "aqlm"}, "'aqlm' are not supported"),
    ({"bits": 4}, r"'\?' are not supported"),
    ({**GPTQ, "bits": 3}, rf"GPTQ with bits 3 \(not 4 or 8\) is not supported. Use .* {INSTEAD}"),
    ({**GPTQ, "bits": 2}, "GPTQ with bits 2 .* not supported"),
    ({**GPTQ, "bits": "4"}, "bits must be a positive integer, got '4'"),
    ({**GPTQ, "group_size": 0}, "group_size must be a positive integer, got 0"),
    ({"quant_method": "gptq", "bits": 4}, "has no group_size"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin' is not supported; supported are gptq, gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "repacked for Marlin is not supported"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}, "+:down": {"bits": 8}}}, r"other bits .*\(dynamic '\+:down'\)"),
    ({**AWQ, "bits": 8}, r"AWQ with bits 8 \(not 4\) is not supported"),
    ({**AWQ, "version": "gemv"}, r"AWQ in the layout 'gemv' \(not gemm or exllama\) is not supported"),
    ({**AWQ, "version": "marlin"}, "AWQ in the layout 'marlin'"),
    (compressed({"num_bits": 2}), "config_groups.group_0 with num_bits 2 .* is not supported"),
    (compressed({"strategy": "block"}), "group_0 with the strategy 'block' .* is not supported"),
    (compressed({"group_size": None}), "has the strategy 'group' and no group_size"),
    (compressed({"symmetric": "no"}), "symmetric must be true or false"),
    (compressed(format="marlin-24"), "in the format 'marlin-24' is not supported"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights .*'sparse-24-bitmask'"),
    (compressed(transform_config={"config_groups": {"a": {}}}), "a transform_config .* is not supported"),
    (compressed(config_groups={}), "config_groups must be an object with at least one group"),
    (compressed(config_groups={"g": {"targets": ["Linear"]}}), "g without quantised weights is not"),
    (compressed(config_groups={"g": {"targets": "Linear", "weights": WEIGHTS}}), "targets must be a list"),
    (compressed(config_groups={"g": {"targets": ["re:("], "weights": WEIGHTS}}), r"the pattern 're:\('"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_the_config_says(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelLoadError, match=message):
        open_folder(tmp_path)


def test_scales_for_the_kv_cache_are_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, quantization_config=compressed(kv_cache_scheme={"num_bits": 8}))
    with caplog.at_level("INFO", "streamllm.models"):
        open_folder(tmp_path)
    assert "--kv-cache-dtype decides" in caplog.text


def test_models_that_run_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "quantization_config": GPTQ}))
    with pytest.raises(
        ModelLoadError, match=r"'gptq' in models that run through Transformers are not supported"
    ):
        open_folder(tmp_path)


def quantise(weight: np.ndarray) -> Quantised:
    return written.quantise(weight, 4, 32, symmetric=True, coarse_scales=True)


LAYOUTS = {
    "gptq": (written.gptq(4), GPTQ),
    "awq": (written.awq, AWQ),
    "packed": (written.pack_quantized(4, index=True), compressed()),
}
ABSENT = torch.empty(0)
SPOILED: list[tuple[str, str, torch.Tensor, str]] = [
    ("gptq", "scales", ABSENT, f"lack the tensor {UP}.scales, a part of the quantised {UP}.weight"),
    ("gptq", "scales", torch.zeros(3, 96), r"up_proj.scales in .* has shape \[3, 96\]; .* must be \[2, 96\]"),
    ("gptq", "qzeros", torch.zeros(1, 12, dtype=torch.int32), r"up_proj.qzeros .* \[1, 12\]; .* \[2, 12\]"),
    ("gptq", "qweight", torch.zeros(8, 88, dtype=torch.int32), r"up_proj.qzeros .* must be \[2, 11\]"),
    (
        "gptq",
        "qweight",
        torch.zeros(8, dtype=torch.int32),
        r"up_proj.qweight has shape \[8\]; .* rows and columns",
    ),
    (
        "gptq",
        "g_idx",
        torch.zeros(63, dtype=torch.int32),
        r"g_idx has shape \[63\]; its matrix has 64 columns",
    ),
    ("gptq", "g_idx", torch.full((64,), 2, dtype=torch.int32), "groups from 2 to 2; by the .* there are 2"),
    ("gptq", "g_idx", torch.zeros(64), "g_idx has the type float32; codes of quantised weights are integers"),
    ("awq", "scales", torch.zeros(4, 96), r"up_proj.scales in .* \[4, 96\]; .* must be \[2, 96\]"),
    ("awq", "qzeros", ABSENT, f"lack the tensor {UP}.qzeros"),
    ("packed", "weight_scale", torch.zeros(96, 1), r"weight_scale in .* \[96, 1\]; .* must be \[96, 2\]"),
    ("packed", "weight_shape", torch.tensor([96, 72]), r"weight_shape says \[96, 72\], which is no shape of"),
    ("packed", "weight_shape", torch.tensor([96]), "weight_shape says"),
    ("packed", "weight_packed", torch.zeros(96, 8), "the type float32; codes"),
]


@pytest.mark.parametrize(("layout", "part", "tensor", "message"), SPOILED)
def test_tensors_that_contradict_the_config(
    tmp_path: Path, layout: str, part: str, tensor: torch.Tensor, message: str
) -> None:
    write, config = LAYOUTS[layout]
    made = save_quantised(tmp_path, write, config, quantise)
    tensors = load_file(made.path / "model.safetensors")
    tensors[f"{UP}.{part}"] = tensor
    if tensor is ABSENT:
        del tensors[f"{UP}.{part}"]
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        open_folder(made.path).read(f"{UP}.weight")


def test_a_model_of_another_size(tmp_path: Path) -> None:
    made = save_quantised(tmp_path, *LAYOUTS["gptq"], quantise)
    edit_config(made.path, intermediate_size=128)
    with pytest.raises(
        ModelLoadError, match=r"mlp.gate_proj.weight in .* has shape \[96, 64\]; .* \[128, 64\]"
    ):
        open_folder(made.path)


def test_a_matrix_that_no_target_covers(tmp_path: Path) -> None:
    config = compressed()
    config["config_groups"] = {
        name: {"targets": [target], "weights": WEIGHTS}
        for name, target in (("a", "re:.*self_attn.*"), ("b", "model.layers.0.mlp.up_proj"))
    }
    made = save_quantised(tmp_path, written.pack_quantized(4), config, quantise)
    with pytest.raises(
        ModelLoadError, match=r"no target in .* config_groups covers model\.layers\.0\.mlp\.down"
    ):
        open_folder(made.path)
