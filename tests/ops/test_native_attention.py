"""Native attention on torch tensors against attention in torch."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.drive import generate
from helpers.tiny_models import make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.runner.backends import TorchBackend, load_model
from streamllm.runner.model_runner import ModelRunner
from streamllm.runner.transformers_backend import TransformersBackend
from streamllm.sources.model_files import ModelFiles


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [("qwen3", "float32"), ("gemma2", "float32"), ("gpt-oss", "float32"), ("gpt-oss", "int8")],
)
def test_it_does_what_torch_does(tmp_path, family, kv_cache_dtype):
    """Norms and rotary embeddings, windows and soft caps, sinks; a cache with scales."""
    folder = make_tiny_model(tmp_path, family)
    files = ModelFiles(name="m", served_name="m", kind="folder", path=folder)
    config = ModelConfig.from_files(files)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, length).tolist() for length in (1, 16, 25, 60)]
    logits = []
    for backend in (TorchBackend(), TransformersBackend(threads=1, max_tokens=32, max_outputs=64)):
        loaded = load_model(config, backend, open_checkpoint(files, config), False, "float32")
        runner = ModelRunner(
            config, open_checkpoint(files, config), block_size=16, num_blocks=64, max_num_batched_tokens=32,
            max_num_seqs=8, kv_cache_dtype=kv_cache_dtype, max_model_len=128, threads=1, loaded=loaded,
        )  # fmt: skip
        logits.append([np.array(run.logits) for run in generate(runner, prompts, max_tokens=3, budget=20)])
        runner.close()
    for expected, actual in zip(*logits, strict=True):
        # A key that lies at the edge between two integers may fall to either side.
        np.testing.assert_allclose(actual, expected, atol=1e-4 if kv_cache_dtype == "float32" else 1e-2)
