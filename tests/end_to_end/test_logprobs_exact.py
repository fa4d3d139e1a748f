"""Logprobs of answers and prompts in the exact mode, against Transformers' float32 logits."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.live_server import LiveServer
from helpers.reference import load_transformers, teacher_forced_logits
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Die Katze sitzt am Fenster und schaut hinaus; es regnet seit Stunden. 雨が降っています。 🌧️",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))\n" * 6,
]
TOLERANCE = 1e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(1, keepdims=True))


def check_entries(entries: list, token_ids: list[int], expected: np.ndarray, count: int) -> None:
    """``entries[i]`` must be what row ``i`` of ``expected`` says of ``token_ids[i]``."""
    assert len(entries) == len(token_ids) == len(expected)
    for entry, token_id, row in zip(entries, token_ids, expected, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) in (count, count + 1)
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[candidate], abs=TOLERANCE)
        best = np.sort(row)[::-1][:count]
        # Near ties may stand in either order.
        shown = sorted((value.logprob for value in entry.values()), reverse=True)[:count]
        np.testing.assert_allclose(shown, best, atol=TOLERANCE)
        # The rank is that of a row that is equal up to the tolerance.
        above, maybe = (row > row[token_id] + TOLERANCE).sum(), (row > row[token_id] - TOLERANCE).sum()
        assert above + 1 <= entry[token_id].rank <= maybe + 1


def check_output(output, reference, *, prompt_count: int, count: int) -> None:
    prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
    assert output.prompt_logprobs[0] is None
    if len(prompt) > 1:
        expected = log_softmax(teacher_forced_logits(reference, prompt[:1], prompt[1:]))
        check_entries(output.prompt_logprobs[1:], prompt[1:], expected, prompt_count)
    expected = log_softmax(teacher_forced_logits(reference, prompt, generated))
    check_entries(output.outputs[0].logprobs, generated, expected, count)


@pytest.fixture(scope="module")
def reference(default_model_path):
    return load_transformers(default_model_path)


def check_default_model(reference, **settings) -> None:
    llm = LLM(dtype="float32", **settings)
    try:
        asked = SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=5, prompt_logprobs=3)
        cold = llm.generate(TEXTS, asked, use_tqdm=False)
        for output in cold:
            check_output(output, reference, prompt_count=3, count=5)
        # The cache is full of these prompts now; what is asked again is equal, bit for bit.
        assert llm.generate(TEXTS, SamplingParams(max_tokens=1), use_tqdm=False)[2].num_cached_tokens > 0
        warm = llm.generate(TEXTS, asked.clone(n=2), use_tqdm=False)
        for before, after in zip(cold, warm, strict=True):
            assert after.num_cached_tokens == 0
            assert after.prompt_logprobs == before.prompt_logprobs
            assert after.outputs[0].logprobs == before.outputs[0].logprobs
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_default_model_in_small_chunks(reference):
    check_default_model(reference, max_num_batched_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 256])
def test_default_model(reference, budget):
    check_default_model(reference, max_num_batched_tokens=budget)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_preempted_prompts_give_the_same(backend, tmp_path):
    """Six requests that need 78 blocks among 24, so that prompts and answers are computed more than once."""
    path = make_tiny_model(tmp_path, "llama")
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(20, 200, 100 + i).tolist()} for i in range(6)]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=100, ignore_eos=True, logprobs=1,
                            prompt_logprobs=2)  # fmt: skip
    results = []
    for blocks in (24, 200):
        llm = LLM(str(path), dtype="float32", backend=backend, num_gpu_blocks_override=blocks,
                  max_num_batched_tokens=32, max_model_len=256)  # fmt: skip
        results.append(llm.generate(prompts, params, use_tqdm=False))
        preemptions = llm.stats().num_preemptions
        llm.shutdown()
        assert (preemptions > 0) == (blocks == 24)
    for few, many in zip(*results, strict=True):
        assert few.outputs[0].token_ids == many.outputs[0].token_ids
        if backend == "cpu":  # whose rows do not depend on their batch
            assert few.prompt_logprobs == many.prompt_logprobs
            assert few.outputs[0].logprobs == many.outputs[0].logprobs
    reference = load_transformers(path)
    for output in results[0]:
        check_output(output, reference, prompt_count=2, count=1)


# -- scoring over HTTP -------------------------------------------------------------------------------------

QUESTIONS = [
    ("The capital of France is", " Paris."),
    ("2 + 2 =", " 4"),
    ("Wasser gefriert bei", " null Grad Celsius 🧊."),
]


@pytest.fixture(scope="module")
def server():
    with LiveServer("--dtype", "float32", "--num-gpu-blocks-override", "100") as server:
        yield server


def post(server: LiveServer, **fields) -> dict:
    answer = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_as_lm_eval_asks_for_them(server, reference, default_model_path, max_tokens):
    """lm-eval sends the ids of context and continuation, takes ``token_logprobs`` from the context's length
    on (without what was generated), and looks whether each token is the best of ``top_logprobs``."""
    from streamllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(default_model_path)
    prompts, contexts = [], []
    for context, continuation in QUESTIONS:
        contexts.append(len(tokenizer.encode(context)))
        prompts.append(tokenizer.encode(context + continuation))
    answer = post(server, prompt=prompts, echo=True, max_tokens=max_tokens, logprobs=1, temperature=0, seed=1)
    for (context, continuation), ids, start, choice in zip(
        QUESTIONS, prompts, contexts, answer["choices"], strict=True
    ):
        shown = choice["logprobs"]
        end = len(ids)
        assert len(shown["tokens"]) == end + max_tokens
        expected = log_softmax(teacher_forced_logits(reference, ids[:start], ids[start:]))
        likelihood = sum(shown["token_logprobs"][start:end])
        assert likelihood == pytest.approx(
            sum(row[token] for row, token in zip(expected, ids[start:], strict=True)), abs=5 * TOLERANCE
        )
        greedy = [
            shown["token_logprobs"][i] == max(shown["top_logprobs"][i].values()) for i in range(start, end)
        ]
        assert greedy == [row.argmax() == token for row, token in zip(expected, ids[start:], strict=True)]
        if not max_tokens:
            assert choice["text"] == context + continuation and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens * len(QUESTIONS)


def peak_megabytes(pid: int) -> float:
    """The highest resident size that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.slow
