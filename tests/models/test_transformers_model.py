"""Models that Transformers runs through our attention, against Transformers' own."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import new_runner
from helpers.drive import generate
from helpers.transformers_models import CHEAP, OTHERS, WINDOW, make_other_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.transformers_config import TransformersConfig
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

# Around a window, a block, and the chunks that a budget of 50 tokens cuts prompts into.
LENGTHS = [1, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 49, 50, 51, 75]


def read(folder: Path) -> TransformersConfig:
    config = ModelConfig.from_files(files_of(folder))
    assert isinstance(config, TransformersConfig)
    return config


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(name=folder.name, served_name=folder.name, kind="folder", path=folder)


def new_other_runner(
    folder: Path, backend: str = "cpu", config: ModelConfig | None = None, **changes
) -> ModelRunner:
    settings = {
        "block_size": 16,
        "num_blocks": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        "kv_cache_dtype": "float32",
        "max_model_len": 512,
        "threads": 1,
        "progress": False,
        **changes,
    }
    config = config or read(folder)
    return new_runner(config, open_checkpoint(files_of(folder), config), backend=backend, **settings)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """name -> (the model in Transformers, its folder)."""
    made: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (make_other_model(folder, name), folder)
        return made[name]

    return get


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CHEAP else pytest.mark.slow) for name in OTHERS]
)
def test_logits_equal_transformers(model_of, name, backend):
    reference, folder = model_of(name)
    runner = new_other_runner(folder, backend)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 320, length).tolist() for length in LENGTHS]
    with torch.inference_mode():
        for run in generate(runner, prompts, max_tokens=4, budget=50):
            expected = reference(torch.tensor([run.tokens[:-1]])).logits[0, len(run.prompt) - 1 :].numpy()
            np.testing.assert_allclose(np.array(run.logits), expected, atol=1e-4)
            for row, token in zip(expected, run.output, strict=True):
                assert row.max() - row[token] < 1e-4
    runner.close()


def test_what_the_trial_finds_is_what_the_model_does(model_of):
    config = read(model_of("cohere2")[1])
    assert config.architecture == "Cohere2ForCausalLM"
    assert config.layer_windows == (WINDOW, WINDOW, None)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.context_length) == (320, 64, 1024)
    assert (config.bos_token_id, config.eos_token_ids) == (0, (2,))
    latent = read(model_of("deepseek-v3")[1])
    assert [(call.key_dim, call.value_dim) for call in latent.attention] == [(20, 12)] * 3
    assert latent.head_dim == 24


def test_a_start_says_who_runs_the_model(model_of, caplog):
    with caplog.at_level(logging.INFO, "streamllm"):
        runner = new_other_runner(model_of("cohere2")[1])
    (line,) = [record.getMessage() for record in caplog.records if "Transformers" in record.getMessage()]
    assert line.startswith("Cohere2ForCausalLM has no description of its own here and runs through")
    parameters = sum(p.numel() for p in model_of("cohere2")[0].parameters())
    assert runner.weight_bytes >= 4 * parameters
    runner.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"lack the tensor model\.layers\.1\.mlp",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            "Transformers cannot load the weights",
        ),
    ],
)
def test_broken_weights_are_refused_in_a_line(model_of, tmp_path, change, message):
    folder = model_of("cohere2")[1]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=message) as caught:
        new_other_runner(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused_in_a_line(model_of, tmp_path):
    folder = model_of("cohere2")[1]
    data = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="cut short"):
        new_other_runner(tmp_path)


REMOTE_CODE = """
import torch
from transformers import Cohere2Config, Cohere2ForCausalLM


class OwnConfig(Cohere2Config):
    model_type = "own-type"


class OwnForCausalLM(Cohere2ForCausalLM):
    config_class = OwnConfig

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        output.logits = -output.logits
        return output
"""


def test_remote_code_runs_only_when_it_is_trusted(model_of, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    reference, folder = model_of("cohere2")
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_code.py").write_text(REMOTE_CODE)
    (own / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    config |= {"model_type": "own-type", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=r"OwnForCausalLM is code .* \(own_code\.py\); .*--trust-remote-code"
    ):
        ModelConfig.from_files(files_of(own))
    trusted = ModelConfig.from_files(files_of(own), trust_remote_code=True)
    runner = new_other_runner(own, config=trusted)
    (run,) = generate(runner, [[5, 6, 7]], max_tokens=2)
    with torch.inference_mode():
        expected = -reference(torch.tensor([run.tokens[:-1]])).logits[0, 2:].numpy()
    np.testing.assert_allclose(np.array(run.logits), expected, atol=1e-4)
    runner.close()


def test_a_contradicting_trial_would_be_seen(model_of):
    """The comparison above is no comparison with itself: a wrong window changes the logits."""
    folder = model_of("cohere2")[1]
    config = read(folder)
    wrong = dataclasses.replace(
        config, attention=tuple(dataclasses.replace(call, window=None) for call in config.attention)
    )
    prompts = [list(range(100, 160))]
    runs = []
    for each in (config, wrong):
        runner = new_other_runner(folder, config=each)
        runs.append(generate(runner, prompts, max_tokens=1)[0])
        runner.close()
    assert np.abs(runs[0].logits[0] - runs[1].logits[0]).max() > 1e-2
