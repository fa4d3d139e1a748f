"""Every sampling parameter with the default model: what it does, and that it does it to its own request."""

from __future__ import annotations

import numpy as np
import pytest

from streamllm import LLM, SamplingParams
from streamllm.errors import InvalidRequestError, RequestFailedError
from streamllm.logits_processors import register_logits_processor

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "1 2 3 4 5 6 7",
    "def fibonacci(n):",
]
SETTINGS = {"max_model_len": 512, "kv_cache_memory_bytes": 128 * 2**20}


def add_constant(extra_args, vocab_size):
    def process(prompt_token_ids, output_token_ids, logits):
        assert logits.shape == (vocab_size,) and logits.dtype == np.float32
        logits[extra_args["id"]] += 30.0
        return logits

    return process


def misbehave(extra_args, vocab_size):
    def process(prompt_token_ids, output_token_ids, logits):
        if len(output_token_ids) < extra_args.get("after", 0):
            return logits
        match extra_args["how"]:
            case "raise":
                raise RuntimeError("on purpose")
            case "nan":
                logits[3] = np.nan
            case "infinity":
                logits[3] = np.inf
            case "shape":
                return logits[:-1]
            case "none":
                return None
            case "nothing":
                logits[:] = -np.inf
        return logits

    if "how" not in extra_args:
        raise ValueError("vllm_xargs must hold how")
    return process


def script(extra_args, vocab_size):
    """Forces the ids of a list, one after the other."""

    def process(prompt_token_ids, output_token_ids, logits):
        logits[:] = -np.inf
        logits[extra_args["ids"][len(output_token_ids) % len(extra_args["ids"])]] = 0.0
        return logits

    return process


register_logits_processor("add_constant", add_constant)
register_logits_processor("misbehave", misbehave)
register_logits_processor("script", script)


@pytest.fixture(scope="module")
def llm():
    llm = LLM(**SETTINGS)
    yield llm
    llm.shutdown()


def generate(llm: LLM, prompt, **params) -> list[list[int]]:
    (output,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 24, **params}), use_tqdm=False)
    return [choice.token_ids for choice in output.outputs]


def token(llm: LLM, text: str) -> int:
    (token_id,) = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return token_id


MIXED = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20},
    {"temperature": 0.9, "seed": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.0, "seed": 2, "n": 2, "bad_words": ["the", "of a", "is"], "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "top_k": 40, "logit_bias": {260: -100.0, 284: 4.0}, "stop": ["\n\n"]},
    {"temperature": 1.3, "seed": 4, "min_p": 0.05, "allowed_token_ids": list(range(100, 9000))},
    {"temperature": 0.7, "seed": 5, "logits_processors": ["add_constant"], "extra_args": {"id": 700}},
]


def exotic(rng: np.random.Generator) -> list[dict]:
    """Thirty-one requests of which no two ask for the same."""
    requests: list[dict] = [
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"top_k": 1},
        {"top_k": 10**9},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 2.0},
        {"temperature": 1e-5},
        {"logit_bias": {i: 100.0 for i in range(0, 4096)}},
        {"logit_bias": {i: -100.0 for i in range(0, 4096)}},
        {"allowed_token_ids": [5]},
        {"allowed_token_ids": rng.choice(49000, 20_000, replace=False).tolist()},
        {"bad_words": [f"word{i}" for i in range(1000)]},
        {"bad_words": [" ", "the", "a", "\n"]},
        {"min_tokens": 20},
        {"min_tokens": 20, "stop_token_ids": list(range(3000))},
        {"ignore_eos": True, "stop": ["e"]},
        {"logprobs": 20},
        {"prompt_logprobs": 20},
        {"n": 4, "logprobs": 0},
        {"logits_processors": ["add_constant"], "extra_args": {"id": 9}},
        {"logits_processors": ["script"], "extra_args": {"ids": [1, 2, 3]}, "skip_special_tokens": False},
        {"detokenize": False},
        {"truncate_prompt_tokens": 1},
        {"seed": 2**64 - 1},
        {"best_of": 3},
        {"temperature": 0.0, "allowed_token_ids": list(range(1000)), "repetition_penalty": 1.1,
         "presence_penalty": 1.0, "min_tokens": 5, "bad_words": ["the"], "logit_bias": {100: 5.0}},
    ]  # fmt: skip
    return [{"temperature": 1.0, "max_tokens": 24, **request} for request in requests]