def test_a_long_prompt_takes_the_memory_of_a_slice(server):
    long = np.random.default_rng(3).integers(100, 40_000, 1500).tolist()
    post(server, prompt="Hello", max_tokens=1)
    before = peak_megabytes(server.process.pid)
    entries = post(server, prompt=long, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert len(entries) == 1500 and entries[0] is None and next(iter(entries[1])) == str(long[1])
    # The KV blocks that are written for the first time take 66 MiB, a slice of the logits 12.
    whole = 1500 * 49_152 * 4 / 2**20
    assert peak_megabytes(server.process.pid) - before < whole / 2


# -- JSON --------------------------------------------------------------------------------------------------

FORCED = "ďá 漢字 😀👩‍👩‍👧 กำ"


def check_content(content: list[dict], top: int) -> None:
    """Chat's form: bytes for every token, alternatives too; nothing of the vocabulary's own spelling."""
    for item in content:
        assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(item["top_logprobs"]) == top
        falling = [other["logprob"] for other in item["top_logprobs"]]
        assert falling == sorted(falling, reverse=True)
        for candidate in (item, *item["top_logprobs"]):
            data = bytes(candidate["bytes"])
            assert -9999.0 <= candidate["logprob"] <= 0
            assert not {"Ġ", "Ċ", "\ufffd"} & set(candidate["token"])
            try:
                # A special token is no part of the text.
                assert candidate["token"] == data.decode() or (not data and candidate["token"][0] == "<")
            except UnicodeDecodeError:
                assert candidate["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_in_a_chat(server, stream):
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "structured_outputs": {"choice": [FORCED]},
        "logprobs": True,
        "top_logprobs": 5,
        "max_tokens": 60,
        "stream": stream,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        choices = [strict(event)["choices"][0] for event in events if event != "[DONE]"]
        texts = [choice["delta"].get("content", "") for choice in choices]
        content = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
        assert not any("\ufffd" in text for text in texts)
    else:
        choice = strict(answer.text)["choices"][0]
        texts, content = [choice["message"]["content"]], choice["logprobs"]["content"]
    assert "".join(texts) == FORCED
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == FORCED
    check_content(content, 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"allowed_token_ids": [260]},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"echo": True, "top_k": 1},
        {"logit_bias": {"300": 100}},
    ],
)
def test_filters_leave_the_json_valid(server, fields):
    body = {"prompt": "One two three", "logprobs": 5, "max_tokens": 4, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    logprobs = strict(answer.text)["choices"][0]["logprobs"]
    for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        if own is None:
            assert top is None and fields.get("echo")
            continue
        assert len(top) in (5, 6) and all(-9999.0 <= value <= 0 for value in (own, *top.values()))


def strict(text: str) -> dict:
    """JSON without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"the answer holds {name}"))
