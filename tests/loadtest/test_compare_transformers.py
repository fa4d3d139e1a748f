from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare_transformers import generate_http, generate_static, render
from helpers.fake_openai_server import FakeServer

from streamllm.bench.prompts import Request

LOADTEST = Path(__file__).resolve().parents[2] / "loadtest"
REQUESTS = [
    Request(0, [5, 9, 2, 7, 1], 6),
    Request(1, [3], 2),
    Request(2, [8, 8, 4], 9),
    Request(3, [6, 1], 1),
]


@pytest.fixture(scope="module")
def tiny_llama() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=3, pad_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def greedy(model: Any, prompt: Any, count: int) -> list[int]:
    """Greedy decoding by whole forward passes: no cache, no padding, no batch, no stop."""
    import torch

    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_static_batches_give_each_request_its_own_greedy_tokens(tiny_llama: Any, batch_size: int) -> None:
    done: list[int] = []
    outputs = generate_static(tiny_llama, REQUESTS, batch_size, done.append)
    assert outputs == [greedy(tiny_llama, r.prompt, r.max_tokens) for r in REQUESTS]
    assert sum(done) == len(REQUESTS)


def test_static_batches_do_not_stop_at_eos(tiny_llama: Any) -> None:
    always_eos = greedy(tiny_llama, [5], 1)[0]
    tiny_llama.generation_config.eos_token_id = always_eos
    (output,) = generate_static(tiny_llama, [Request(0, [5], 8)], 1, lambda count: None)
    assert output[0] == always_eos and len(output) == 8


def test_http_refuses_a_server_that_stops_early() -> None:
    requests = [Request(i, "one two three", 5) for i in range(4)]
    with FakeServer(api_key=None) as server:
        assert generate_http(server.url, requests, concurrency=2) == 20
        server.faults = {6: "http_500"}
        with pytest.raises(Exception, match="HTTP 500: out of luck"):
            generate_http(server.url, requests, concurrency=2)


def test_table() -> None:
    table = render(
        {
            "model": "m",
            "arguments": {
                "threads": 2, "requests": 48, "concurrency": 16, "input_len": 128, "seed": 0,
                "output_len_range": [16, 256],
            },
            "output_tokens_per_round": 6000,
            "output_tokens_per_second": {
                "transformers": [90.0, 100.0, 110.0], "streamllm": [240.0, 250.0, 260.0],
            },
            "median_output_tokens_per_second": {"transformers": 100.0, "streamllm": 250.0},
            "ratio": {"transformers": 1.0, "streamllm": 2.5},
            "identical_outputs": {"streamllm": 140, "of": 144},
        }
    )  # fmt: skip
    assert "streamllm                  250.0    2.50x   240.0 250.0 260.0" in table
    assert "140 of 144 outputs are the same tokens" in table


@pytest.mark.slow
def test_whole_comparison_on_the_default_model(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    command = [
        sys.executable, str(LOADTEST / "compare_transformers.py"), "--model", str(default_model_path),
        "--http", "--requests", "6", "--concurrency", "3", "--rounds", "1", "--input-len", "24",
        "--output-len-range", "4", "24", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result["ratio"]) == {"transformers", "streamllm", "streamllm_http"}
    assert result["identical_outputs"]["streamllm"] >= 5  # a near-tie between two logits may part one