@pytest.mark.slow
def test_a_request_is_the_same_alone_and_beside_31_exotic_ones(llm):
    others = [SamplingParams(**each) for each in exotic(np.random.default_rng(0))]
    assert len(others) == 31
    for own in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 9, "logprobs": 2}, *MIXED[:3]):
        params = SamplingParams(max_tokens=24, **own)
        (alone,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        together = llm.generate(
            [PROMPTS[1]] * 15 + [PROMPTS[0]] + [PROMPTS[2]] * 16,
            [*others[:15], params, *others[15:]],
            use_tqdm=False,
        )[15]
        assert [c.token_ids for c in together.outputs] == [c.token_ids for c in alone.outputs]
        assert [c.logprobs for c in together.outputs] == [c.logprobs for c in alone.outputs]


def test_four_seeded_choices_are_four_different_texts_and_the_same_again(llm):
    params = {"n": 4, "seed": 42, "temperature": 1.0}
    first = generate(llm, PROMPTS[1], **params)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert generate(llm, PROMPTS[1], **params) == first
    assert generate(llm, PROMPTS[1], **{**params, "n": 1}) == first[:1]


def test_seeds_and_rules_survive_batching_preemption_and_a_restart(llm):
    """The same tokens and logprobs alone, in a batch, out of memory all the time, and in another engine."""
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **each) for each in MIXED]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]

    def results(outputs):
        return [[(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in o.outputs] for o in outputs]

    alone = [
        llm.generate(prompt, own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)
    ]
    batched = llm.generate(prompts, params, use_tqdm=False)
    assert results(batched) == results(alone)
    small = LLM(max_model_len=96, num_gpu_blocks_override=12, enable_prefix_caching=False)
    try:
        squeezed = small.generate(prompts, params, use_tqdm=False)
        assert small.stats().num_preemptions > 3
    finally:
        small.shutdown()
    assert results(squeezed) == results(alone)


def test_penalties_count_the_right_tokens(llm):
    """Presence and frequency: tokens of the output; repetition: of prompt and output. The forced token's own
    processed logit shows it, position by position."""
    exact = LLM(**SETTINGS, dtype="float32", logprobs_mode="processed_logits")
    a = token(exact, " a")
    forced = {
        "temperature": 0.0,
        "allowed_token_ids": [a],
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 0,
    }

    def logits(prompt: list[int], **penalties) -> np.ndarray:
        (output,) = exact.generate(
            {"prompt_token_ids": prompt}, SamplingParams(**forced, **penalties), use_tqdm=False
        )
        assert output.outputs[0].token_ids == [a] * 6
        return np.array([entry[a].logprob for entry in output.outputs[0].logprobs])

    try:
        counts = np.arange(6)
        prompts = {"full of it": [a] * 20, "without it": exact.get_tokenizer().encode(PROMPTS[2])}
        for name, prompt in prompts.items():
            plain = logits(prompt)
            np.testing.assert_allclose(logits(prompt, frequency_penalty=0.5), plain - 0.5 * counts, rtol=1e-6)
            np.testing.assert_allclose(
                logits(prompt, presence_penalty=1.5), plain - 1.5 * (counts > 0), rtol=1e-6
            )
            seen = np.full(6, True) if name == "full of it" else counts > 0
            divided = np.where(plain > 0, plain / 1.7, plain * 1.7)
            np.testing.assert_allclose(
                logits(prompt, repetition_penalty=1.7), np.where(seen, divided, plain), rtol=1e-6
            )
    finally:
        exact.shutdown()


def test_min_tokens_holds_back_whatever_would_end_the_text(llm):
    eos = llm.get_tokenizer().eos_token_ids[0]
    newline = token(llm, "\n")
    wanted = {"temperature": 0.0, "logit_bias": {eos: 100.0}, "max_tokens": 30}
    assert generate(llm, PROMPTS[0], **wanted) == [[eos]]
    (tokens,) = generate(llm, PROMPTS[0], **wanted, min_tokens=7)
    assert len(tokens) == 8 and tokens[-1] == eos and eos not in tokens[:-1]
    # Without EOS there is nothing to hold back.
    (tokens,) = generate(llm, PROMPTS[0], **wanted, min_tokens=7, ignore_eos=True)
    assert tokens == [eos] * 30
    stops = {"logit_bias": {newline: 100.0}, "stop_token_ids": [newline], "min_tokens": 5}
    (tokens,) = generate(llm, PROMPTS[0], **{**wanted, **stops})
    assert len(tokens) == 6 and tokens[-1] == newline and newline not in tokens[:-1]
    # A stop string that is seen before is ordinary text.
    forced = {"allowed_token_ids": [newline], "stop": ["\n"], "min_tokens": 20, "temperature": 0.0}
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, **forced), use_tqdm=False)
    assert output.outputs[0].text == "\n" * 19 and output.outputs[0].stop_reason == "\n"


