"""Embeddings against Transformers' last hidden states, and against themselves in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest
from helpers.live_server import LiveServer
from helpers.reference import load_transformers
from helpers.tiny_models import FAMILIES, make_tiny_model

from streamllm import LLM, PoolingParams, SamplingParams
from streamllm.errors import InvalidRequestError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Die Katze sitzt am Fenster und schaut hinaus; es regnet seit Stunden. 雨が降っています。 🌧️",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))\n" * 6,
    "x",
]
RAW = {pooling: PoolingParams(pooling=pooling, normalize=False) for pooling in ("last", "mean")}


def hidden_states(model, token_ids: list[int]) -> np.ndarray:
    """Transformers' hidden states after the final norm: float64 ``[len(token_ids), hidden_size]``."""
    import torch

    with torch.inference_mode():
        return model.model(torch.tensor([token_ids])).last_hidden_state[0].double().numpy()


def reference_embedding(model, token_ids: list[int], pooling: str) -> np.ndarray:
    states = hidden_states(model, token_ids)
    return states[-1] if pooling == "last" else states.mean(0)


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def reference(default_model_path):
    return load_transformers(default_model_path)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_in_chunks(family, backend, tmp_path):
    path = make_tiny_model(tmp_path, family)
    reference = load_transformers(path)
    llm = LLM(str(path), dtype="float32", backend=backend, max_num_batched_tokens=16, max_model_len=512)
    for pooling, params in RAW.items():
        for output in llm.embed(TEXTS, pooling_params=params, use_tqdm=False):
            expected = reference_embedding(reference, output.prompt_token_ids, pooling)
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
    llm.shutdown()


@pytest.mark.slow
def test_the_default_model_in_the_exact_mode(reference):
    llm = LLM(dtype="float32", max_model_len=1024)
    for pooling, params in RAW.items():
        for output in llm.embed(TEXTS, pooling_params=params, use_tqdm=False):
            expected = reference_embedding(reference, output.prompt_token_ids, pooling)
            # Their values reach 30: 1e-4 beside that is some 30 units in the last place of float32.
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4, rtol=1e-5)
    llm.shutdown()


@pytest.mark.slow
def test_the_default_model_packed(reference):
    llm = LLM(max_model_len=1024)
    for pooling in RAW:
        params = PoolingParams(pooling=pooling)
        for output in llm.embed(TEXTS, pooling_params=params, use_tqdm=False):
            values = np.array(output.outputs.embedding)
            assert np.linalg.norm(values) == pytest.approx(1, abs=1e-6)
            expected = reference_embedding(reference, output.prompt_token_ids, pooling)
            assert similarity(values, expected) > 0.999
    llm.shutdown()


