"""Two steps in flight give what one gives: the whole engine over native plans, with and without a queue.

A native row's bits do not depend on the batch that it is in, so equality is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.queued_backend import queued_runner
from helpers.random_runner import CONFIG, RandomCheckpoint, make_runner

from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from streamllm.models.model_config import ModelConfig
from streamllm.pooling_params import PoolingParams
from streamllm.runner.backends import load_model
from streamllm.runner.executor import Executor
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from streamllm.structured_outputs import StructuredOutputsParams
from streamllm.text.chat_template import ChatTemplate

MAX_MODEL_LEN = 160
MAX_NUM_SEQS = 8
BUDGET = 48


def make_engine(
    queue_depth: int,
    *,
    num_blocks: int = 80,
    layer_windows: tuple[int | None, ...] = (None, None),
    runner: Callable[..., ModelRunner] = queued_runner,
    **settings: Any,
) -> AsyncEngine:
    """An engine over a small random model.

    Args:
        runner: makes the model runner where there is a queue.
    """
    config = replace(CONFIG, vocab_size=257, layer_windows=layer_windows, eos_token_ids=(EOS,))
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "threads": 1,
    }
    model_runner = runner(config, **sizes) if queue_depth > 1 else make_runner(None, config, **sizes)
    assert model_runner.queue_depth == queue_depth
    tokenizer = ByteTokenizer()
    return AsyncEngine(
        config=EngineConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            debug_kv_blocks=True,
            seed=0,
            **settings,
        ),
        model_name="random",
        model_config=config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_template, {}),
        executor=Executor(model_runner),
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        default_sampling={},
    )


@dataclass
class Work:
    """A request, and after how many outputs its client goes away (never: ``None``)."""

    prompt: list[int]
    params: Any
    leaves_after: int | None = None


def sampling(rng: random.Random, **fields: Any) -> SamplingParams:
    """Random parameters of every kind that may run ahead, unless ``fields`` say otherwise."""
    fields = {
        "max_tokens": rng.choice([1, 2, 17, 40, None]),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 20]),
        "seed": rng.getrandbits(32),
        "n": rng.choice([1, 1, 1, 3]),
        "logprobs": rng.choice([None, None, 2]),
        "stop": rng.choice([None, ["e"], ["a", "qx"]]),
        "stop_token_ids": rng.choice([None, None, list(range(0, 256, 17))]),
        "logit_bias": rng.choice([None, None, {EOS: 4.0}, {65: -100.0, EOS: 3.0}]),
        "allowed_token_ids": rng.choice([None, None, None, [*range(32, 127), EOS]]),
        "min_tokens": rng.choice([0, 0, 5]),
        **fields,
    }
    if fields["max_tokens"] is not None:
        fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    if fields["temperature"] == 0.0:
        fields["n"] = 1
    return SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, **fields)


def upper_the_third(prompt_ids: Any, output_ids: Any, logits: np.ndarray) -> np.ndarray:
    """A logits processor that looks at how much has been said."""
    logits[97:123] -= 3.0 * (len(output_ids) % 3)
    return logits


def some_work(rng: random.Random) -> Work:
    stem = list(range(40, 40 + rng.choice([0, 0, 16, 33])))
    prompt = stem + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    kind = rng.randrange(12)
    leaves_after = rng.randint(1, 10) if rng.random() < 0.15 else None
    if kind == 0:
        return Work(prompt, PoolingParams(pooling=rng.choice(["last", "mean"])))
    if kind == 1:
        return Work(prompt, BeamSearchParams(beam_width=rng.choice([2, 3]), max_tokens=rng.randint(1, 12)))
    fields: dict[str, Any] = {}
    if kind == 2:
        fields = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,30}"), "stop": None,
                  "logit_bias": None, "allowed_token_ids": None, "stop_token_ids": None}  # fmt: skip
    elif kind == 3:
        fields = {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    elif kind == 4:
        fields = {"bad_words": ["ab", "b", "the"]}
    elif kind == 5:
        fields = {"prompt_logprobs": 1}
    return Work(prompt, sampling(rng, **fields), leaves_after)


async def answers(engine: AsyncEngine, works: list[Work], rng: random.Random) -> list[Any]:
    """What each request got, in comparable form; they arrive at random moments."""
    executor: Any = engine._executor
    await engine.start()

    async def one(work: Work) -> Any:
        await asyncio.sleep(rng.random() * 0.05)
        if isinstance(work.params, PoolingParams):
            return (await engine.embed(work.prompt, work.params)).outputs.embedding
        try:
            stream = await engine.add_request(work.prompt, work.params)
        except InvalidRequestError as error:
            return str(error)
        last, count = None, 0
        async for output in stream:
            last, count = output, count + 1
            if count == work.leaves_after:
                stream.abort()
        assert last is not None
        return last

    results = await asyncio.gather(*(one(work) for work in works))
    for _ in range(200):
        if not engine.stats().num_used_blocks:
            break
        await asyncio.sleep(0.005)
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not executor.runner.in_flight
    await engine.stop()
    return results


def check_equal(works: list[Work], one: list[Any], two: list[Any]) -> None:
    for work, expected, found in zip(works, one, two, strict=True):
        if isinstance(expected, str):
            assert found == expected and "blocks" in found
            continue
        if isinstance(work.params, PoolingParams):
            np.testing.assert_array_equal(found, expected)
            continue
        assert found.prompt_logprobs == expected.prompt_logprobs
        for a, b in zip(expected.outputs, found.outputs, strict=True):
            if "abort" in (a.finish_reason, b.finish_reason):
                common = min(len(a.token_ids), len(b.token_ids))
                assert a.token_ids[:common] == b.token_ids[:common]
                continue
            assert b == a


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"num_blocks": 12},
        {"enable_prefix_caching": False, "layer_windows": (20, None), "num_blocks": 40},
    ],
    ids=["roomy", "tight", "windows"],
)
async def test_two_steps_in_flight_give_what_one_gives(seed, setting):
    rng = random.Random(seed)
    works = [some_work(rng) for _ in range(24)]
    long = {"n": 1, "max_tokens": 70, "ignore_eos": True, "stop": None, "stop_token_ids": None}
    works += [Work([index] * 20, sampling(rng, **long)) for index in range(6)]
    one = await answers(make_engine(1, **setting), works, random.Random(seed))
    slow = functools.partial(queued_runner, delay=rng.choice([0.0, 0.002]))
    queued = make_engine(2, runner=slow, **setting)
    two = await answers(queued, works, random.Random(seed + 1))
    check_equal(works, one, two)
    assert queued._executor.runner._backend.most_marks == 2
    if setting.get("num_blocks") == 12:
        assert queued.stats().num_preemptions > 0


def device_runner(config: ModelConfig, **sizes: Any) -> ModelRunner:
    """A runner over the backend of a GPU, with kernels in torch, on a CPU."""
    torch = pytest.importorskip("torch")
    from streamllm.ops.gpu.reference import ReferenceKernels
    from streamllm.runner.gpu_backend import GpuBackend

    checkpoint = RandomCheckpoint(config)
    backend = GpuBackend(ReferenceKernels(), torch.device("cpu"), torch.float32)
    loaded = load_model(config, backend, checkpoint, False, "float32")
    return make_runner(checkpoint, config, loaded=loaded, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
async def test_the_backend_of_a_gpu_draws_the_same_tokens(seed):
    """Its sums have another order, so that logprobs differ in their last digits."""
    rng = random.Random(seed)
    works = [work for work in (some_work(rng) for _ in range(24)) if isinstance(work.params, SamplingParams)]
    one = await answers(make_engine(1), works, random.Random(seed))
    two = await answers(make_engine(2, runner=device_runner, num_blocks=12), works, random.Random(seed))
    for expected, found in zip(one, two, strict=True):
        for a, b in zip(expected.outputs, found.outputs, strict=True):
            if "abort" not in (a.finish_reason, b.finish_reason):
                assert (b.token_ids, b.text, b.finish_reason) == (a.token_ids, a.text, a.finish_reason)
                assert (b.stop_reason, b.logprobs is None) == (a.stop_reason, a.logprobs is None)


async def test_no_step_runs_past_an_end_by_length():
    engine = make_engine(2)
    await engine.start()
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    assert await drain(await engine.add_request([1, 2, 3], params)) == 9
    assert engine.stats().num_steps == 9
    assert engine._executor.runner._backend.most_marks == 2
    await engine.stop()


async def test_rows_that_need_their_ids_wait_for_them_while_others_run_ahead():
    engine = make_engine(2)
    await engine.start()
    params = [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{40}")),
    ]
    streams = await engine.add_requests([[1, 2, 3]] * 3, params)
    await asyncio.gather(*(drain(stream) for stream in streams))
    # The first one is in every step; the others are in every second until it ends, then in every one.
    assert 29 <= engine.stats().num_steps <= 31
    await engine.stop()


async def drain(stream: Any) -> int:
    """Reads a stream to its end; the number of its tokens."""
    async for output in stream:
        num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    return num_tokens


@pytest.mark.parametrize("where", ["draw", "start"])
async def test_a_step_that_fails_takes_those_behind_it_along_and_nobody_else(where, monkeypatch):
    engine = make_engine(2, runner=functools.partial(queued_runner, delay=0.002))
    await engine.start()
    runner: Any = engine._executor.runner
    ignored = {"temperature": 0, "ignore_eos": True}
    params = SamplingParams(max_tokens=100, **ignored)
    victims = await engine.add_requests([[1, 2, 3], [4, 5, 6]], [params] * 2)
    for stream in victims:
        await anext(stream)
    tasks = [asyncio.ensure_future(drain(stream)) for stream in victims]
    if where == "draw":
        runner._backend.fail_next = [RuntimeError("the device is lost")]
    else:
        fill = runner._state.fill

        def failing_fill(*args: Any) -> None:
            monkeypatch.setattr(runner._state, "fill", fill)
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(runner._state, "fill", failing_fill)
    for task in tasks:
        with pytest.raises(RequestFailedError, match="the device is lost"):
            await task
    # What the failed steps wrote is not found; who comes next is served, in the same blocks.
    alone = make_engine(1)
    await alone.start()
    for prompt in ([1, 2, 3] * 20, [9] * 40):
        params = SamplingParams(max_tokens=30, **ignored, output_kind=RequestOutputKind.FINAL_ONLY)
        ours, theirs = [await anext(await each.add_request(prompt, params)) for each in (engine, alone)]
        assert ours.outputs == theirs.outputs
    assert engine.is_healthy
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().finished["error"] == 2
    await engine.stop()
    await alone.stop()


async def test_an_engine_whose_device_is_lost_gives_up():
    engine = make_engine(2)
    engine._executor.runner._backend.fail_next = [RuntimeError("the device is lost")] * 50
    await engine.start()
    for _ in range(20):
        with contextlib.suppress(RequestFailedError, EngineDeadError):
            await drain(await engine.add_request([1, 2, 3], SamplingParams()))
    assert not engine.is_healthy and "the device is lost" in str(engine.dead_error)


async def test_the_watchdog_sees_how_long_the_oldest_step_takes():
    engine = make_engine(2, runner=functools.partial(queued_runner, delay=0.1))
    await engine.start()
    assert engine.step_seconds == 0
    task = asyncio.ensure_future(
        drain(await engine.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)))
    )
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0.002)
        longest = max(longest, engine.step_seconds)
    assert 0 < longest < 1.0
    assert engine.step_seconds == 0
    await engine.stop()
