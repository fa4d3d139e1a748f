"""Gemma 3 270M, a second real model: greedy tokens against Transformers over the same dequantised weights."""

from __future__ import annotations

import httpx
import openai
import pytest
from helpers.live_server import LiveServer
from helpers.reference import assert_greedy, load_transformers

from streamllm import LLM, SamplingParams

pytestmark = pytest.mark.slow

WINDOW = 512
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Übersetzen Sie: 東京は日本の首都です。 ->",
    "Once upon a time, " * 30,
]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(gemma_model_path):
    return load_transformers(gemma_model_path)


@pytest.mark.parametrize("budget", [64, 2048])
def test_gemma_agrees_with_transformers(budget, gemma_model_path, reference):
    llm = LLM(str(gemma_model_path), dtype="float32", max_num_batched_tokens=budget, max_model_len=2048)
    tokenizer = llm.get_tokenizer()
    assert llm._engine._windows == (None, *[WINDOW] * 5)
    # A text that says something new all along: of one that repeats itself a window of any length is enough.
    longest = tokenizer.encode(" ".join(f"{n} times {n + 7} is {n * (n + 7)}." for n in range(3, 150)))
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [longest[:length] for length in (WINDOW - 1, WINDOW, WINDOW + 1, 1024, 1500)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids)
        # Alone and with prefix hits it is the same, token for token.
        (again,) = llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert llm._engine.stats().prefix_cache_hits > 4000
    llm.shutdown()


def test_gemma_is_served_by_its_name(gemma_model_path):
    """Text in, text out, packed: the file's tokenizer, its special tokens and the model fit together."""
    with LiveServer("--model", str(gemma_model_path), "--max-model-len", "512") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["gemma-3-270m"]
        stream = client.completions.create(
            model="gemma-3-270m", prompt="The capital of France is", max_tokens=24, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in stream)
        tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "The capital"}).json()["tokens"]
    assert "Paris" in text or "France" in text
    assert tokens[0] == 2  # <bos>
    assert server.exit_code == 0