def test_scores_are_the_cosines_of_transformers_states(tmp_path):
    path = make_tiny_model(tmp_path, "llama")
    reference = load_transformers(path)
    with LLM(str(path), dtype="float32", max_model_len=512) as llm:
        ids = [output.prompt_token_ids for output in llm.embed(TEXTS)]
        for pooling, params in RAW.items():
            states = [reference_embedding(reference, each, pooling) for each in ids]
            for first, second, pairs in (
                (TEXTS[0], TEXTS[1], [(0, 1)]),
                (TEXTS[0], TEXTS, [(0, 0), (0, 1), (0, 2), (0, 3)]),
                (TEXTS[:2], [{"prompt_token_ids": ids[2]}, TEXTS[3]], [(0, 2), (1, 3)]),
            ):
                outputs = llm.score(first, second, pooling_params=params)
                expected = [similarity(states[i], states[j]) for i, j in pairs]
                np.testing.assert_allclose([output.outputs.score for output in outputs], expected, atol=1e-5)
                assert [output.prompt_token_ids for output in outputs] == [ids[i] + ids[j] for i, j in pairs]
        assert llm.score("x", "x")[0].outputs.score == pytest.approx(1)
        for first, second, words in (
            (TEXTS[:2], TEXTS[:3], "2 texts and text_2 3"),
            (TEXTS[:2], "x", "2 texts and text_2 1"),
            ([], "x", "at least one"),
            ("x", [], "at least one"),
            ("x", ["y", ""], r"prompt\[2\]"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                llm.score(first, second)


def embeddings_of(llm: LLM, prompts: list, params) -> list[list[float]]:
    outputs = llm.embed(prompts, pooling_params=params, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def test_alone_in_a_batch_and_in_chunks_it_is_the_same_bit_for_bit(tmp_path):
    """Also from the prefix cache, and where prompts are computed more than once for lack of blocks."""
    path = make_tiny_model(tmp_path, "llama")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(20, 200, 90 + 13 * index).tolist() for index in range(6)]
    settings = {"dtype": "float32", "max_model_len": 256, "threads": 2}
    params = [PoolingParams(pooling=("last", "mean")[index % 2]) for index in range(6)]
    alone = LLM(str(path), max_num_batched_tokens=256, enable_prefix_caching=False, **settings)
    expected = [embeddings_of(alone, [p], own)[0] for p, own in zip(prompts, params, strict=True)]
    assert embeddings_of(alone, prompts, params) == expected
    alone.shutdown()
    crowded = LLM(str(path), max_num_batched_tokens=24, num_gpu_blocks_override=20, **settings)
    asked = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    results: list = []

    async def together() -> None:
        """Embeddings that start while sequences grow into the same blocks."""
        grown = await crowded._engine.add_requests(prompts[:2], [asked] * 2)
        pooled = await crowded._engine.add_requests(prompts * 2, params * 2)
        for stream in pooled:
            results.append((await anext(stream)).embedding.tolist())
        for stream in grown:
            async for _ in stream:
                pass

    crowded._call(together())
    assert results == expected * 2
    assert crowded.stats().num_preemptions > 0
    cold, warm = (crowded.embed(prompts[0], pooling_params=params[0], use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens == 80
    assert cold.outputs.embedding == warm.outputs.embedding == expected[0]
    crowded.shutdown()


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", None, "empty"),
        ([[10**9]], None, "vocabulary"),
        ([[-1]], None, "vocabulary"),
        ([[1, True]], None, "true"),
        (["a", "b"], [PoolingParams()], "1 entries for 2 prompts"),
        ("a", PoolingParams(dimensions=65), "dimensions must be between 1 and 64"),
        ([[5] * 300], None, "256"),
    ],
)
def test_bad_input_is_a_value_error_and_the_engine_lives_on(tiny, prompts, params, words):
    with pytest.raises(InvalidRequestError, match=words):
        tiny.embed(prompts, pooling_params=params)
    assert len(tiny.embed("ok", use_tqdm=False)[0].outputs.embedding) == 64
    assert tiny.stats().num_used_blocks == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = LLM(str(path), max_model_len=256, pooling="mean")
    yield llm
    llm.shutdown()


def test_one_prompt_or_several_in_every_form(tiny):
    ids = tiny.get_tokenizer().encode("the dog")
    (by_text,) = tiny.embed("the dog", use_tqdm=False)
    several = tiny.embed(["the dog", ids, {"prompt": "the dog"}, {"prompt_token_ids": ids}], use_tqdm=False)
    assert [output.outputs for output in several] == [by_text.outputs] * 4
    assert [output.prompt_token_ids for output in several] == [ids] * 4
    (last,) = tiny.embed("the dog", pooling_params=PoolingParams(pooling="last"), use_tqdm=False)
    assert last.outputs != by_text.outputs, "this LLM pools means unless asked otherwise"
    assert tiny.embed([], use_tqdm=False) == []


@pytest.mark.slow
def test_the_served_default_model(reference, default_model_path: Path):
    with LiveServer("--dtype", "float32", "--max-model-len", "512", "--pooling", "mean") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            answer = client.embeddings.create(model=model, input=TEXTS)
            floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
            short = client.embeddings.create(model=model, input=TEXTS, dimensions=100)
            with pytest.raises(openai.BadRequestError, match="between 1 and 576"):
                client.embeddings.create(model=model, input="a", dimensions=577)
        server.wait_until_quiet()
        assert server.metric("prompt_tokens_total") == 3 * answer.usage.total_tokens
        assert server.metric("generation_tokens_total") == 0
    assert server.exit_code == 0
    from streamllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(default_model_path)
    for text, entry, same, cut in zip(TEXTS, answer.data, floats.data, short.data, strict=True):
        assert entry.embedding == same.embedding and len(entry.embedding) == 576
        expected = reference_embedding(reference, tokenizer.encode(text), "mean")
        np.testing.assert_allclose(entry.embedding, expected / np.linalg.norm(expected), atol=1e-5)
        leading = expected[:100]
        np.testing.assert_allclose(cut.embedding, leading / np.linalg.norm(leading), atol=1e-5)
