"""The engine's adapters: by name and by request, in memory and out of it, while requests run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest
from helpers.fake_adapter import choice_of, fake_adapter, write_adapter
from helpers.fake_engine import make_engine
from helpers.fake_model import continuation

from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import ConfigError, InvalidRequestError, ModelLoadError, RequestFailedError
from streamllm.lora.request import LoRARequest
from streamllm.pooling_params import PoolingParams
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

PROMPT = list(range(32, 80))


def params(max_tokens: int = 6, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **fields)


def with_engine(test: Callable[..., Awaitable[None]] | None = None, **settings):
    """Runs an async test with a started engine that has LoRA, and sees that nothing is left behind."""
    if test is None:
        return functools.partial(with_engine, **settings)

    def run(tmp_path):
        async def main() -> None:
            engine = make_engine(**{"enable_lora": True, "max_loras": 2, **settings})
            await engine.start()
            try:
                await asyncio.wait_for(test(engine, tmp_path), 20)
                assert engine._pool.num_used == 0
                assert not any(engine.adapters._users_of_content.values())
                assert not engine.adapters._users_of_name
                assert not any(engine._scheduler.lora_slots._num_users)
            finally:
                await engine.stop()

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def generate(engine: AsyncEngine, lora_request: LoRARequest | None, *, prompt=PROMPT, **fields):
    """(tokens, tokens found in the prefix cache) of a request."""
    stream = await engine.add_request(prompt, params(**fields), lora_request=lora_request)
    output = await anext(stream)
    assert output.lora_request is lora_request
    return output.outputs[0].token_ids, output.num_cached_tokens


def answer_of(text: str | None, count: int = 6, prompt=PROMPT) -> list[int]:
    return continuation(prompt, count, choice_of(None if text is None else fake_adapter(text)))


def named(name: str, folder="") -> LoRARequest:
    return LoRARequest(name, 1, str(folder))


@with_engine(step_seconds=0.02)
async def test_base_and_adapters_at_once(engine, tmp_path):
    requests = [None, *(named(text, write_adapter(tmp_path / text, text)) for text in "abcd")]
    outputs = await asyncio.gather(*(generate(engine, request) for request in requests))
    assert [ids for ids, _ in outputs] == [answer_of(text) for text in (None, *"abcd")]
    assert len({tuple(ids) for ids, _ in outputs}) == 5
    assert engine._executor.runner.max_adapters == 2


@with_engine
async def test_an_adapter_is_read_once(engine, tmp_path):
    request = named("a", write_adapter(tmp_path / "a", "a"))
    await asyncio.gather(*(generate(engine, request) for _ in range(5)))
    assert engine._executor.adapters_read == [request.lora_path]


@with_engine
async def test_blocks_are_shared_within_an_adapter_only(engine, tmp_path):
    first, second = (named(t, write_adapter(tmp_path / t, t)) for t in "ab")
    order = [None, first, second, None, first, second]
    assert [(await generate(engine, request))[1] for request in order] == [0, 0, 0, 32, 32, 32]


@with_engine
async def test_other_weights_under_the_same_name(engine, tmp_path):
    """What was cached for the old weights is not found for the new ones, and the other way round."""
    write_adapter(tmp_path / "a", "old")
    await engine.adapters.load("a", str(tmp_path / "a"))
    assert await generate(engine, named("a")) == (answer_of("old"), 0)
    assert await generate(engine, named("a")) == (answer_of("old"), 32)
    write_adapter(tmp_path / "a", "new")
    await engine.adapters.load("a", str(tmp_path / "a"), load_inplace=True)
    assert await generate(engine, named("a")) == (answer_of("new"), 0)
    assert await generate(engine, named("a")) == (answer_of("new"), 32)
    write_adapter(tmp_path / "b", "old")
    await engine.adapters.load("a", str(tmp_path / "b"), load_inplace=True)
    assert await generate(engine, named("a")) == (answer_of("old"), 32)


@with_engine(step_seconds=0.005)
async def test_replaced_while_requests_run(engine, tmp_path):
    """They end with the weights with which they began."""
    path = write_adapter(tmp_path / "a", "old")
    await engine.adapters.load("a", path)
    running = asyncio.create_task(generate(engine, named("a"), max_tokens=40))
    await asyncio.sleep(0.03)
    write_adapter(tmp_path / "a", "new")
    await engine.adapters.load("a", path, load_inplace=True)
    assert (await generate(engine, named("a")))[0] == answer_of("new")
    assert (await running)[0] == answer_of("old", 40)
    assert [*engine.adapters._parsed] == [fake_adapter("new").content]


@with_engine(step_seconds=0.005)
async def test_unload(engine, tmp_path):
    path = write_adapter(tmp_path / "a", "a")
    await engine.adapters.load("a", path)
    running = await engine.add_request(PROMPT, params(20), lora_request=named("a"))
    with pytest.raises(InvalidRequestError, match="1 request uses") as refused:
        engine.adapters.unload("a")
    assert (refused.value.status, refused.value.code) == (409, "adapter_in_use")
    assert (await anext(running)).outputs[0].token_ids == answer_of("a", 20)
    engine.adapters.unload("a")
    assert engine.adapters.served() == [] and not engine.adapters._parsed
    with pytest.raises(InvalidRequestError) as refused:
        engine.adapters.unload("a")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    await generate(engine, None)
    assert not engine._executor.runner.adapters  # the model's slot was emptied too
    with pytest.raises(InvalidRequestError, match="lora_path"):
        await generate(engine, named("a"))


@with_engine
async def test_unload_keeps_weights_that_another_name_has(engine, tmp_path):
    for name in "ab":
        await engine.adapters.load(name, write_adapter(tmp_path / name, "same"))
    engine.adapters.unload("a")
    assert await generate(engine, named("b")) == (answer_of("same"), 0)
    assert len(engine._executor.adapters_read) == 2


@with_engine
async def test_names_that_are_refused(engine, tmp_path):
    path = write_adapter(tmp_path / "a", "a")
    await engine.adapters.load("a", path)
    for name in ("a", engine.model_name, "", "x" * 201, "a\nb"):
        with pytest.raises(InvalidRequestError) as refused:
            await engine.adapters.load(name, path)
        assert refused.value.param == "lora_name"
    assert [served.name for served in engine.adapters.served()] == ["a"]


@with_engine
async def test_two_loads_of_one_name_at_once(engine, tmp_path):
    loads = [engine.adapters.load("a", write_adapter(tmp_path / text, text)) for text in "xy"]
    results = await asyncio.gather(*loads, return_exceptions=True)
    assert [isinstance(result, InvalidRequestError) for result in results] == [False, True]


@with_engine
async def test_files_that_are_refused(engine, tmp_path):
    broken = write_adapter(tmp_path / "broken", "!rank 99 is more than --max-lora-rank 16.")
    for path, text in ((broken, "rank 99"), (str(tmp_path / "nowhere"), "nowhere")):
        with pytest.raises(InvalidRequestError, match=text) as refused:
            await engine.adapters.load("a", path)
        assert refused.value.param == "lora_path"
        with pytest.raises(InvalidRequestError, match=text) as refused:
            await generate(engine, named("a", path))
        assert refused.value.param == "lora_request"
    assert engine.adapters.served() == []
    assert (await generate(engine, None))[0] == answer_of(None)


@with_engine(max_loras=1, max_cpu_loras=2)
async def test_memory_holds_so_many_adapters(engine, tmp_path):
    """The least recently used is read again when it is asked for."""
    for text in "abc":
        await engine.adapters.load(text, write_adapter(tmp_path / text, text))
    assert len(engine.adapters._parsed) == 2
    for text in "abcab":
        assert (await generate(engine, named(text)))[0] == answer_of(text)
        assert len(engine.adapters._parsed) <= 2
    assert len(engine._executor.adapters_read) == 8


@with_engine(max_loras=1, max_cpu_loras=2, step_seconds=0.002)
async def test_more_adapters_in_use_than_memory_holds(engine, tmp_path):
    """Who needs one more waits for a place; the base model does not."""
    requests = [named(text, write_adapter(tmp_path / text, text)) for text in "abcdef"]
    seen = 0

    async def ask(request: LoRARequest) -> None:
        nonlocal seen
        ids, _ = await generate(engine, request, max_tokens=10)
        seen = max(seen, len(engine.adapters._parsed))
        assert ids == answer_of(request.lora_name, 10)

    tasks = [asyncio.create_task(ask(request)) for request in requests * 3]
    await asyncio.sleep(0)
    assert (await generate(engine, None, max_tokens=2))[0] == answer_of(None, 2)
    assert not all(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    assert seen == 2


@with_engine(max_loras=1, max_cpu_loras=1, step_seconds=0.002)
async def test_who_waits_for_memory_is_not_starved(engine, tmp_path):
    first, second = (named(t, write_adapter(tmp_path / t, t)) for t in "ab")
    done = False

    async def keep_asking(delay: float) -> None:
        await asyncio.sleep(delay)
        while not done:
            await generate(engine, first, max_tokens=10)

    others = [asyncio.create_task(keep_asking(delay)) for delay in (0, 0.01)]
    await asyncio.sleep(0.03)
    assert (await generate(engine, second))[0] == answer_of("b")
    done = True
    await asyncio.gather(*others)


@with_engine(max_loras=1, max_cpu_loras=1, step_seconds=0.005)
async def test_cancelled_while_it_waits_for_memory(engine, tmp_path):
    first, second = (named(t, write_adapter(tmp_path / t, t)) for t in "ab")
    running = await engine.add_request(PROMPT, params(30), lora_request=first)
    waiting = asyncio.create_task(generate(engine, second))
    await asyncio.sleep(0.02)
    waiting.cancel()
    assert (await generate(engine, first))[0] == answer_of("a")
    await anext(running)


@with_engine(step_seconds=0.005, max_loras=1)
async def test_aborted_requests_leave_nothing(engine, tmp_path):
    requests = [named(text, write_adapter(tmp_path / text, text)) for text in "abc"]
    streams = [
        await engine.add_request(PROMPT, params(200, n=2), lora_request=request) for request in requests * 2
    ]
    await asyncio.sleep(0.02)
    for stream in streams:
        stream.abort()
    await asyncio.sleep(0.03)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


@with_engine(step_seconds=0.002)
async def test_a_failed_step_ends_requests_and_adapters_are_loaded_anew(engine, tmp_path):
    request = named("a", write_adapter(tmp_path / "a", "a"))
    engine._executor.fail_next.append(RuntimeError("out of memory"))
    with pytest.raises(RequestFailedError):
        await generate(engine, request)
    assert (await generate(engine, request))[0] == answer_of("a")


@with_engine(max_loras=1, max_cpu_loras=1)
async def test_files_that_change_or_vanish_while_they_are_not_in_memory(engine, tmp_path):
    for text in "ab":
        await engine.adapters.load(text, write_adapter(tmp_path / text, text))
    write_adapter(tmp_path / "a", "changed")
    assert await generate(engine, named("a")) == (answer_of("changed"), 0)
    assert engine.adapters.get("a").content == fake_adapter("changed").content
    (tmp_path / "b" / "adapter.txt").unlink()
    with pytest.raises(RequestFailedError, match="b cannot be read again"):
        await generate(engine, named("b"))
    assert (await generate(engine, named("a")))[0] == answer_of("changed")


@with_engine
async def test_load_inplace_of_a_request_reads_the_files_anew(engine, tmp_path):
    path = write_adapter(tmp_path / "a", "old")
    assert (await generate(engine, named("a", path)))[0] == answer_of("old")
    write_adapter(tmp_path / "a", "new")
    assert (await generate(engine, named("a", path)))[0] == answer_of("old")
    request = LoRARequest("a", 1, path, load_inplace=True)
    assert await generate(engine, request) == (answer_of("new"), 0)


@with_engine
async def test_beam_search_and_embeddings_take_adapters(engine, tmp_path):
    request = named("a", write_adapter(tmp_path / "a", "a"))
    beams = await engine.add_request(
        PROMPT, BeamSearchParams(beam_width=2, max_tokens=3), lora_request=request
    )
    output = await anext(beams)
    assert output.lora_request is request and len(output.outputs) == 2
    await engine.embed(PROMPT, PoolingParams(), lora_request=request)
    contents = {new.lora_slot for b in engine._executor.runner.batches for new in b.new_sequences}
    assert contents == {0}


@with_engine(enable_lora=False)
async def test_without_lora(engine, tmp_path):
    path = write_adapter(tmp_path / "a", "a")
    with pytest.raises(InvalidRequestError, match="--enable-lora") as refused:
        await generate(engine, named("a", path))
    assert refused.value.param == "lora_request"
    with pytest.raises(InvalidRequestError, match="--enable-lora"):
        await engine.adapters.load("a", path)


def test_modules_from_the_start(tmp_path):
    paths = {text: write_adapter(tmp_path / text, text) for text in "abc"}
    engine = make_engine(enable_lora=True, max_loras=2, max_cpu_loras=2)
    engine.adapters.load_modules(paths)
    assert [served.name for served in engine.adapters.served()] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="b is the base model's name"):
        engine.adapters.reserve(["served", "b"])
    for name, path in ((engine.model_name, paths["a"]), ("d", str(tmp_path / "none"))):
        with pytest.raises(ModelLoadError, match=f"--lora-modules {name}="):
            engine.adapters.load_modules({name: path})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 5}, "lora_name"),
        ({"lora_name": "a", "lora_int_id": 0}, "lora_int_id"),
        ({"lora_name": "a", "lora_int_id": "1"}, "lora_int_id"),
    ],
)
def test_lora_requests_that_are_refused(fields, param):
    with pytest.raises(InvalidRequestError) as refused:
        LoRARequest(**fields)
    assert refused.value.param == param


def test_a_lora_request_has_vllms_fields():
    from pathlib import Path

    import streamllm

    request = streamllm.LoRARequest("sql", 3, Path("/adapters/sql"))
    assert request == LoRARequest("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
