from __future__ import annotations

import math

import pytest

from streamllm import SamplingParams
from streamllm.errors import InvalidRequestError

BAD = {
    "n": [0, -1, 10**6, 1.5, True, "2", None],
    "temperature": [-0.1, 2.1, math.nan, math.inf, -math.inf, "1", True, None, 10**400],
    "top_p": [0, -0.5, 1.01, math.nan, "1", None],
    "top_k": [-2, 1.5, True, 2**40, None],
    "min_p": [-0.1, 1.1, math.nan, None],
    "seed": [1.5, True, 2**64, -(2**63) - 1, "1"],
    "stop": ["", [""], ["x", ""], [1], 5, {"a": 1}, ["x"] * 300, "x" * 5000],
    "stop_token_ids": [[-1], [2**40], ["1"], [True], [1.0], 5],
    "max_tokens": [0, -1, 1.5, True, 2**31, "5"],
    "min_tokens": [-1, 1.5, True, 17],
    "logprobs": [-1, 21, 1.5, "5"],
    "ignore_eos": [1, "true", None],
    "detokenize": [0],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.n, params.max_tokens, params.min_tokens, params.logprobs) == (1, 16, 0, None)


def test_neutral_spellings_mean_off():
    params = SamplingParams(stop=None, top_k=-1, seed=-1, logprobs=False)
    assert (params.stop, params.top_k, params.seed, params.logprobs) == ([], 0, None, None)
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop_token_ids=[3, 3, 1]).stop_token_ids == [3, 1]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (0.7, False)])
def test_greedy_below_a_hundred_thousandth(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_n_at_temperature_zero_is_allowed():
    assert SamplingParams(n=4, temperature=0).n == 4


def test_stop_needs_text():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_clone_checks_again():
    with pytest.raises(InvalidRequestError):
        SamplingParams().clone(temperature=5)
