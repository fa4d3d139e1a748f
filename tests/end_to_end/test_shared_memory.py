"""Who shares memory with whom, and how little there is of it, never shows in a result: bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx
import orjson
import pytest
from helpers.live_server import LiveServer
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind

MODEL = "SmolLM2-135M-Instruct"
BLOCK = 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 49_000) for _ in range(length)]


def run(llm: LLM, prompts: list, params) -> list:
    """(choices, cached tokens) of each prompt, all at once."""
    inputs = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    return [(o.outputs, o.num_cached_tokens) for o in llm.generate(inputs, params, use_tqdm=False)]


def bits(choices: list) -> list[tuple]:
    """Everything in which two runs must agree, logprobs to the last bit."""
    return [(c.index, c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in choices]


@pytest.fixture(scope="module")
def llm():
    llm = LLM(dtype="float32", debug_kv_blocks=True)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def cold():
    """Without prefix cache: every run computes everything."""
    llm = LLM(dtype="float32", enable_prefix_caching=False)
    yield llm
    llm.shutdown()


PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
P = prompt_of(5 * BLOCK + 3)
CUTS = [length + offset for length in (16, 32, 80) for offset in (-1, 0, 1)]
VARIANTS = {
    "whole": P,
    "again": P,
    "longer": [*P, 999],
    "much longer": [*P, *prompt_of(40, seed=1)],
    "another beginning": [7, *P],
    **{f"cut at {length}": P[:length] for length in CUTS},
}


@pytest.fixture(scope="module")
def expected(cold):
    return {name: run(cold, [prompt], PARAMS)[0] for name, prompt in VARIANTS.items()}


def test_a_hit_equals_a_miss(llm, expected):
    llm.reset_prefix_cache()
    before = llm.stats()
    hits = {}
    for name, prompt in VARIANTS.items():
        ((choices, hits[name]),) = run(llm, [prompt], PARAMS)
        assert bits(choices) == bits(expected[name][0]), name
        assert expected[name][1] == 0
    assert hits["whole"] == hits["another beginning"] == 0
    assert hits["again"] == hits["longer"] == hits["much longer"] == 80
    assert {length: hits[f"cut at {length}"] for length in CUTS} == {
        length: (length - 1) // BLOCK * BLOCK for length in CUTS
    }
    after = llm.stats()
    assert after.prefix_cache_hits - before.prefix_cache_hits == sum(hits.values())
    asked = sum(len(prompt) for prompt in VARIANTS.values())
    assert after.prefix_cache_queries - before.prefix_cache_queries == asked


def test_all_at_once_equals_one_by_one(llm, expected):
    """A later row of a step may read the blocks that an earlier one writes in it."""
    llm.reset_prefix_cache()
    results = run(llm, list(VARIANTS.values()), PARAMS)
    for name, (choices, _) in zip(VARIANTS, results, strict=True):
        assert bits(choices) == bits(expected[name][0]), name


@pytest.mark.slow
def test_what_was_evicted_is_computed_again(expected):
    small = LLM(dtype="float32", num_kv_blocks=16, max_model_len=256, debug_kv_blocks=True)
    assert bits(run(small, [P], PARAMS)[0][0]) == bits(expected["whole"][0])
    assert run(small, [P], PARAMS)[0][1] == 80
    run(small, [prompt_of(240, seed=9)], PARAMS)
    choices, hits = run(small, [P], PARAMS)[0]
    assert hits == 0 and bits(choices) == bits(expected["whole"][0])
    small.shutdown()


def test_what_was_generated_is_cached_too(llm, cold):
    llm.reset_prefix_cache()
    params = PARAMS.clone(max_tokens=40)
    ((choices, _),) = run(llm, [P], params)
    conversation = [*P, *choices[0].token_ids, 5, 6, 7]
    ((following, hits),) = run(llm, [conversation], PARAMS)
    assert hits == (len(P) + 39) // BLOCK * BLOCK
    assert bits(following) == bits(run(cold, [conversation], PARAMS)[0][0])


def test_one_choice_of_many_equals_the_only_one(llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=10, logprobs=2, ignore_eos=True)
    for length in (16, 21):  # with and without a block that is copied when it is written
        llm.reset_prefix_cache()
        ((alone, _),) = run(llm, [P[:length]], params)
        llm.reset_prefix_cache()
        before = llm.stats().num_steps
        ((eight, _),) = run(llm, [P[:length]], params.clone(n=8))
        assert bits(eight[:1]) == bits(alone)
        assert len({tuple(choice.token_ids) for choice in eight}) == 8
        assert llm.stats().num_steps - before <= 12, "the prompt was computed more than once"


def test_best_of_returns_the_likeliest(llm):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=0)
    ((everything, _),) = run(llm, [P], params.clone(n=6))
    ranked = sorted(everything, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    ((best, _),) = run(llm, [P], params.clone(n=2, best_of=6))
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1]
    ((best, _),) = run(llm, [P], params.clone(n=1, best_of=6, logprobs=None))
    assert best[0].token_ids == ranked[0].token_ids and best[0].logprobs is None


def test_salts_keep_prompts_apart(llm, expected):
    llm.reset_prefix_cache()
    salts = [None, "a", "b", "a", None]
    prompts = [{"prompt_token_ids": P} | ({"cache_salt": salt} if salt else {}) for salt in salts]
    results = [run(llm, [prompt], PARAMS)[0] for prompt in prompts]
    assert [hits for _, hits in results] == [0, 0, 0, 80, 80]
    assert all(bits(choices) == bits(expected["whole"][0]) for choices, _ in results)
    # In one call, too.
    assert [hits for _, hits in run(llm, prompts, PARAMS)] == [80] * 5


NEIGHBOURS = [
    SamplingParams(temperature=1.5, top_p=0.5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=2.0, top_k=3, min_p=0.2, n=3, max_tokens=15),
    SamplingParams(temperature=0.7, seed=1, logprobs=20, max_tokens=18, min_tokens=18),
    SamplingParams(temperature=1.0, best_of=4, n=2, max_tokens=12),
    SamplingParams(temperature=1.0, stop=["e", "a"], max_tokens=30),
    SamplingParams(temperature=0, stop_token_ids=[28, 30], include_stop_str_in_output=True, max_tokens=30),
    BeamSearchParams(beam_width=4, max_tokens=12),
]


def test_neighbours_do_not_show(llm, expected):
    """R01: the same request alone, and beside every kind of neighbour."""

    async def together():
        streams = []
        for index, params in enumerate(NEIGHBOURS):
            streams.append(await llm._engine.add_request(prompt_of(20 + 9 * index, seed=index), params))
        mine = await llm._engine.add_request(P, PARAMS.clone(output_kind=RequestOutputKind.FINAL_ONLY))
        for stream in streams:
            async for _ in stream:
                pass
        return await anext(mine)

    llm.reset_prefix_cache()
    assert bits(llm._call(together()).outputs) == bits(expected["whole"][0])
    assert llm.stats().num_used_blocks == 0


# -- very little memory ------------------------------------------------------------------------------------

PRESSED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, max_tokens=40, min_tokens=35, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=40, logprobs=4, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=9, max_tokens=40, stop=["ing ", " of"]),
    SamplingParams(temperature=1.0, seed=10, max_tokens=24, n=2, ignore_eos=True),
]


@pytest.mark.slow
def test_a_tiny_pool_changes_nothing(llm):
    """K03, offline: everything that a sequence keeps survives its preemption."""
    prompts = [prompt_of(30 + 7 * index, seed=index) for index in range(len(PRESSED))]
    small = LLM(dtype="float32", num_kv_blocks=12, max_model_len=192, debug_kv_blocks=True)
    alone = [run(llm, [prompt], params)[0] for prompt, params in zip(prompts, PRESSED, strict=True)]
    pressed = run(small, prompts, PRESSED)
    assert small.stats().num_preemptions > 0
    for (left, _), (right, _) in zip(alone, pressed, strict=True):
        assert bits(left) == bits(right)
    assert small.stats().num_used_blocks == 0
    small.shutdown()


@pytest.fixture(scope="module")
def tiny_pool():
    """192 tokens of memory for everybody; a request may use all of it."""
    with LiveServer("--num-kv-blocks", "12", "--max-model-len", "auto") as server:
        yield server
    assert server.exit_code == 0


def body_of(index: int, params: SamplingParams) -> dict:
    body = {"prompt": prompt_of(30 + 7 * index, seed=index), "n": params.n, "seed": params.seed,
            "temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens, "ignore_eos": params.ignore_eos, "stop": params.stop,
            "logprobs": params.logprobs}  # fmt: skip
    return {name: value for name, value in body.items() if value is not None}


async def streamed(http: httpx.AsyncClient, body: dict) -> tuple[dict[int, dict], dict]:
    """(choice -> its text, finish reason, logprobs, tokens), and the usage."""
    choices: dict[int, dict] = {}
    usage: dict = {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = orjson.loads(line[6:])
            usage = chunk["usage"] or usage
            for part in chunk["choices"]:
                choice = choices.setdefault(part["index"], {"text": "", "logprobs": [], "finish": None})
                choice["text"] += part["text"]
                choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
                assert choice["finish"] is None, "news of a choice that has ended"
                choice["finish"] = part["finish_reason"]
    return choices, usage


def whole(answer: dict) -> dict[int, dict]:
    return {
        choice["index"]: {
            "text": choice["text"],
            "logprobs": (choice["logprobs"] or {}).get("token_logprobs", []),
            "finish": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }


async def test_streams_survive_preemption_and_counters_agree(tiny_pool):
    """K03 and M03 over HTTP: alone, and all at once in streams."""
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total",
             "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count",
             "num_preemptions_total")  # fmt: skip
    bodies = [body_of(index, params) for index, params in enumerate(PRESSED)]
    async with httpx.AsyncClient(base_url=tiny_pool.url, timeout=120) as http:
        alone = [(await http.post("/v1/completions", json=body)).json() for body in bodies]
        assert tiny_pool.metric("num_preemptions_total") == 0
        before = [tiny_pool.metric(name) for name in names]
        results = await asyncio.gather(*(streamed(http, body) for body in bodies))
        refused = await http.post("/v1/completions", json={"prompt": prompt_of(300)})
    assert refused.status_code == 400
    for answer, (choices, usage) in zip(alone, results, strict=True):
        assert choices == whole(answer)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == answer["usage"][name]
    tiny_pool.wait_until_quiet()
    after = [tiny_pool.metric(name) for name in names]
    prompt, generation, finished, first, ended, preemptions = (
        b - a for a, b in zip(before, after, strict=True)
    )
    assert preemptions > 0
    assert prompt == sum(usage["prompt_tokens"] for _, usage in results)
    assert generation == sum(usage["completion_tokens"] for _, usage in results)
    assert finished == first == ended == len(PRESSED)


def test_a_request_larger_than_the_pool_is_refused_and_the_next_is_served(tiny_pool):
    """K01."""
    url = f"{tiny_pool.url}/v1/completions"
    refusal = httpx.post(url, json={"prompt": prompt_of(300)}).json()["error"]
    assert refusal["code"] == "context_length_exceeded"
    assert "192" in refusal["message"] and "300" in refusal["message"]
    beams = {"prompt": prompt_of(100), "use_beam_search": True, "n": 4, "max_tokens": 50}
    refusal = httpx.post(url, json=beams).json()["error"]
    assert refusal["param"] == "n" and "12" in refusal["message"]
    assert httpx.post(url, json={"prompt": prompt_of(5), "max_tokens": 3}).status_code == 200
    # The prompt fits, prompt and output do not: as much as there is room for.
    body = {"prompt": prompt_of(180), "max_tokens": 100, "ignore_eos": True}
    answer = httpx.post(url, json=body, timeout=30).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    tiny_pool.wait_until_quiet()


@pytest.mark.parametrize("n", [10**6, -1, 0, "2", 1.5, True])
def test_impossible_numbers_of_choices_are_refused_in_no_time(tiny_pool, n):
    """N04."""
    with httpx.Client(base_url=tiny_pool.url) as http:
        assert http.get("/health").status_code == 200
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "a", "n": n, "stream": stream})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
            assert answer.elapsed.total_seconds() < 0.1


async def test_choices_keep_their_index(tiny_pool):
    """N01: four choices of one prompt, each with an end of its own, streamed and not."""
    async with httpx.AsyncClient(base_url=tiny_pool.url, timeout=60) as http:
        lengths = set()
        for seed in range(3):
            body = {"prompt": "Yes or no? Answer:", "n": 4, "temperature": 1.5, "seed": seed,
                    "max_tokens": 24, "stop": [".", "\n"]}  # fmt: skip
            answer = (await http.post("/v1/completions", json=body)).json()
            choices, usage = await streamed(http, body)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert choices == whole(answer)
            assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]
            assert usage["prompt_tokens"] == answer["usage"]["prompt_tokens"]
            lengths |= {len(choice["text"]) for choice in answer["choices"]}
        assert len(lengths) > 4
    tiny_pool.wait_until_quiet()


# -- a long prompt and its neighbours ----------------------------------------------------------------------


def test_a_long_prompt_starves_nobody(tmp_path):
    """K04, in steps: the decoder gets a token in each, a short prompt its first within three."""
    llm = LLM(str(make_tiny_model(tmp_path / "model")), max_num_batched_tokens=32)
    engine = llm._engine
    kinds = {"output_kind": RequestOutputKind.DELTA, "temperature": 0, "ignore_eos": True}

    async def first_step(stream) -> int:
        await anext(stream)
        step = engine.stats().num_steps
        stream.abort()
        return step

    async def scenario():
        decoder = await engine.add_request([5] * 4, SamplingParams(max_tokens=400, **kinds))
        await anext(decoder)
        start = engine.stats().num_steps
        long = await engine.add_request([6] * 1600, SamplingParams(max_tokens=4, **kinds))
        long_first = asyncio.create_task(first_step(long))
        deltas = []

        async def decode() -> None:
            output = await anext(decoder)
            deltas.append((engine.stats().num_steps, len(output.outputs[0].token_ids)))

        while engine.stats().num_steps < start + 10:
            await decode()
        arrival = engine.stats().num_steps
        short = await engine.add_request([7] * 20, SamplingParams(max_tokens=4, **kinds))
        short_first = asyncio.create_task(first_step(short))
        while not long_first.done():
            await decode()
        decoder.abort()
        return start, deltas, arrival, short_first.result(), long_first.result()

    start, deltas, arrival, short_step, long_step = llm._call(scenario())
    assert long_step - start >= 50
    assert short_step - arrival <= 4  # three steps, and the one in which its token is delivered
    steps = [step for step, _ in deltas]
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 1
    assert sum(count for _, count in deltas) >= steps[-1] - start - 1
    llm.shutdown()
