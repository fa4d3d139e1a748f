"""Llama: dynamic rotary embeddings against transformers, and results against themselves bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.cpu_as_gpu import new_runner
from helpers.drive import generate

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams
from streamllm.sources.model_files import ModelFiles

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=False),
    "llama-tied-biased": lambda: transformers.LlamaConfig(
        **SIZES, head_dim=8, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=24),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 40},
        head_dim=16,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
}


class Pair:
    """One random model, in transformers and as files."""

    def __init__(self, name: str, folder: Path):
        torch.manual_seed(sorted(CONFIGS).index(name))
        config = CONFIGS[name]()
        self.reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter_name, parameter in self.reference.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        self.reference.save_pretrained(folder)
        self.files = ModelFiles(name=name, served_name=name, kind="folder", path=folder)
        self.config = ModelConfig.from_files(self.files)

    def runner(self, backend: str = "cpu", **changes) -> ModelRunner:
        return make_runner(self.files, self.config, backend=backend, **changes)


def make_runner(files: ModelFiles, config: ModelConfig, **changes) -> ModelRunner:
    settings = {
        "block_size": 16,
        "num_blocks": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_dtype": "float32",
        "max_model_len": 512,
        "threads": 2,
        "progress": False,
        **changes,
    }
    return new_runner(config, open_checkpoint(files, config), **settings)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def random_prompts(lengths: list[int], vocab_size: int = 320) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def assert_same_choice(expected: np.ndarray, token: int) -> None:
    """``token`` is the reference's own choice, or within a hair of it."""
    assert expected.max() - expected[token] < 1e-4


@pytest.mark.parametrize("backend", ["torch", "cpu", "gpu", "gpu-graphs"])
def test_dynamic_rope_equals_transformers_generate(pair_of, backend):
    """Keys keep the angles of the length that they were computed at, so only ``generate`` is comparable."""
    pair = pair_of("llama-dynamic")
    runner = pair.runner(backend)
    prompts = random_prompts([30, 39, 70])
    for run, prompt in zip(generate(runner, prompts, max_tokens=20, budget=33), prompts, strict=True):
        with torch.no_grad():
            expected = pair.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        np.testing.assert_allclose(np.array(run.logits), torch.cat(expected.logits).numpy(), atol=1e-4)
        assert run.tokens == expected.sequences[0].tolist()
    runner.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "llama-dynamic"])
def test_results_do_not_depend_on_the_batch(pair_of, name):
    """Bit-equal logits: alone or together, in chunks of 1, 7 or 64, other blocks, other thread counts."""
    pair = pair_of(name)
    prompts = random_prompts([3, 33, 70, 17, 48])
    runner = pair.runner()
    reference = [generate(runner, [prompt], max_tokens=6, budget=128)[0] for prompt in prompts]
    for budget, first_block, threads in ((64, 0, 2), (7, 9, 1), (1, 5, 3)):
        other = runner if threads == 2 else pair.runner(threads=threads)
        together = generate(other, prompts, max_tokens=6, budget=budget, first_block=first_block)
        for expected, run in zip(reference, together, strict=True):
            assert run.output == expected.output
            assert np.array_equal(np.array(run.logits), np.array(expected.logits))
    again = generate(runner, prompts[::-1], max_tokens=6, budget=64)[::-1]
    assert [run.output for run in again] == [run.output for run in reference]


def test_seeded_sampling_does_not_depend_on_the_batch(pair_of):
    runner = pair_of("qwen3").runner()
    prompts = random_prompts([3, 33, 20])
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.9, logprobs=3) for seed in (1, 2, 3)]
    alone = [
        generate(runner, [prompt], params=own, max_tokens=10)[0]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    together = generate(runner, prompts, params=params, max_tokens=10, budget=9)
    assert [run.output for run in together] == [run.output for run in alone]
    assert [run.logprobs for run in together] == [run.logprobs for run in alone]
    assert len({tuple(run.output) for run in generate(runner, prompts[:1] * 3, params=params)}) == 3


@pytest.mark.parametrize(("dtype", "close", "same"), [("float16", 0.05, 1e-3), ("int8", 0.3, 0.03)])
def test_a_smaller_cache_is_close(pair_of, dtype, close, same):
    pair = pair_of("llama")
    prompts = random_prompts([40, 9])
    exact, small, small_torch = (
        generate(pair.runner(backend, kv_cache_dtype=dtype), prompts, max_tokens=1)
        for backend, dtype in (("cpu", "float32"), ("cpu", dtype), ("torch", dtype))
    )
    for one, two, three in zip(exact, small, small_torch, strict=True):
        assert not np.array_equal(one.logits, two.logits)
        np.testing.assert_allclose(one.logits, two.logits, atol=close)
        np.testing.assert_allclose(two.logits, three.logits, atol=same)


def test_tied_embeddings_are_held_once(pair_of):
    tied, untied = pair_of("llama-tied-biased"), pair_of("llama")
    assert tied.runner().weight_bytes < untied.runner().weight_bytes
    for pair in (tied, untied):
        matrices = sum(p.numel() for p in pair.reference.parameters() if p.ndim == 2)
        assert abs(pair.runner("torch").weight_bytes / 4 - matrices) < 3000


def test_a_contradicting_config_is_named(pair_of):
    pair = pair_of("llama")
    checkpoint = open_checkpoint(pair.files, pair.config)
    for changes in ({"intermediate_size": 96}, {"num_kv_heads": 4}):
        with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.\S+"):
            ModelRunner(
                replace(pair.config, **changes),
                checkpoint,
                block_size=16,
                num_blocks=4,
                max_num_batched_tokens=16,
                max_num_seqs=2,
                kv_cache_dtype="float32",
                max_model_len=64,
                threads=1,
                progress=False,
            )


@pytest.mark.slow
def test_default_model_equals_transformers(default_model_path):
    """The default model's own weights, dequantised, in transformers' Llama."""
    files = ModelFiles(name="default", served_name="default", kind="gguf", path=default_model_path)
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.ropes[0].theta,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    weights = {name: torch.tensor(checkpoint.read(name)) for name in checkpoint.names()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    reference.load_state_dict(weights)
    runner = make_runner(files, config)
    prompts = random_prompts([5, 60], config.vocab_size)
    for run in generate(runner, prompts, max_tokens=4, budget=48):
        with torch.no_grad():
            expected = reference(torch.tensor([run.tokens[:-1]])).logits[0, len(run.prompt) - 1 :].numpy()
        np.testing.assert_allclose(np.array(run.logits), expected, atol=2e-4)
        for row, token in zip(expected, run.output, strict=True):
            assert_same_choice(row, token)
    runner.close()
