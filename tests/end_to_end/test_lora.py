"""Adapters that PEFT wrote, offline and over HTTP, against the same adapters merged into the weights."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import httpx
import openai
import pytest
from helpers.live_server import LiveServer
from helpers.lora_adapters import save_adapter, save_merged
from helpers.tiny_models import make_tiny_model
from prometheus_client.parser import text_string_to_metric_families

from streamllm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from streamllm.errors import InvalidRequestError, ModelLoadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
PROMPTS = ["The quick brown fox", "A language model predicts the next token; a server", "and the dog"]
EXACT = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 128, "threads": 1}
NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny model, three adapters of it, and each of them merged."""
    root = tmp_path_factory.mktemp("lora")
    folders = {"base": make_tiny_model(root / "base")}
    for seed, name in enumerate(NAMES):
        folders[name] = save_adapter(root / name, folders["base"], seed=seed, rank=2 + 3 * seed)
        folders[f"merged-{name}"] = save_merged(root / f"merged-{name}", folders["base"], folders[name])
    return folders


@pytest.fixture(scope="module")
def expected(folders) -> dict[str | None, list]:
    """What the models with merged weights generate, one after the other."""
    results = {}
    for name in (None, *NAMES):
        llm = LLM(str(folders["base" if name is None else f"merged-{name}"]), **EXACT)
        results[name] = [
            llm.generate(PROMPTS, GREEDY, use_tqdm=False),
            llm.embed(PROMPTS, use_tqdm=False),
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5)),
        ]
        llm.shutdown()
    return results


@pytest.fixture(scope="module")
def llm(folders):
    llm = LLM(str(folders["base"]), enable_lora=True, max_loras=2, max_lora_rank=8, **EXACT)
    yield llm
    llm.shutdown()


def request_for(folders, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, NAMES.index(name) + 1, str(folders[name]))


def test_base_and_adapters_in_one_call(llm, folders, expected):
    """More adapters than slots, mixed prompt by prompt."""
    order = [name for _ in PROMPTS for name in (None, *NAMES)]
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    requests = [request_for(folders, name) for name in order]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests)
    for index, output in enumerate(outputs):
        merged = expected[order[index]][0][index // 4]
        assert output.lora_request is requests[index]
        assert output.outputs[0].token_ids == merged.outputs[0].token_ids
        assert output.outputs[0].cumulative_logprob == pytest.approx(
            merged.outputs[0].cumulative_logprob, abs=1e-3
        )
    texts = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(texts) == len(outputs), "an adapter that does nothing"


@pytest.mark.parametrize("name", [None, *NAMES])
def test_embeddings_and_beams(llm, folders, expected, name):
    request = request_for(folders, name)
    for own, merged in zip(
        llm.embed(PROMPTS, use_tqdm=False, lora_request=request), expected[name][1], strict=True
    ):
        assert own.outputs.embedding == pytest.approx(merged.outputs.embedding, abs=1e-4)
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    for own, merged in zip(
        llm.beam_search(PROMPTS, params, lora_request=request), expected[name][2], strict=True
    ):
        assert [beam.tokens for beam in own.sequences] == [beam.tokens for beam in merged.sequences]


def test_chat_with_an_adapter(llm, folders):
    messages = [{"role": "user", "content": "a dog"}]
    outputs = {
        name: llm.chat(messages, GREEDY, use_tqdm=False, lora_request=request_for(folders, name))[0]
        for name in (None, "first")
    }
    assert outputs[None].outputs[0].token_ids != outputs["first"].outputs[0].token_ids
    prompt = {"prompt_token_ids": outputs["first"].prompt_token_ids}
    again = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request_for(folders, "first"))[0]
    assert again.outputs[0].token_ids == outputs["first"].outputs[0].token_ids


def test_preempted_sequences_resume_with_their_adapter(folders, expected):
    """So few blocks that most of the batch is preempted; each gives what it gives alone."""
    settings = {**EXACT, "num_gpu_blocks_override": 8, "max_num_seqs": 4}
    llm = LLM(str(folders["base"]), enable_lora=True, max_loras=1, max_lora_rank=8, **settings)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [request_for(folders, name) for name in ("first", "second") for _ in range(3)]
    prompts = PROMPTS * 2
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    assert llm.stats().num_preemptions > 0
    for prompt, request, output in zip(prompts, requests, together, strict=True):
        (alone,) = llm.generate(prompt, params, use_tqdm=False, lora_request=request)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert llm.stats().num_used_blocks == 0
    llm.shutdown()


