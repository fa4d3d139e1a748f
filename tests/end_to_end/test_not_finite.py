"""A model with one token whose embedding holds NaN or infinity: it ends the requests that hold it, with an
error that says so, and nobody else notices. Real kernels, real engine, real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from helpers.live_server import LiveServer
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import load_reference, make_tiny_model

from streamllm import LLM, SamplingParams, _native
from streamllm.config import EngineConfig
from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import RequestFailedError
from streamllm.outputs import CompletionOutput
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind
from streamllm.sources.gguf_file import GGUFFile

POISON = 77
BLOCK = 16
SAYS_SO = "not finite"
PARAMS = SamplingParams(
    temperature=0.8, top_k=20, seed=1, max_tokens=12, logprobs=2, ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)  # fmt: skip
VALUES = {"nan": float("nan"), "infinite": float("inf")}


def poison_folder(folder: Path, value: float, dtype: str) -> Path:
    from safetensors.torch import load_file, save_file

    path = make_tiny_model(folder, dtype=dtype) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON, 5] = value
    tensors["lm_head.weight"][POISON] = 0  # others are likelier: nobody chooses it by accident
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def poison_gguf(path: Path, value: float) -> Path:
    """Q8_0 everywhere; the scale of the first group of the token's row is the value."""
    save_tiny_gguf(path, quantization="Q8_0")
    tensors = GGUFFile(path).tensors
    embedding, head = tensors["token_embd.weight"], tensors["output.weight"]
    row_bytes = embedding.shape[1] // 32 * 34
    with path.open("r+b") as file:
        file.seek(embedding.offset + POISON * row_bytes)
        file.write(struct.pack("<e", value))
        file.seek(head.offset + POISON * row_bytes)
        file.write(bytes(row_bytes))
    return path


MODELS = list(itertools.product(("float32", "bfloat16", "q8_0"), VALUES))


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def model(request, tmp_path_factory) -> tuple[Path, str]:
    """A poisoned model, and the --dtype that runs its kernels."""
    stored_as, name = request.param
    folder = tmp_path_factory.mktemp("model")
    if stored_as == "q8_0":
        return poison_gguf(folder / "m.gguf", VALUES[name]), "auto"
    return poison_folder(folder, VALUES[name], stored_as), "float32" if stored_as == "float32" else "auto"


@contextlib.asynccontextmanager
async def engine_of(model: tuple[Path, str], **settings: Any) -> AsyncIterator[AsyncEngine]:
    path, dtype = model
    settings = {"num_gpu_blocks_override": 64, "debug_kv_blocks": True} | settings
    engine = AsyncEngine.from_config(EngineConfig(model=str(path), dtype=dtype, max_num_seqs=16, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def generate(engine: AsyncEngine, prompt: list[int], params: Any = PARAMS) -> list[CompletionOutput]:
    outputs = [output async for output in engine.generate(prompt, params)]
    return outputs[-1].outputs


def bits(choices: list[CompletionOutput]) -> list[tuple]:
    return [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in choices]


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(80, 320, length).tolist()


GOOD = [prompt_of(length, seed) for seed, length in enumerate((3, 20, 40, 70))]
SHARED = prompt_of(2 * BLOCK, 9)
BAD = {
    "first": [POISON, *prompt_of(20, 5)],
    "in the middle": [*prompt_of(18, 6), POISON, *prompt_of(40, 7)],
    "last": [*prompt_of(30, 8), POISON],
    "after a prefix": [*SHARED, POISON, *prompt_of(40, 7)],
}


async def test_only_the_request_that_holds_the_token_fails(model):
    # A small step: prompts are computed in chunks, and the token is often in another one than the last.
    async with engine_of(model, max_num_batched_tokens=24) as engine:
        alone = [bits(await generate(engine, prompt)) for prompt in GOOD]
        engine.reset_prefix_cache()
        results = await asyncio.gather(
            *(generate(engine, prompt) for pair in zip(GOOD, BAD.values(), strict=True) for prompt in pair),
            return_exceptions=True,
        )
        assert [bits(choices) for choices in results[::2]] == alone
        for error in results[1::2]:
            assert isinstance(error, RequestFailedError) and SAYS_SO in str(error)
        stats = engine.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.finished == stats.finished | {"error": len(BAD), "length": 2 * len(GOOD)}


async def test_the_prefix_cache_never_turns_the_failure_into_an_answer(model):
    async with engine_of(model) as engine:
        clean = bits(await generate(engine, [*SHARED, 99, *prompt_of(20, 3)]))
        for _ in range(3):
            for prompt in BAD.values():
                with pytest.raises(RequestFailedError, match=SAYS_SO):
                    await generate(engine, prompt)
        # What comes before the token is as good as ever, and found.
        hits = engine.stats().prefix_cache_hits
        assert bits(await generate(engine, [*SHARED, 99, *prompt_of(20, 3)])) == clean
        assert engine.stats().prefix_cache_hits - hits >= 2 * BLOCK


async def test_blocks_that_held_nan_serve_others(model):
    # Eight blocks: every prompt takes over what the failed one left.
    async with engine_of(model, num_gpu_blocks_override=8, max_num_batched_tokens=64) as engine:
        clean = [bits(await generate(engine, prompt)) for prompt in GOOD]
        for prompt, expected in zip(GOOD, clean, strict=True):
            with pytest.raises(RequestFailedError, match=SAYS_SO):
                await generate(engine, [POISON, *prompt_of(8 * BLOCK - 20, 4)])
            engine.reset_prefix_cache()
            assert bits(await generate(engine, prompt)) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5),
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, max_tokens=5),
        BeamSearchParams(beam_width=3, max_tokens=5),
    ],
    ids=["choices", "greedy", "filters", "beams"],
)
async def test_however_it_samples(model, params):
    async with engine_of(model) as engine:
        with pytest.raises(RequestFailedError, match=SAYS_SO):
            await generate(engine, BAD["in the middle"], params)
        assert engine.stats().num_used_blocks == 0
        assert await generate(engine, GOOD[0])


