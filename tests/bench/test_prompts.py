from __future__ import annotations

import statistics

import pytest

from streamllm.bench.prompts import WORDS, TokensPerWord, make_prompts, output_lengths


def test_the_seed_decides() -> None:
    for draw in (
        lambda seed: make_prompts(50, 20, seed),
        lambda seed: output_lengths(50, 16, 256, seed),
    ):
        assert draw(1) == draw(1)
        assert draw(1) != draw(2)


@pytest.mark.parametrize("count", [1, len(WORDS), 2 * len(WORDS)])
def test_prompts_are_as_long_as_asked_and_begin_differently(count: int) -> None:
    prompts = [prompt.split() for prompt in make_prompts(count, 12, seed=0)]
    assert {len(words) for words in prompts} == {12}
    distinct = 1 if count <= len(WORDS) else 2
    assert len({tuple(words[:distinct]) for words in prompts}) == count


def test_output_lengths_are_uniform_and_inclusive() -> None:
    lengths = output_lengths(5_000, 16, 20, seed=0)
    assert set(lengths) == {16, 17, 18, 19, 20}
    assert statistics.mean(lengths) == pytest.approx(18, abs=0.1)


def test_calibration_inverts_the_servers_count() -> None:
    count = TokensPerWord.from_probes((4, 31 + 6), (128, 31 + 192))
    assert count.words_for(31 + 150) == 100
    assert count.words_for(5) == 1
    assert TokensPerWord.from_probes((4, 10), (128, 10)) == TokensPerWord()
