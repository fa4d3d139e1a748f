"""``streamllm bench latency`` and ``throughput``, over the real engine with a fake model and a real one."""

from __future__ import annotations

import json
import re

import pytest
from helpers.fake_engine import make_engine
from helpers.tiny_models import make_tiny_model

from streamllm.cli.main import main
from streamllm.engine.async_engine import AsyncEngine

SHORT = ["--num-iters", "4", "--num-iters-warmup", "2", "--batch-size", "3", "--input-len", "40",
         "--output-len", "5"]  # fmt: skip
SMALL = ["--num-prompts", "20", "--input-len", "40", "--output-len", "5"]


@pytest.fixture
def engines(monkeypatch):
    """The engines that commands have loaded, each over the fake model, and what they were asked."""
    loaded = []

    def load(config):
        engine = make_engine(num_blocks=256, seed=config.seed)
        engine.asked = []
        engine.on_request_finished(engine.asked.append)
        loaded.append(engine)
        return engine

    monkeypatch.setattr(AsyncEngine, "from_config", load)
    return loaded


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def throughput_of(text: str) -> tuple[list[float], int, int]:
    """Requests, tokens and output tokens a second, and the totals."""
    first, *totals = text.splitlines()
    pattern = r"Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s"
    rates = [float(rate) for rate in re.fullmatch(pattern, first).groups()]
    patterns = r"Total num prompt tokens:  (\d+)", r"Total num output tokens:  (\d+)"
    prompt, output = (int(re.fullmatch(p, line)[1]) for p, line in zip(patterns, totals, strict=True))
    return rates, prompt, output


# -- latency -----------------------------------------------------------------------------------------------


def test_latency_prints_and_writes_what_vllm_does(engines, tmp_path, capsys):
    assert bench("latency", *SHORT, "--n", "2", "--output-json", str(tmp_path / "out.json")) == 0
    output = capsys.readouterr()
    assert output.err == ""  # and no bar
    lines = output.out.splitlines()
    results = json.loads((tmp_path / "out.json").read_text())
    latencies, percentiles = results["latencies"], results["percentiles"]
    assert len(latencies) == 4 and min(latencies) > 0
    assert results["avg_latency"] == pytest.approx(sum(latencies) / 4)
    assert list(percentiles) == ["10", "25", "50", "75", "90", "99"]
    assert percentiles["50"] == pytest.approx(sum(sorted(latencies)[1:3]) / 2)
    assert results["output_tokens_per_second"] == pytest.approx(3 * 2 * 5 / results["avg_latency"])
    assert lines == [
        f"Avg latency: {results['avg_latency']:.6f} seconds",
        *(f"{each}% percentile latency: {percentiles[each]:.6f} seconds" for each in percentiles),
        f"Output throughput: {results['output_tokens_per_second']:.2f} tokens/s",
    ]


def test_latency_asks_for_what_it_says_and_never_twice_the_same(engines):
    assert bench("latency", *SHORT, "--n", "2") == 0
    (engine,) = engines
    assert len(engine.asked) == (4 + 2) * 3
    for record in engine.asked:
        assert (record.num_prompt_tokens, record.num_generation_tokens) == (40, 2 * 5)
        assert record.num_cached_tokens == 0 and record.params.ignore_eos and record.params.detokenize


def test_latency_by_beams_and_without_texts(engines):
    assert bench("latency", *SHORT, "--n", "3", "--use-beam-search") == 0
    assert bench("latency", *SHORT, "--disable-detokenize") == 0
    beams, tokens = (engine.asked for engine in engines)
    assert len(beams) == len(tokens) == (4 + 2) * 3
    assert {(record.num_choices, record.num_generation_tokens) for record in beams} == {(3, 3 * 5)}
    assert not any(record.params.detokenize for record in tokens)


# -- throughput --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--async-engine"]])
def test_throughput_counts_what_the_engine_did(engines, tmp_path, capsys, flags):
    path = tmp_path / "out.json"
    path.write_text("of an earlier run")
    assert bench("throughput", *SMALL, "--n", "2", "--output-json", str(path), *flags) == 0
    output = capsys.readouterr()
    assert output.err == ""
    rates, prompt, generated = throughput_of(output.out)
    (engine,) = engines
    assert prompt == sum(record.num_prompt_tokens for record in engine.asked)
    assert generated == sum(record.num_generation_tokens for record in engine.asked) == 20 * 2 * 5
    # Words of a byte tokenizer's lengths come close to what was asked for.
    assert prompt == pytest.approx(20 * 40, rel=0.25)
    results = json.loads(path.read_text())
    assert results["total_num_tokens"] == prompt + generated
    seconds = results["elapsed_time"]
    counts = [20, prompt + generated, generated]
    assert rates == pytest.approx([count / seconds for count in counts], abs=0.01)


