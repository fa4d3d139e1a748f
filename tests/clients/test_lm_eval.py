"""lm-eval-harness scores a small task through ``/v1/completions`` as it does through transformers."""

from __future__ import annotations

import json

import pytest
from helpers.live_server import LiveServer

QUESTIONS = [
    ("A boat floats on the", [" water", " moon", " idea", " piano"]),
    ("The sun rises in the", [" east", " west", " cellar", " spoon"]),
    ("Two and two make", [" four", " blue", " seven", " walking"]),
    ("A cat likes to chase a", [" mouse", " mountain", " Tuesday", " continent"]),
    ("In winter it is often", [" cold", " hot in the north", " a chair", " spoken"]),
    ("The capital of France is", [" Paris", " London, as everyone knows", " Rome", " bread"]),
    ("She read the whole", [" book", " soup", " river and the sea", " green"]),
    ("Bees make", [" honey", " steel", " laws", " Ünïcödé 漢字 😀"]),
    ("To open the door you need a", [" key", " cloud", " verb", " planet"]),
    ("Fish breathe with their", [" gills", " shoes", " letters", " windows"]),
]
TASK = """
task: completions_of_sentences
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def lm_eval():
    return pytest.importorskip("lm_eval")


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    """A task that lm-eval finds, with its data beside it."""
    data = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": q, "choices": choices, "answer": 0}) for q, choices in QUESTIONS]
    data.write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def model_folder(default_model_path, tmp_path):
    """The default model's weights as transformers reads them, dequantised."""
    from model_formats import write_folder

    folder = tmp_path / "model"
    write_folder(default_model_path, folder)
    return folder


@pytest.mark.slow
def test_lm_eval_gives_the_same_result_as_through_transformers(lm_eval, task_folder, model_folder):
    from lm_eval.tasks import TaskManager

    def scored(model: str, arguments: dict) -> tuple[dict, list[list[float]]]:
        """The task's metrics, and the log-likelihood of each choice of each question."""
        result = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=["completions_of_sentences"],
            task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
            bootstrap_iters=0,
        )
        samples = sorted(result["samples"]["completions_of_sentences"], key=lambda sample: sample["doc_id"])
        values = [[float(resps[0][0]) for resps in sample["resps"]] for sample in samples]
        metrics = result["results"]["completions_of_sentences"]
        return {name: metrics[name] for name in ("acc,none", "acc_norm,none")}, values

    expected = scored("hf", {"pretrained": str(model_folder), "dtype": "float32", "device": "cpu"})
    with LiveServer("--dtype=float32") as server:
        served = {
            "model": "SmolLM2-135M-Instruct",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(model_folder),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_retries": 1,
        }
        for tokenized in (True, False):
            metrics, values = scored("local-completions", served | {"tokenized_requests": tokenized})
            assert metrics == expected[0]
            for ours, theirs in zip(values, expected[1], strict=True):
                assert ours == pytest.approx(theirs, abs=2e-3)
        server.wait_until_quiet()
    assert 0.5 < expected[0]["acc,none"] <= 1.0
