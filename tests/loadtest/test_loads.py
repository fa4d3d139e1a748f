from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loads import KINDS, Load, LoadOptions, check, figures, make_loads, make_warm_up
from servers import EngineFailure

from streamllm.bench.client import Result
from streamllm.bench.prompts import Request
from streamllm.text.tokenizer import Tokenizer

OPTIONS = LoadOptions(
    list(KINDS), streams=[1, 4], requests_per_stream=2, input_len=128, output_len=20, seed=3
)


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(default_model_path)


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def loads(encode: Callable[[str], list[int]]) -> dict[str, Load]:
    return {load.name: load for load in make_loads(OPTIONS, encode, round_number=1)}


def prompts(loads: list[Load]) -> list[tuple[int, ...]]:
    return [tuple(request.prompt) for load in loads for request in load.requests]


def test_every_load_asks_for_its_exact_work(loads: dict[str, Load]) -> None:
    shapes = {
        name: (len(load.requests), load.concurrency, {len(r.prompt) for r in load.requests})
        for name, load in loads.items()
    }
    assert shapes == {
        "streams-1": (3, 1, {128}),
        "streams-4": (8, 4, {128}),
        "long-prompt": (1, 1, {2000}),
        "shared-prefix": (8, 8, {1532}),
        "mixed-lengths-4": (8, 4, {128}),
        "offline-4": (8, 4, {128}),
    }
    assert {r.max_tokens for r in loads["streams-4"].requests} == {20}
    assert all(16 <= r.max_tokens <= 256 for r in loads["mixed-lengths-4"].requests)
    assert len({r.max_tokens for r in loads["mixed-lengths-4"].requests}) > 1
    assert loads["shared-prefix"].longest == 1532 + 16


def test_only_the_shared_prefix_is_shared(loads: dict[str, Load]) -> None:
    shared = [request.prompt for request in loads["shared-prefix"].requests]
    assert {tuple(prompt[:1500]) for prompt in shared} == {tuple(shared[0][:1500])}
    assert len({prompt[1500] for prompt in shared}) == len(shared)
    others = prompts([load for load in loads.values() if load.kind != "shared-prefix"])
    # Shorter than any engine's cache block, so that none finds a beginning again.
    assert len({prompt[:8] for prompt in others}) == len(others)


def test_rounds_differ_in_prompts_only(encode: Callable[[str], list[int]], loads: dict[str, Load]) -> None:
    second = make_loads(OPTIONS, encode, round_number=2)
    assert not {p[:8] for p in prompts(list(loads.values()))} & {p[:8] for p in prompts(second)}
    first = [[r.max_tokens for r in load.requests] for load in loads.values()]
    assert [[r.max_tokens for r in load.requests] for load in second] == first
    again = make_loads(OPTIONS, encode, round_number=1)
    assert prompts(again) == prompts(list(loads.values()))


def test_text_prompts_have_the_same_tokens(tokenizer: Tokenizer, loads: dict[str, Load]) -> None:
    for ids in prompts(list(loads.values())):
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == list(ids)


def test_warm_up_reaches_every_number_of_streams(encode: Callable[[str], list[int]]) -> None:
    assert [(load.concurrency, len(load.requests)) for load in make_warm_up(OPTIONS, encode)] == [
        (1, 1),
        (4, 4),
    ]


def test_a_tokenizer_that_merges_words_is_refused() -> None:
    with pytest.raises(ValueError, match="does not cut at spaces: 1 tokens instead of 128"):
        make_loads(OPTIONS, lambda text: [7], round_number=1)


LOAD = Load("streams-2", "streams", [Request(0, [1, 2, 3], 5), Request(1, [4, 5, 6], 5)], 2)


def result(index: int, due: float = 0.0, tokens: int = 5, **changes: object) -> Result:
    values = {
        "prompt_tokens": 3, "completion_tokens": tokens, "num_chunks": tokens, "ttft": 1.0, "e2e": 3.0,
        "finish_reason": "length",
    }  # fmt: skip
    return Result(index, due, **(values | changes))  # type: ignore[arg-type]


def test_other_work_than_asked_for_fails() -> None:
    check(LOAD, [result(0), result(1)])
    with pytest.raises(
        EngineFailure, match=r"request 1 was to have 3 prompt and 5 output tokens; .* 3 and 4"
    ):
        check(LOAD, [result(0), result(1, tokens=4)])
    with pytest.raises(EngineFailure, match=r"request 0 .* counted 4 and 5"):
        check(LOAD, [result(0, prompt_tokens=4), result(1)])
    with pytest.raises(EngineFailure, match="counted None and None"):
        check(LOAD, [result(0, prompt_tokens=None, completion_tokens=None), result(1)])


def test_figures() -> None:
    results = [result(0), result(1, due=0.5, ttft=2.0, e2e=3.5)]
    values = figures(LOAD, results, duration=4.0, client_cpu=3.0, cores=2)
    assert values == pytest.approx(
        {
            "tokens_per_s": 10 / 4.0,
            "tokens_per_s_alone": 10 / (4.0 - 1.5),
            "ttft_s": 1.5,
            "last_ttft_s": 2.5,
            "itl_ms": 1e3 * (2.0 / 4 + 1.5 / 4) / 2,
        }
    )


def test_figures_that_an_engine_does_not_tell_are_left_out() -> None:
    values = figures(LOAD, [result(0, ttft=None), result(1, ttft=None)], 4.0, 0.0, 2)
    assert values == {"tokens_per_s": 2.5, "tokens_per_s_alone": 2.5}
