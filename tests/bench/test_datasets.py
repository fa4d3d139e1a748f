from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pytest

from streamllm.bench.datasets import add_dataset_arguments, input_length, make_requests
from streamllm.bench.prompts import Request, TokensPerWord, make_prompts
from streamllm.errors import ConfigError

ONE_TO_ONE = TokensPerWord()
CHAT = TokensPerWord(overhead=30.0, slope=1.25)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser)
    return parser.parse_args(flags)


def requests_of(*flags: str, count: TokensPerWord = ONE_TO_ONE, seed: int | None = None) -> list[Request]:
    return make_requests(parse(*flags), count, seed=seed)


def words(request: Request) -> list[str]:
    assert isinstance(request.prompt, str)
    return request.prompt.split()


def common_start(a: Request, b: Request) -> int:
    pairs = zip(words(a), words(b), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(words(a)))


def test_vllms_defaults() -> None:
    options = parse()
    assert (options.dataset_name, options.num_prompts, options.seed) == ("random", 1000, 0)
    requests = make_requests(options, TokensPerWord())
    assert {(len(words(r)), r.max_tokens) for r in requests} == {(1024, 128)}
    assert [r.index for r in requests] == list(range(1000))


def test_random_is_what_the_load_test_sends() -> None:
    requests = requests_of("--num-prompts", "20", "--input-len", "50", "--seed", "7", count=CHAT)
    assert [r.prompt for r in requests] == make_prompts(20, round((50 - 30) / 1.25), seed=7)


def test_random_lengths_stay_in_their_range_and_share_only_the_prefix() -> None:
    flags = ["--num-prompts", "250", "--random-input-len", "200", "--random-output-len", "1k"]
    flags += ["--random-range-ratio", "0.25", "--random-prefix-len", "100"]
    assert input_length(parse(*flags)) == 300
    requests = requests_of(*flags, count=CHAT)
    tokens = [30 + 1.25 * len(words(r)) for r in requests]
    assert min(tokens) == pytest.approx(250, abs=3) and max(tokens) == pytest.approx(350, abs=3)
    assert statistics.mean(tokens) == pytest.approx(300, abs=6)
    outputs = [r.max_tokens for r in requests]
    assert 750 <= min(outputs) < 770 and 1230 < max(outputs) <= 1250
    assert {common_start(requests[0], r) for r in requests[1:]} == {80}  # 100 tokens of 1.25 a word


def test_prefix_repetition() -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "60"]
    flags += ["--prefix-repetition-prefix-len", "100", "--prefix-repetition-suffix-len", "50"]
    flags += ["--prefix-repetition-num-prefixes", "4", "--prefix-repetition-output-len", "9"]
    requests = requests_of(*flags)
    by_prefix: dict[tuple[str, ...], list[Request]] = {}
    for request in requests:
        assert (len(words(request)), request.max_tokens) == (150, 9)
        by_prefix.setdefault(tuple(words(request)[:100]), []).append(request)
    assert [len(group) for group in by_prefix.values()] == [15] * 4
    assert all(common_start(group[0], each) == 100 for group in by_prefix.values() for each in group[1:])
    first = tuple(words(requests[0])[:100])
    assert [tuple(words(r)[:100]) == first for r in requests[:8]] != [True, False, False, False] * 2, (
        "shuffled"
    )
    assert requests_of(*flags, "--disable-shuffle")[4].prompt != requests[4].prompt


def test_sharegpts_lengths() -> None:
    flags = ["--dataset-name", "sharegpt", "--num-prompts", "4000"]
    requests = requests_of(*flags)
    assert statistics.mean(len(words(r)) for r in requests) == pytest.approx(161.31, rel=0.1)
    assert statistics.mean(r.max_tokens for r in requests) == pytest.approx(337.99, rel=0.1)
    assert {r.max_tokens for r in requests_of(*flags, "--sharegpt-output-len", "5")} == {5}


def turns(*texts: str) -> dict[str, object]:
    names = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": names[i % 2], "value": t} for i, t in enumerate(texts)]}


