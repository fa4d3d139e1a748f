"""The sampler's steps equal Transformers' logits processors wherever those define the same thing."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from helpers.sampling_rows import native_sample

from streamllm.ops.step_inputs import ROW_EDITS, LogprobsMode, SamplingBuffers
from streamllm.runner.token_rules import SequenceRules, TokenRules

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 48
EOS = [7, 11]


def ours(logits: np.ndarray, tokens: list[int], num_prompt: int, rules: TokenRules | None, **settings):
    """The processed logits of one row, through the native sampler."""
    sampling = SamplingBuffers.allocate(1)
    sampling.num_logprobs[0], sampling.logprobs_mode[0] = VOCAB_SIZE, LogprobsMode.PROCESSED_LOGITS
    for name, value in settings.items():
        getattr(sampling, name)[0] = value
    records = np.zeros(1, ROW_EDITS)
    if rules is not None:
        ids = array("i", tokens)
        sequence = SequenceRules(rules, ids, num_prompt, records[0])
        sequence.refresh(ids, len(ids))
        sampling.edits[0] = records.ctypes.data
    native_sample(logits[None], VOCAB_SIZE, sampling)
    values = np.empty(VOCAB_SIZE, np.float32)
    values[sampling.top_ids[0, :VOCAB_SIZE]] = sampling.top_logprobs[0, :VOCAB_SIZE]
    return values


def theirs(processor, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    return processor(torch.tensor([tokens]), torch.tensor(logits)[None].clone())[0].numpy()


@pytest.fixture(params=range(12))
def case(request):
    """Random logits, tokens, and where the output begins."""
    rng = np.random.default_rng(request.param)
    logits = (rng.standard_normal(VOCAB_SIZE) * 3).astype(np.float32)
    tokens = rng.integers(0, 12, rng.integers(2, 40)).tolist()
    return logits, tokens, int(rng.integers(1, len(tokens) + 1))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty(case, penalty):
    logits, tokens, num_prompt = case
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    np.testing.assert_array_equal(
        ours(logits, tokens, num_prompt, TokenRules(repetition_penalty=penalty)),
        theirs(processor, logits, tokens),
    )


def test_bias_then_repetition_penalty(case):
    """Both together: the order is theirs too."""
    logits, tokens, num_prompt = case
    bias = {3: -5.0, 9: 2.5, 40: 100.0}
    rules = TokenRules(
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array(list(bias.values()), np.float32),
        repetition_penalty=1.7,
    )
    biased = theirs(
        transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
        logits,
        tokens,
    )
    expected = theirs(transformers.RepetitionPenaltyLogitsProcessor(1.7), biased, tokens)
    np.testing.assert_array_equal(ours(logits, tokens, num_prompt, rules), expected)


def test_bad_words(case):
    logits, tokens, num_prompt = case
    rng = np.random.default_rng(sum(tokens))
    words = [[30], [31], [*tokens[-2:], 20], [*tokens[-1:], 21]]
    words += [rng.integers(0, 12, rng.integers(2, 4)).tolist() for _ in range(30)]
    by_last: dict[int, list] = {}
    for word in words[2:]:
        by_last.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))
    rules = TokenRules(banned_ids=np.array([30, 31], np.int32), bad_words=by_last)
    processor = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)
    np.testing.assert_array_equal(ours(logits, tokens, num_prompt, rules), theirs(processor, logits, tokens))


@pytest.mark.parametrize("min_tokens", [1, 3, 10, 50])
def test_min_tokens(case, min_tokens):
    logits, tokens, num_prompt = case
    rules = TokenRules(held_back_ids=np.array(EOS, np.int32), min_tokens=min_tokens)
    processor = transformers.MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, EOS)
    np.testing.assert_array_equal(ours(logits, tokens, num_prompt, rules), theirs(processor, logits, tokens))


def test_banned_ids(case):
    logits, tokens, num_prompt = case
    processor = transformers.SuppressTokensLogitsProcessor([1, 2, 47])
    np.testing.assert_array_equal(
        ours(logits, tokens, num_prompt, TokenRules(banned_ids=np.array([1, 2, 47], np.int32))),
        theirs(processor, logits, tokens),
    )


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.9])
def test_temperature(case, temperature):
    logits, tokens, num_prompt = case
    processor = transformers.TemperatureLogitsWarper(temperature)
    np.testing.assert_allclose(
        ours(logits, tokens, num_prompt, None, temperature=temperature),
        theirs(processor, logits, tokens),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("setting", "warper"),
    [
        ({"top_k": 1}, lambda: transformers.TopKLogitsWarper(1)),
        ({"top_k": 10}, lambda: transformers.TopKLogitsWarper(10)),
        ({"top_p": 0.1}, lambda: transformers.TopPLogitsWarper(0.1)),
        ({"top_p": 0.6}, lambda: transformers.TopPLogitsWarper(0.6)),
        ({"top_p": 0.95}, lambda: transformers.TopPLogitsWarper(0.95)),
        ({"min_p": 0.02}, lambda: transformers.MinPLogitsWarper(0.02)),
        ({"min_p": 0.3}, lambda: transformers.MinPLogitsWarper(0.3)),
        ({"min_p": 1.0}, lambda: transformers.MinPLogitsWarper(1.0)),
    ],
)
def test_filters(case, setting, warper):
    logits, tokens, num_prompt = case
    np.testing.assert_array_equal(
        ours(logits, tokens, num_prompt, None, temperature=1.0, **setting), theirs(warper(), logits, tokens)
    )


def test_temperature_then_filters(case):
    """Top-k, then top-p, on the logits over the temperature."""
    logits, tokens, num_prompt = case
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(1.4),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.8),
        ]
    )
    np.testing.assert_allclose(
        ours(logits, tokens, num_prompt, None, temperature=1.4, top_k=12, top_p=0.8),
        theirs(warpers, logits, tokens),
        rtol=1e-6,
    )