def test_refusals_offline(llm, folders, tmp_path):
    count = [request_for(folders, "first")] * 2
    with pytest.raises(InvalidRequestError, match="lora_request holds 2 entries for 3 prompts"):
        llm.generate(PROMPTS, GREEDY, lora_request=count)
    wide = save_adapter(tmp_path / "wide", folders["base"], seed=9, rank=32)
    with pytest.raises(InvalidRequestError, match="--max-lora-rank"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("wide", 9, str(wide)))
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
        llm.generate(PROMPTS[0], GREEDY, lora_request="first")
    with pytest.raises(ModelLoadError, match=r"--lora-modules gone=.*gone"):
        LLM(str(folders["base"]), lora_modules=[f"gone={tmp_path / 'gone'}"], **EXACT)
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 3


def misnamed(adapter: Path, root: Path) -> Path:
    """The adapter with names of layers that the model does not have."""
    from safetensors.numpy import load_file, save_file

    folder = root / "misnamed"
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("self_attn", "attention"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    return folder


def test_over_http(folders, expected, tmp_path):
    """Named at the start, and loaded, replaced and unloaded at run time; refusals disturb nobody."""
    flags = ["--model", str(folders["base"]), "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "64",
             "--max-model-len", "128", "--served-model-name", "base",
             "--lora-modules", f"first={folders['first']}", f"second={folders['second']}"]  # fmt: skip
    with LiveServer(*flags) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:

        def check(model: str, name: str | None) -> None:
            for index, prompt in enumerate(PROMPTS):
                answer = client.completions.create(
                    model=model, prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
                )
                assert answer.choices[0].text == expected[name][0][index].outputs[0].text
                assert answer.model == model

        def load(name: str, path: Path, **fields) -> httpx.Response:
            body = {"lora_name": name, "lora_path": str(path), **fields}
            return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)

        assert [model.id for model in client.models.list()] == ["base", "first", "second"]
        for model, name in (("base", None), ("first", "first"), ("second", "second")):
            check(model, name)
        for path, word in (
            (misnamed(folders["third"], tmp_path), ".attention."),
            (tmp_path, "adapter_"),
        ):
            answer = load("third", path)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path"
            assert word in answer.json()["error"]["message"]
        assert load("third", folders["third"]).status_code == 200
        check("third", "third")
        assert load("third", folders["first"], load_inplace=True).status_code == 200
        check("third", "first")
        answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "third"})
        assert answer.status_code == 200
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="third", prompt="a")
        check("base", None)
        check("second", "second")
        server.wait_until_quiet()
    assert server.exit_code == 0 and "Traceback" not in server.stderr


def test_metrics_name_the_adapters_that_run_and_wait(folders):
    """Three adapters under load, two of which have a slot at a time."""
    flags = ["--model", str(folders["base"]), "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "64",
             "--max-model-len", "128", "--max-loras", "2", "--max-num-seqs", "4",
             "--lora-modules", *(f"{name}={folders[name]}" for name in NAMES)]  # fmt: skip
    with LiveServer(*flags) as server:

        def ask(model: str) -> None:
            body = {"model": model, "prompt": ["a"] * 10, "max_tokens": 100, "ignore_eos": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200

        def adapters(client: httpx.Client) -> tuple[set[str], set[str]]:
            families = text_string_to_metric_families(client.get("/metrics").text)
            (info,) = (f.samples for f in families if f.name == "streamllm:lora_requests_info")
            labels = info[0].labels
            assert len(info) == 1 and labels["max_lora"] == "2"
            running, waiting = labels["running_lora_adapters"], labels["waiting_lora_adapters"]
            return set(filter(None, running.split(","))), set(filter(None, waiting.split(",")))

        threads = [threading.Thread(target=ask, args=[name]) for name in NAMES]
        with httpx.Client(base_url=server.url) as client:
            assert adapters(client) == (set(), set())
            for thread in threads:
                thread.start()
            seen = []
            while any(thread.is_alive() for thread in threads):
                seen.append(adapters(client))
            server.wait_until_quiet()
            assert adapters(client) == (set(), set())
    assert all(len(running) <= 2 and running | waiting <= set(NAMES) for running, waiting in seen)
    assert set.union(*(running for running, _ in seen)) == set(NAMES)
    assert any(running and waiting - running for running, waiting in seen)