def test_a_sharegpt_file(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    conversations = [
        turns("a question " * 8, "x" * 400, "again", "more"),
        turns("no answer, so not taken"),
        turns("ha?", "x" * 400),  # under 4 tokens
        turns("a short answer " * 8, "yes"),
        turns("x" * 4200, "y" * 400),  # over 1,024 tokens
        turns("long together " * 8, "z" * 8192),
        turns("another question " * 8, "x" * 40),
    ]
    path.write_text(json.dumps(conversations))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "4"]
    requests = requests_of(*flags, "--disable-shuffle")
    taken = [("a question " * 8, 100), ("another question " * 8, 10)]
    assert [(r.prompt, r.max_tokens) for r in requests] == taken * 2
    assert len(requests_of(*flags, "--no-oversample")) == 2
    # With a length of ours the answers' own matter no more.
    with_short = requests_of(*flags, "--sharegpt-output-len", "7", "--no-oversample")
    assert len(with_short) == 4 and {r.max_tokens for r in with_short} == {7}


def test_a_custom_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one\u2028line", "output_tokens": 5}\n\n{"prompt": "two"}\r\n', encoding="utf-8"
    )
    flags = ["--dataset-name", "custom", "--dataset-path", str(path)]
    requests = requests_of(*flags, "--num-prompts", "3", "--disable-shuffle")
    assert [(r.prompt, r.max_tokens) for r in requests] == [
        ("one\u2028line", 5),
        ("two", 256),
        ("one\u2028line", 5),
    ]
    assert {r.max_tokens for r in requests_of(*flags, "--custom-output-len", "9")} == {9}
    assert {r.max_tokens for r in requests_of(*flags, "--custom-output-len", "-1")} == {5, 256}
    assert len(requests_of(*flags, "--no-oversample")) == 2


@pytest.mark.parametrize(
    ("line", "words_of_error"),
    [
        ('{"prompt": "broken', "line 3: no JSON"),
        ('["a"]', 'line 3: must be an object with a "prompt"'),
        ('{"prompt": ""}', "line 3: must be an object"),
        (
            '{"prompt": "x", "output_tokens": 0}',
            'line 3: "output_tokens" must be an integer of at least 1, got 0',
        ),
        ('{"prompt": "x", "output_tokens": true}', 'line 3: "output_tokens" must be an integer'),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words_of_error: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 3") as error:
        requests_of("--dataset-name", "custom", "--dataset-path", str(path))
    assert words_of_error in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words_of_error"),
    [
        ("{", "no JSON"),
        ("{}", "must hold a list"),
        ('[{"conversations": [{"from": "human"}]}]', "conversation 1"),
        ("[]", "no prompt to send"),
        ("[1]", "conversation 1"),
    ],
)
def test_a_file_that_is_not_sharegpts(tmp_path: Path, text: str, words_of_error: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words_of_error):
        requests_of("--dataset-name", "sharegpt", "--dataset-path", str(path))


@pytest.mark.parametrize(
    ("flags", "words_of_error"),
    [
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "no-such-file"], "no-such-file cannot be read"),
        (["--dataset-path", "x"], "--dataset-name random reads no file"),
        (["--dataset-name", "sharegpt", "--input-len", "5"], "--input-len is for --dataset-name random"),
        (["--dataset-name", "prefix_repetition", "--input-len", "5"], "--prefix-repetition-prefix-len"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], words_of_error: str) -> None:
    with pytest.raises(ConfigError, match=words_of_error):
        requests_of(*flags)


@pytest.mark.parametrize("name", ["random", "sharegpt", "prefix_repetition"])
def test_the_seed_decides(name: str) -> None:
    flags = ["--dataset-name", name, "--num-prompts", "20"]
    requests = requests_of(*flags)
    assert requests == requests_of(*flags, "--seed", "0") == requests_of(*flags, "--seed", "9", seed=0)
    others = requests_of(*flags, "--seed", "1")
    # With the next seed no prefix cache knows a block of 16 tokens.
    assert max(common_start(one, other) for one in requests for other in others) < 10