@pytest.mark.parametrize("instruction_set", _native.instruction_sets())
async def test_on_every_instruction_set(model, instruction_set):
    before = _native.instruction_set()
    _native.set_instruction_set(instruction_set)
    try:
        async with engine_of(model) as engine:
            for prompt in BAD.values():
                with pytest.raises(RequestFailedError, match=SAYS_SO):
                    await generate(engine, prompt)
    finally:
        _native.set_instruction_set(before)


def test_offline_it_is_an_exception_and_the_engine_lives_on(model):
    path, dtype = model
    llm = LLM(str(path), dtype=dtype, num_gpu_blocks_override=64)
    try:
        alone = llm.generate(GOOD[1], PARAMS)
        with pytest.raises(RequestFailedError, match=SAYS_SO):
            llm.generate([GOOD[0], BAD["first"]], PARAMS)
        assert bits(llm.generate(GOOD[1], PARAMS)[0].outputs) == bits(alone[0].outputs)
        assert llm.stats().num_used_blocks == 0
    finally:
        llm.shutdown()


async def test_a_finite_value_whose_square_overflows_is_computed_as_in_transformers(tmp_path):
    import torch

    folder = poison_folder(tmp_path, 1e38, "float32")
    reference = load_reference(folder)
    greedy = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    async with engine_of((folder, "float32")) as engine:
        alone = bits(await generate(engine, GOOD[1]))
        results = await asyncio.gather(
            generate(engine, GOOD[1]), *(generate(engine, prompt, greedy) for prompt in BAD.values())
        )
    assert bits(results[0]) == alone
    for prompt, (choice,) in zip(BAD.values(), results[1:], strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=6, max_new_tokens=6, pad_token_id=0
        )
        assert choice.token_ids == expected[0, len(prompt) :].tolist()


async def test_over_http_it_is_a_500_or_an_error_event(tmp_path):
    model = poison_folder(tmp_path, float("nan"), "bfloat16")
    with LiveServer(str(model), "--num-kv-blocks", "64", "--disable-log-stats") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

            async def post(prompt: list[int], **fields: Any) -> httpx.Response:
                body = {"model": model.name, "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
                return await client.post("/v1/completions", json=body)

            alone = (await post(GOOD[1])).json()["choices"]
            good, whole, streamed = await asyncio.gather(
                post(GOOD[1]), post(BAD["last"]), post(BAD["first"], stream=True)
            )
            assert good.status_code == 200 and good.json()["choices"] == alone
            assert whole.status_code == 500 and SAYS_SO in whole.json()["error"]["message"]
            assert streamed.status_code == 200
            events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
            errors = [orjson.loads(event)["error"] for event in events if event != "[DONE]"]
            assert len(errors) == 1 and SAYS_SO in errors[0]["message"]
            assert errors[0]["type"] == whole.json()["error"]["type"] == "server_error"
            assert (await post(GOOD[1])).json()["choices"] == alone
        server.wait_until_quiet()
    assert server.exit_code == 0
