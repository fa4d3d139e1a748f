"""From parameters to rules: what is refused, and what the arrays hold."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer

from streamllm.engine.token_rules import TokenRuleMaker
from streamllm.errors import InvalidRequestError
from streamllm.logits_processors import register_logits_processor
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.text.tokenizer import Tokenizer

register_logits_processor("count_arguments", lambda extra_args, vocab_size: lambda p, o, logits: logits)


@pytest.fixture
def maker():
    return TokenRuleMaker(ByteTokenizer(), 257, [EOS])


@pytest.fixture(scope="module")
def default_maker(default_model_path):
    tokenizer = Tokenizer.from_gguf(default_model_path)
    return TokenRuleMaker(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def allowed_ids(mask: np.ndarray) -> list[int]:
    return [
        32 * word + bit for word, bits in enumerate(mask.tolist()) for bit in range(32) if bits >> bit & 1
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=5, stop=["x"], stop_token_ids=[3], logprobs=5),
        SamplingParams(logit_bias={}, bad_words=[], logits_processors=[], repetition_penalty=1),
        BeamSearchParams(beam_width=2),
    ],
)
async def test_most_requests_have_no_rules(maker, params):
    assert await maker.make(params) is None


async def test_every_parameter_becomes_an_array(maker):
    rules = await maker.make(
        SamplingParams(
            logit_bias={"7": 3.5, 9: -200},
            allowed_token_ids=[0, 31, 32, 256, 31],
            bad_words=["ab", "c"],
            min_tokens=4,
            stop_token_ids=[65],
            repetition_penalty=1.5,
            logits_processors=["count_arguments"],
        )
    )
    assert rules.bias_ids.tolist() == [7, 9] and rules.bias_values.tolist() == [3.5, -100.0]
    assert allowed_ids(rules.allowed_mask) == [0, 31, 32, 256]
    assert rules.banned_ids.tolist() == [ord("c")]
    words = {(*start.tolist(), last) for pairs in rules.bad_words.values() for start, last in pairs}
    assert words == {tuple(b"ab"), tuple(b" ab"), tuple(b" c")}
    assert all(start[-1] == key for key, pairs in rules.bad_words.items() for start, _ in pairs)
    assert rules.held_back_ids.tolist() == [EOS, 65] and rules.min_tokens == 4
    assert rules.has_penalties and len(rules.processors) == 1


async def test_only_what_would_end_the_text_is_held_back(maker):
    rules = await maker.make(SamplingParams(min_tokens=4, ignore_eos=True, stop_token_ids=[65]))
    assert rules.held_back_ids.tolist() == [65]
    rules = await maker.make(SamplingParams(min_tokens=4, ignore_eos=True))
    assert rules.min_tokens == 0 and not rules.edits_logits


async def test_bad_words_are_banned_inside_and_at_the_start_of_words(default_maker):
    """Both spellings of vLLM's rule, also where their numbers of tokens differ."""
    encode = default_maker._tokenizer.encode
    words = ["Paris", " Paris", "unspeakable", "Zürich", "\n", "  "]
    rules = await default_maker.make(SamplingParams(bad_words=words))
    found = {(token,) for token in rules.banned_ids.tolist()}
    found |= {(*start.tolist(), last) for pairs in rules.bad_words.values() for start, last in pairs}
    spellings = ["Paris", " Paris", "unspeakable", " unspeakable", "Zürich", " Zürich", "\n", "  "]
    assert found == {tuple(encode(text, add_special_tokens=False)) for text in spellings}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [3, 257]),
        ("logit_bias", {"257": 1.0}),
        ("allowed_token_ids", [2**31 - 1]),
    ],
)
async def test_ids_outside_the_vocabulary_are_refused(maker, field, value):
    with pytest.raises(InvalidRequestError, match=rf"{field} holds \d+, .*vocabulary \(0 to 256\)") as caught:
        await maker.make(SamplingParams(**{field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids, min_tokens"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "allowed_token_ids, bad_words"),
        (
            {"allowed_token_ids": [97, 65], "bad_words": ["a"], "stop_token_ids": [65], "min_tokens": 2},
            "allowed_token_ids, bad_words, min_tokens",
        ),
        ({"min_tokens": 1, "stop_token_ids": list(range(257))}, "min_tokens"),
    ],
)
async def test_rules_that_leave_nothing_are_refused_at_once(maker, fields, names):
    with pytest.raises(InvalidRequestError, match=f"no token is left to begin with: {names} forbid all"):
        await maker.make(SamplingParams(**fields))


async def test_large_lists_take_little_time(default_maker):
    """What runs on the event loop stays in the order of a few ten milliseconds, here on a busy machine."""
    ids = list(range(49_152))
    words = [f"bad{i} worse{i}" for i in range(1024)]
    began = time.monotonic()
    await default_maker.make(SamplingParams(allowed_token_ids=ids * 2, bad_words=words))
    assert time.monotonic() - began < 2
    for field, value in (("bad_words", ["x"] * 100_000), ("logit_bias", dict.fromkeys(range(100_000), 1.0))):
        began = time.monotonic()
        with pytest.raises(InvalidRequestError, match=f"{field} holds 100000 "):
            SamplingParams(**{field: value})
        assert time.monotonic() - began < 0.2
