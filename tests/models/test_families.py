"""Every family against transformers, from a folder and from a GGUF, and against itself bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import new_runner
from helpers.drive import generate
from helpers.tiny_gguf import GGUF_FAMILIES, save_tiny_gguf
from helpers.tiny_models import TINY, VOCAB_SIZE, WINDOW, new_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.rope import attention_factor, frequencies_at
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.5, 2.2, 2.9, 3.6],
    },
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-biased": (
        "llama",
        {"tied": True, "attention_bias": True, "mlp_bias": True, "hidden_size": 48, "head_dim": 8},
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "attention_bias": True, "mlp_bias": True},
    ),
    "phi3-longrope": ("phi3", LONGROPE),
    "gemma2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3-capped": ("gemma3", {"final_logit_softcapping": 5.0}),
    "granite-biased": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite4-no-positions": ("granite4", {"position_embedding_type": None}),
    "opt-tied-bare": (
        "opt",
        {
            "tied": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "gpt2-tied-scaled": ("gpt2", {"tied": True, "scale_attn_by_inverse_layer_idx": True}),
    "mixtral-tied": ("mixtral", {"tied": True, "num_experts_per_tok": 1, "sliding_window": None}),
    "qwen2moe-normalised": ("qwen2moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3moe-windows": (
        "qwen3moe",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
    ),
    "gpt-oss-unbiased": ("gpt-oss", {"attention_bias": False, "swiglu_limit": 7.0}),
}
CASES = {family: (family, {}) for family in TINY} | VARIANTS
CAPTURED = {"llama", "gemma2", "olmo3", "phi3", "opt", "gpt-oss"}
"""Cases whose graphs the plain run captures; the others' differ in little but take a second each."""
GGUF_FIELDS: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
    "qwen2moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "gpt-oss": {"swiglu_limit": 7.0},
}
"""What a GGUF does not say is as llama.cpp assumes it."""


class Pair:
    """One random model, in transformers and as files."""

    def __init__(self, case: str, folder: Path):
        family, fields = CASES[case]
        torch.manual_seed(sorted(CASES).index(case))
        self.reference = new_tiny_model(family, attn_implementation="eager", **fields)
        self.reference.save_pretrained(folder)
        self.files = ModelFiles(name=case, served_name=case, kind="folder", path=folder)
        self.config = ModelConfig.from_files(self.files)

    def runner(self, backend: str, **changes: Any) -> ModelRunner:
        return make_runner(self.files, backend=backend, **changes)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    made: dict[str, Pair] = {}

    def get(case: str) -> Pair:
        if case not in made:
            made[case] = Pair(case, tmp_path_factory.mktemp(case))
        return made[case]

    return get


def make_runner(files: ModelFiles, **changes: Any) -> ModelRunner:
    settings = {
        "block_size": 16,
        "num_blocks": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_dtype": "float32",
        "max_model_len": 256,
        "threads": 2,
        "progress": False,
        **changes,
    }
    config = ModelConfig.from_files(files)
    return new_runner(config, open_checkpoint(files, config), **settings)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def check(runner: ModelRunner, reference: Any, lengths: list[int]) -> None:
    """Logits are transformers', and so is each greedy token, or within a hair of its choice."""
    for run in generate(runner, random_prompts(lengths), max_tokens=6, budget=50):
        with torch.inference_mode():
            logits = reference(torch.tensor([run.tokens[:-1]])).logits[0, len(run.prompt) - 1 :].numpy()
        np.testing.assert_allclose(np.array(run.logits), logits, atol=1e-4)
        assert (logits.max(axis=1) - logits[np.arange(len(logits)), run.output] < 1e-4).all()
    runner.close()