@pytest.mark.parametrize("flags", [[], ["--async-engine"]])
def test_throughput_of_a_file_of_prompts(engines, tmp_path, capsys, flags):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab" * n, "output_tokens": n}) + "\n" for n in (3, 7)))
    arguments = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "4"]
    assert bench("throughput", *arguments, "--disable-detokenize", *flags) == 0
    assert throughput_of(capsys.readouterr().out)[1:] == (2 * (6 + 14), 2 * (3 + 7))
    assert not any(record.params.detokenize for record in engines[0].asked)


def test_flags_from_a_file_and_those_of_vllm_that_change_nothing(engines, tmp_path):
    config = tmp_path / "bench.yaml"
    flags = ["--config", str(config), "--tokenizer-mode", "auto"]
    config.write_text("num-prompts: 3\ninput-len: 20\noutput-len: 4\nseed: 5\n")
    assert bench("throughput", *flags) == 0
    config.write_text("num-iters: 1\nnum-iters-warmup: 0\nbatch-size: 2\nseed: 6\n")
    assert bench("latency", *flags) == 0
    assert [len(engine.asked) for engine in engines] == [3, 2]
    assert [engine.config.seed for engine in engines] == [5, 6]


def test_seed_draws_the_data_set_and_is_the_engines(engines):
    for seed in ("1", "1", "2"):
        assert bench("throughput", *SMALL, "--random-range-ratio", "0.5", "--seed", seed) == 0
    assert [engine.config.seed for engine in engines] == [1, 1, 2]
    lengths = [sorted(record.num_prompt_tokens for record in engine.asked) for engine in engines]
    assert lengths[0] == lengths[1] != lengths[2]


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["latency", "--input-len", "250"], r"250 prompt tokens and 128 output tokens .* the 256 "),
        (2, ["throughput", *SMALL, "--output-len", "1k"], r"request 0: \d+ prompt tokens and 1000 output"),
        (2, ["throughput", *SMALL, "--output-len", "1k", "--async-engine"], "request 0: "),
        (
            2,
            ["throughput", "--num-prompts", "2", "--input-len", "99999999"],
            "each prompt: 99999999 prompt tok",
        ),
        (2, ["latency", "--batch-size", "0"], "--batch-size: must be an integer of at least 1, got '0'"),
        (2, ["latency", "--use-beam-search", "--disable-detokenize"], "--disable-detokenize does not go"),
        (2, ["latency", "--dtype", "float8"], "--dtype must be one of auto, .* got 'float8'"),
        (2, ["throughput", "--dataset-name", "custom"], "needs --dataset-path"),
        (2, ["throughput", "--dataset-name", "sharegpt", "--input-len", "5"], "--input-len is for"),
        (2, ["throughput", "--num-promts", "5"], "unknown flag --num-promts. Did you mean --num-prompts?"),
        (1, ["latency", *SHORT, "--n", "17", "--use-beam-search"], "--n must be"),
        (1, ["latency", *SHORT, "--n", "9", "--use-beam-search"], "--n must be at most 8 with"),
    ],
)
def test_what_makes_no_sense_is_one_line(engines, capsys, code, arguments, message):
    assert bench(*arguments) == code
    output = capsys.readouterr()
    assert output.out == "" and re.match("streamllm: error: .*" + message, output.err)
    assert output.err.count("\n") == 1
    assert all(engine.dead_error is not None for engine in engines), "it is still there"


@pytest.mark.parametrize("command", ["latency", "throughput"])
@pytest.mark.parametrize("path", [".", "nowhere/out.json"])
def test_output_is_looked_at_before_the_model(engines, tmp_path, monkeypatch, capsys, command, path):
    monkeypatch.chdir(tmp_path)
    assert bench(command, "--output-json", path) == 1
    assert re.fullmatch(rf"streamllm: error: --output-json {path} cannot be .*\n", capsys.readouterr().err)
    assert engines == []


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_model_that_does_not_load_leaves_no_output(tmp_path, capsys, command):
    flags = ["--model", str(tmp_path / "none"), "--output-json"]
    (tmp_path / "kept.json").write_text("earlier results")
    for name in ("new.json", "kept.json"):
        assert bench(command, *flags, str(tmp_path / name)) == 1
        error = capsys.readouterr().err
        assert error.startswith("streamllm: error: The model ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert (tmp_path / "kept.json").read_text() == "earlier results"


# -- a real model ------------------------------------------------------------------------------------------


def test_with_a_real_model(tmp_path, capsys):
    model = ["--model", str(make_tiny_model(tmp_path / "model")), "--dtype", "float32", "--threads", "1",
             "--num-kv-blocks", "64", "--max-model-len", "128"]  # fmt: skip
    assert bench("latency", *SHORT, *model) == 0
    assert bench("latency", *SHORT, *model, "--use-beam-search", "--n", "2") == 0
    capsys.readouterr()
    assert bench("throughput", *SMALL, *model) == 0
    _, prompt, output = throughput_of(capsys.readouterr().out)
    assert output == 20 * 5 and prompt == pytest.approx(20 * 40, rel=0.25)
