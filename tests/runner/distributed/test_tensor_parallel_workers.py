"""Two worker processes of one thread against one process: the same tokens, whatever the step holds."""

from __future__ import annotations

import pytest
from helpers.lora_adapters import save_adapter
from helpers.reference import assert_greedy, load_transformers
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, LoRARequest, SamplingParams
from streamllm.errors import ConfigError

SETTINGS = {"dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 128, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
    ],
)
def model(request, tmp_path_factory):
    # Blocks that leave a window make preemptions rare.
    fields = {"sliding_window": None} if request.param == "mixtral" else {}
    return make_tiny_model(tmp_path_factory.mktemp("tensor-parallel") / "model", request.param, **fields)


@pytest.fixture(scope="module")
def pair(model):
    """The model in one process and in two."""
    settings = {**SETTINGS, "enable_lora": True}
    with (
        LLM(str(model), **settings) as whole,
        LLM(str(model), tensor_parallel_size=2, max_num_batched_tokens=64, **settings) as divided,
    ):
        yield whole, divided


def prompts_of(lengths: list[int]) -> list[dict]:
    return [{"prompt_token_ids": [20 + (7 * i + 13 * n) % 250 for i in range(n)]} for n in lengths]


def tokens(llm: LLM, prompts, params: SamplingParams, **options) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_tokens_are_those_of_transformers_and_of_one_process(pair, model):
    prompts = prompts_of([1, 15, 16, 17, 40, 90])
    reference = load_transformers(model)
    whole, divided = (tokens(llm, prompts, GREEDY) for llm in pair)
    for prompt, (one,), (two,) in zip(prompts, whole, divided, strict=True):
        assert_greedy(reference, prompt["prompt_token_ids"], two)
        if one != two:  # then two tokens are as likely, which the reference has found all right
            assert_greedy(reference, prompt["prompt_token_ids"], one)
    assert sum(one != two for one, two in zip(whole, divided, strict=True)) <= 1


def test_four_choices(pair):
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, ignore_eos=True, logprobs=2)
    whole, divided = (llm.generate(prompts_of([33]), params, use_tqdm=False)[0].outputs for llm in pair)
    for one, two in zip(whole, divided, strict=True):
        assert one.token_ids == two.token_ids
        assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-4)
    assert len({tuple(choice.token_ids) for choice in divided}) == 4


def test_prefix_hits_and_preemptions(pair):
    shared = list(range(20, 84))
    prompts = [{"prompt_token_ids": [*shared, 100 + i]} for i in range(6)]
    params = GREEDY.clone(max_tokens=40)
    whole, divided = (tokens(llm, prompts, params) for llm in pair)
    assert whole == divided
    again = tokens(pair[1], prompts, params)
    assert again == divided
    many = prompts_of(list(range(50, 62)))
    assert tokens(pair[0], many, params) == tokens(pair[1], many, params)
    stats = pair[1].stats()
    assert stats.prefix_cache_hits > 0 and stats.num_preemptions > 0


def test_adapters(pair, model, tmp_path):
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    folder = save_adapter(tmp_path / "a", model, seed=1, target_modules=attention)
    request = LoRARequest("a", 1, str(folder))
    prompts = prompts_of([5, 30])
    adapted = tokens(pair[1], prompts, GREEDY, lora_request=request)
    assert adapted == tokens(pair[0], prompts, GREEDY, lora_request=request)
    mixed = [request, None]
    both = tokens(pair[1], prompts, GREEDY, lora_request=mixed)
    assert both[0] == adapted[0] and both[1] == tokens(pair[1], prompts, GREEDY)[1] != adapted[1]


def test_embeddings(pair):
    whole, divided = (llm.embed(prompts_of([20]), use_tqdm=False)[0].outputs.embedding for llm in pair)
    assert divided == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_the_default_model(default_model_path):
    """Nine query heads that share three KV heads: two ranks have six and three of them."""
    with LLM(tensor_parallel_size=2, **SETTINGS) as llm:
        texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, " * 10]
        prompts = [llm.get_tokenizer().encode(text) for text in texts]
        reference = load_transformers(default_model_path)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for prompt, (output,) in zip(prompts, tokens(llm, inputs, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)


def test_heads_that_cannot_be_divided_are_refused_before_anything_starts(model, monkeypatch):
    monkeypatch.setattr("streamllm.machine.available_cores", lambda *root: 8)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 "):
        LLM(str(model), tensor_parallel_size=3, **SETTINGS)