@pytest.mark.parametrize("backend", ["torch", "cpu", "gpu"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(pair_of, case, backend):
    pair = pair_of(case)
    check(pair.runner(backend), pair.reference, [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 75])


@pytest.mark.parametrize(
    "case", [case if case in CAPTURED else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_of_captured_graphs_equal_transformers(pair_of, case):
    pair = pair_of(case)
    check(pair.runner("gpu-graphs"), pair.reference, [1, WINDOW, 75])


@pytest.mark.parametrize(
    "case", ["ministral", "smollm3", "gemma2", "gemma3", "olmo3", "granite", "opt", "qwen2moe", "gpt-oss"]
)
def test_results_do_not_depend_on_the_batch(pair_of, case):
    """Bit-equal logits: alone or together, in chunks of 1, 7 or 64, other blocks, other thread counts."""
    pair = pair_of(case)
    prompts = random_prompts([3, 33, 70, 17])
    runner = pair.runner("cpu")
    alone = [generate(runner, [prompt], max_tokens=4, budget=128)[0] for prompt in prompts]
    for budget, first_block, threads in ((64, 0, 2), (7, 9, 1), (1, 5, 2)):
        other = runner if threads == 2 else pair.runner("cpu", threads=threads)
        together = generate(other, prompts, max_tokens=4, budget=budget, first_block=first_block)
        for expected, run in zip(alone, together, strict=True):
            assert run.output == expected.output
            assert np.array_equal(np.array(run.logits), np.array(expected.logits))


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_equals_transformers(tmp_path, family):
    path = tmp_path / "m.gguf"
    reference = save_tiny_gguf(path, family, **GGUF_FIELDS.get(family, {}))
    files = ModelFiles(name=family, served_name=family, kind="gguf", path=path)
    check(make_runner(files), reference, [1, WINDOW, WINDOW + 1, 60])


def test_a_gguf_with_longrope_equals_transformers(tmp_path):
    path = tmp_path / "m.gguf"
    reference = save_tiny_gguf(path, "phi3", **LONGROPE)
    check(make_runner(ModelFiles("phi", "phi", "gguf", path)), reference, [7, 75])


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8},
}
ROPE_FAMILIES = sorted({"gemma2", "gemma3", "granite", "ministral", "olmo2", "olmo3", "qwen3", "smollm3"})


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("family", ROPE_FAMILIES)
def test_every_family_takes_every_rope_type(tmp_path, family, rope_type):
    parameters: dict[str, Any] = {"rope_theta": 50000.0, **ROPES[rope_type]}
    if rope_type in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = 64
    if by_layer := family in ("gemma3", "olmo3"):
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default"}}
    fields = {"max_position_embeddings": 128, "head_dim": 16, "rope_parameters": parameters}
    reference = new_tiny_model(family, **fields)
    reference.config.save_pretrained(tmp_path)

    config = ModelConfig.from_files(ModelFiles("m", "m", "folder", tmp_path))

    theirs = reference.model.rotary_emb
    names = ["full_attention_", "sliding_attention_"] if by_layer else [""]
    for rope, prefix in zip(config.ropes[: len(names)], names, strict=True):
        np.testing.assert_allclose(
            frequencies_at(rope, 1), getattr(theirs, f"{prefix}inv_freq").numpy(), rtol=1e-6
        )
        assert attention_factor(rope) == pytest.approx(getattr(theirs, f"{prefix}attention_scaling"))


def multimodal(name: str, text: Any) -> Any:
    """A transformers model that sees, around a text model of this config."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {
        "gemma3": transformers.SiglipVisionConfig,
        "mistral3": transformers.PixtralVisionConfig,
        "idefics3": transformers.Idefics3VisionConfig,
    }[name](**sizes, image_size=28, patch_size=14)
    config_class, model_class = {
        "idefics3": (transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration),
        "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration),
        "mistral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration),
    }[name]
    config = config_class(text_config=text, vision_config=vision, attn_implementation="eager")
    return model_class(config).eval()


@pytest.mark.parametrize(
    ("name", "family"), [("gemma3", "gemma3"), ("mistral3", "mistral"), ("idefics3", "llama")]
)
def test_the_text_model_of_a_multimodal_folder_is_served(tmp_path, caplog, name, family):
    torch.manual_seed(1)
    reference = multimodal(name, new_tiny_model(family).config)
    reference.save_pretrained(tmp_path)

    with caplog.at_level("INFO", logger="streamllm.models"):
        runner = make_runner(ModelFiles("m", "m", "folder", tmp_path))

    check(runner, reference, [1, 30])
    (line,) = (record.message for record in caplog.records if "not read" in record.message)
    assert any(part in line for part in ("vision", "multi_modal", "connector"))
