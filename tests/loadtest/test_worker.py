from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import make_tiny_model
from worker import OpenVino, StaticBatches, serve

WORK = [([5, 6, 7], 4), ([8], 2), ([9, 10], 5), ([11] * 6, 3), ([12, 13], 4)]


def ticking() -> Any:
    counter = itertools.count(1)
    return lambda: float(next(counter))


def test_static_batches_tell_when_each_token_came(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    backend = StaticBatches(make_tiny_model(tmp_path), threads=1, max_num_seqs=2, precision="f32")
    results = backend.run(WORK, 2, ticking())
    assert [len(result["times"]) for result in results] == [4, 2, 5, 3, 4]
    assert [result["completion_tokens"] for result in results] == [4, 2, 5, 3, 4]
    assert [result["prompt_tokens"] for result in results] == [3, 1, 2, 6, 2]
    # One reading of the clock when a batch begins, and one at each of its steps: 4, 5 and 4 of them.
    assert [result["due"] for result in results] == [1, 1, 6, 6, 12]
    assert results[1]["times"] == [2, 3] and results[1]["end"] == 3
    assert results[2]["times"] == [7, 8, 9, 10, 11]


class Handle:
    def __init__(self, count: int) -> None:
        self.left = count
        self.unread = 0

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        tokens, self.unread = [1] * self.unread, 0
        return {0: types.SimpleNamespace(generated_ids=tokens)}


class Pipeline:
    """A token for every request at each step, as openvino_genai.ContinuousBatchingPipeline gives them."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.handles: list[Handle] = []
        self.running: list[int] = []

    def add_request(self, request_id: int, ids: Any, config: dict[str, Any]) -> Handle:
        assert config == {"max_new_tokens": config["max_new_tokens"], "ignore_eos": True, "do_sample": False}
        self.handles.append(Handle(config["max_new_tokens"]))
        return self.handles[-1]

    def step(self) -> None:
        active = [handle for handle in self.handles if handle.left]
        self.running.append(len(active))
        for handle in active:
            handle.left -= 1
            handle.unread += 1

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles)


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> OpenVino:
    genai = types.SimpleNamespace(
        ContinuousBatchingPipeline=Pipeline, SchedulerConfig=types.SimpleNamespace, GenerationConfig=dict
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", types.SimpleNamespace(Tensor=lambda array: array))
    return OpenVino(Path("model.gguf"), threads=2, max_num_seqs=4, precision="f32")


def test_openvino_keeps_as_many_under_way_as_asked_for(openvino: OpenVino) -> None:
    results = openvino.run(WORK, 2, ticking())
    assert [result["completion_tokens"] for result in results] == [4, 2, 5, 3, 4]
    pipeline = openvino._pipeline
    assert max(pipeline.running) == 2
    assert sum(pipeline.running) == 18
    assert all(result["due"] < result["times"][0] <= result["end"] for result in results)
    assert pipeline.args[3] == {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32"}


class Echo:
    def run(self, work: Any, concurrency: int, clock: Any) -> list[Any]:
        return [[prompt, count, concurrency] for prompt, count in work]


def test_one_answer_a_line() -> None:
    answers: list[dict[str, Any]] = []
    lines = [json.dumps({"requests": [[[1, 2], 3]], "concurrency": n}) for n in (1, 8)]
    serve(Echo(), lines, answers.append)
    assert answers[0] == {"ready": True}
    assert [answer["results"] for answer in answers[1:]] == [[[[1, 2], 3, 1]], [[[1, 2], 3, 8]]]
    assert all(answer["duration"] >= 0 for answer in answers[1:])