def test_bad_words_never_appear(llm):
    words = ["time", "little", "girl", "there was", "Once upon", "named"]
    params = SamplingParams(n=16, temperature=1.0, seed=3, max_tokens=60, bad_words=words)
    (output,) = llm.generate("Once upon a time, there was a little", params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    spellings = [tokenizer.encode(s, add_special_tokens=False) for w in words for s in (w, " " + w)]
    for choice in output.outputs:
        context = output.prompt_token_ids + choice.token_ids
        start = len(output.prompt_token_ids)
        for end in range(start + 1, len(context) + 1):
            for word in spellings:
                assert context[max(end - len(word), 0) : end] != word
    (free,) = llm.generate("Once upon a time, there was a little", params.clone(bad_words=[]), use_tqdm=False)
    assert any(word in choice.text for word in words for choice in free.outputs)


def test_rules_that_leave_nothing_end_their_own_request(llm):
    a = token(llm, " a")
    quiet = SamplingParams(temperature=0.0, max_tokens=12)
    (expected,) = llm.generate(PROMPTS[0], quiet, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="no token is allowed: allowed_token_ids, bad_words forbid"):
        llm.generate(
            [PROMPTS[0], PROMPTS[1]],
            [quiet, SamplingParams(allowed_token_ids=[a], bad_words=[" a a"])],
            use_tqdm=False,
        )
    (again,) = llm.generate(PROMPTS[0], quiet, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "a logits processor failed: on purpose"),
        ("nan", "it returned NaN or infinity"),
        ("infinity", "it returned NaN or infinity"),
        ("shape", r"it returned the shape \(49151,\) instead of \(49152,\)"),
        ("none", "a logits processor failed"),
        ("nothing", "no token is allowed: logits_processors forbid"),
    ],
)
async def test_a_processor_that_misbehaves_ends_its_own_request(llm, how, says):
    engine = llm._engine
    seeded = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    expected = generate(llm, PROMPTS[2], **{"temperature": 1.0, "seed": 4, "max_tokens": 30})
    bad = SamplingParams(logits_processors=["misbehave"], extra_args={"how": how, "after": 5}, max_tokens=30)

    async def both():
        neighbour = await engine.add_request(PROMPTS[2], seeded)
        failing = await engine.add_request(PROMPTS[2], bad)
        with pytest.raises((RequestFailedError, InvalidRequestError), match=says):
            async for _ in failing:
                pass
        last = None
        async for output in neighbour:
            last = output
        return [choice.token_ids for choice in last.outputs]

    assert llm._call(both()) == expected


def test_a_processor_sees_what_it_should_and_decides(llm):
    ids = llm.get_tokenizer().encode(" chosen by a script", add_special_tokens=False)
    params = {
        "logits_processors": ["script"],
        "extra_args": {"ids": ids},
        "temperature": 1.0,
        "max_tokens": 9,
    }
    (tokens,) = generate(llm, PROMPTS[0], **params)
    assert tokens == [ids[i % len(ids)] for i in range(9)]
    with pytest.raises(InvalidRequestError, match="vllm_xargs must hold how"):
        generate(llm, PROMPTS[0], logits_processors=["misbehave"])
    with pytest.raises(
        InvalidRequestError, match='"nope", which is not registered; registered: add_constant'
    ):
        generate(llm, PROMPTS[0], logits_processors=["nope"])


def test_prompts_are_cut_only_on_request_and_from_the_left(llm):
    long = "word " * 2000
    ids = llm.get_tokenizer().encode(long)
    with pytest.raises(InvalidRequestError, match="maximum context length is 512"):
        generate(llm, long)
    for prompt in (long, {"prompt_token_ids": ids}):
        (output,) = llm.generate(
            prompt, SamplingParams(truncate_prompt_tokens=30, max_tokens=2), use_tqdm=False
        )
        assert output.prompt_token_ids == ids[-30:]
        (output,) = llm.generate(
            prompt, SamplingParams(truncate_prompt_tokens=-1, max_tokens=12), use_tqdm=False
        )
        assert output.prompt_token_ids == ids[-500:] and len(output.outputs[0].token_ids) <= 12
    (output,) = llm.generate("short", SamplingParams(truncate_prompt_tokens=30, max_tokens=2), use_tqdm=False)
    assert output.prompt_token_ids == llm.get_tokenizer().encode("short")
    (output,) = llm.chat(
        [{"role": "user", "content": long}], SamplingParams(truncate_prompt_tokens=40, max_tokens=2)
    )
    assert len(output.prompt_token_ids) == 40
    with pytest.raises(InvalidRequestError, match="at most 511"):
        generate(llm, "a", truncate_prompt_tokens=512)


@pytest.mark.slow  # half a minute to load torch and the model
@pytest.mark.parametrize("own", MIXED, ids=range(len(MIXED)))
def test_the_torch_backend_draws_the_same(own, reference_outputs):
    ours, theirs = reference_outputs
    index = MIXED.index(own)
    assert [c.token_ids for c in ours[index].outputs] == [c.token_ids for c in theirs[index].outputs]


@pytest.fixture(scope="module")
def reference_outputs():
    """The mixed requests in the exact mode: by the native kernels, and by torch with the sampler in numpy."""
    pytest.importorskip("torch")
    params = [SamplingParams(max_tokens=10, **{**each, "min_tokens": 0}) for each in MIXED]
    outputs = []
    for settings in ({"dtype": "float32"}, {"backend": "torch"}):
        llm = LLM(**SETTINGS, **settings)
        try:
            outputs.append(llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False))
        finally:
            llm.shutdown()
    return outputs
