"""Bias, penalties, bans, masks, replacements and logprobs modes of the sampler: native, in numpy, and as the
documentation words them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sampling_checks import edits_in_vocabulary, random_rules
from helpers.sampling_rows import RowRules, copy_buffers, native_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm import _native
from streamllm.ops.step_inputs import (
    LARGEST_LOGIT,
    TOKEN_NOT_FINITE,
    TOKEN_NOTHING_ALLOWED,
    LogprobsMode,
    SamplingBuffers,
)
from streamllm.runner import sampler

SAMPLERS = {
    "native": lambda logits, sampling: native_sample(logits, logits.shape[1], sampling),
    "numpy": sampler.sample,
}


@pytest.fixture(params=SAMPLERS)
def sample(request):
    return SAMPLERS[request.param]


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request):
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 1000, 4099])
def test_native_equals_numpy_with_everything_at_once(instruction_set, vocab_size, monkeypatch):
    rng = np.random.default_rng(vocab_size)
    rows = 120
    logits = (rng.standard_normal((rows, vocab_size)) * 4).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, rng.integers(0, vocab_size)] = 0.5
    native = SamplingBuffers.allocate(rows)
    native.temperature[:] = rng.choice([0.0, 0.3, 1.0, 1.7], rows)
    native.top_k[:] = rng.choice([0, 0, 1, 5], rows)
    native.top_p[:] = rng.choice([1.0, 0.95, 0.5], rows)
    native.min_p[:] = rng.choice([0.0, 0.05, 0.5], rows)
    native.position[:] = np.arange(rows)
    native.num_logprobs[:] = rng.choice([-1, 0, 1, 20], rows)
    native.logprobs_mode[:] = rng.integers(0, 4, rows)
    kept = random_rules(rng, native, vocab_size)
    reference = copy_buffers(native)
    native_sample(logits, vocab_size, native)
    read = sampler.RowEdits.at
    monkeypatch.setattr(
        sampler.RowEdits, "at", staticmethod(lambda address: edits_in_vocabulary(read(address), vocab_size))
    )
    sampler.sample(logits, reference)
    del kept

    differing = np.flatnonzero(native.token != reference.token)
    # exp's last bit may move an edge of the kept set or of a token's interval past the drawn number.
    assert len(differing) <= rows // 40, (native.token[differing], reference.token[differing])
    assert vocab_size == 1 or (native.token >= 0).sum() > rows // 2
    same = (native.token == reference.token) & (native.token >= 0)
    for row in np.flatnonzero(same & (native.num_logprobs >= 0)):
        count = min(int(native.num_logprobs[row]), vocab_size)
        assert native.rank[row] == reference.rank[row]
        np.testing.assert_allclose(native.logprob[row], reference.logprob[row], atol=2e-5, rtol=1e-6)
        assert native.top_ids[row, :count].tolist() == reference.top_ids[row, :count].tolist()
        np.testing.assert_allclose(
            native.top_logprobs[row, :count], reference.top_logprobs[row, :count], atol=2e-5, rtol=1e-6
        )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_edits_follow_their_definitions(data):
    """Every logit of the processed vector, one by one, as the documentation words it."""
    vocab_size = data.draw(st.integers(1, 40))
    ids = st.integers(0, vocab_size - 1)
    values = st.floats(-50, 50, width=32)
    logits = np.array(data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)), np.float32)
    bias = data.draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5))
    seen = data.draw(st.dictionaries(ids, st.integers(0, 3), max_size=10))
    banned = data.draw(st.lists(ids, max_size=4))
    allowed = data.draw(st.sets(ids, min_size=1))
    repetition = data.draw(st.floats(0.125, 8, width=32))
    frequency, presence = data.draw(st.tuples(*[st.floats(-2, 2, width=32)] * 2))

    sampling = SamplingBuffers.allocate(1)
    sampling.num_logprobs[0], sampling.logprobs_mode[0] = vocab_size, LogprobsMode.PROCESSED_LOGITS
    rules = RowRules(sampling)
    rules.edit(0, bias=bias, seen=seen, banned=banned, penalties=(repetition, frequency, presence))
    rules.allow(0, np.isin(np.arange(vocab_size), list(allowed)))
    expected = []
    for token, logit in enumerate(logits.astype(np.float64)):
        logit += bias.get(token, 0.0)
        if token in seen:
            logit = logit / repetition if logit > 0 else logit * repetition
            logit -= frequency * seen[token] + (presence if seen[token] else 0.0)
        expected.append(logit if token in allowed and token not in banned else -np.inf)
    native_sample(logits[None], vocab_size, sampling)
    if max(expected) == -np.inf:
        assert sampling.token[0] == TOKEN_NOTHING_ALLOWED
        return
    reported = dict(zip(sampling.top_ids[0, :vocab_size], sampling.top_logprobs[0, :vocab_size], strict=True))
    np.testing.assert_allclose(
        [reported[token] for token in range(vocab_size)], expected, rtol=2e-5, atol=2e-5
    )
    assert expected[sampling.token[0]] >= max(expected) - 1e-3


def test_bans_win_over_the_largest_bias(sample):
    logits = np.zeros((3, 50), np.float32)
    sampling = SamplingBuffers.allocate(3)
    rules = RowRules(sampling)
    rules.edit(0, bias={7: 100.0, 8: 50.0}, banned=[7])
    rules.edit(1, bias={7: 100.0, 8: 50.0})
    rules.allow(1, np.arange(50) != 7)
    rules.edit(2, bias={7: 100.0, 8: 50.0})
    rules.allow(2, np.arange(50) != 7, grammar=True)
    sample(logits, sampling)
    assert sampling.token.tolist() == [8, 8, 8]


def test_a_row_without_any_token_left_says_so(sample):
    logits = np.zeros((4, 50), np.float32)
    logits[3, 3] = np.nan
    sampling = SamplingBuffers.allocate(4)
    sampling.temperature[:] = [0.0, 1.0, 1.0, 1.0]
    sampling.num_logprobs[:] = 3
    rules = RowRules(sampling)
    for row in (0, 1, 3):
        rules.allow(row, np.zeros(50, bool))
    rules.allow(2, np.arange(50) < 2)
    rules.edit(2, banned=[0, 1])
    sample(logits, sampling)
    assert sampling.token.tolist() == [TOKEN_NOTHING_ALLOWED] * 3 + [TOKEN_NOT_FINITE]


def test_penalties_and_bias_never_make_infinities(sample):
    """What overflows stays a large number, so that a row never fails by its own parameters."""
    largest = np.float32(LARGEST_LOGIT)
    logits = np.array([[50.0, -50.0, 0.0, 3.0]] * 2, np.float32)
    sampling = SamplingBuffers.allocate(2)
    sampling.num_logprobs[:], sampling.logprobs_mode[:] = 4, LogprobsMode.PROCESSED_LOGITS
    rules = RowRules(sampling)
    rules.edit(0, seen=dict.fromkeys(range(3), 1), penalties=(float(np.finfo(np.float32).tiny), -2.0, -2.0))
    rules.edit(1, seen=dict.fromkeys(range(3), 1), penalties=(3e38, 2.0, 2.0))
    sample(logits, sampling)
    assert sampling.token.tolist() == [0, 3]
    assert sampling.logprob[0] == largest
    assert sampling.top_ids[1].tolist()[:4] == [3, 0, 2, 1]
    assert sampling.top_logprobs[1, 3] == -largest


def test_replacement_is_sampled_and_raw_logprobs_stay_the_models(sample):
    logits = np.array([[0.0, 1.0, 2.0]] * 2, np.float32)
    sampling = SamplingBuffers.allocate(2)
    sampling.num_logprobs[:] = 1
    sampling.logprobs_mode[:] = [LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS]
    rules = RowRules(sampling)
    for row in range(2):
        rules.replace(row, np.array([5.0, -np.inf, 1.0]))
    sample(logits, sampling)
    assert sampling.token.tolist() == [0, 0]
    assert sampling.rank.tolist() == [3, 1] and sampling.top_ids[:, 0].tolist() == [2, 0]
    np.testing.assert_allclose(sampling.logprob[0], -np.log(1 + np.e + np.e**2), atol=1e-6)
    np.testing.assert_allclose(sampling.logprob[1], -np.log1p(np.exp(-4.0)), atol=1e-6)


def test_a_target_is_reported_as_the_model_sees_it(sample):
    """Prompt tokens are judged, not drawn; what the row's rules say does not matter."""
    logits = np.array([[0.0, 1.0, 2.0, 4.0]], np.float32)
    sampling = SamplingBuffers.allocate(1)
    sampling.target[0], sampling.num_logprobs[0] = 1, 2
    sampling.temperature[0], sampling.logprobs_mode[0] = 1.3, LogprobsMode.PROCESSED_LOGITS
    rules = RowRules(sampling)
    rules.allow(0, np.zeros(4, bool))
    sample(logits, sampling)
    logprobs = logits[0] - np.log(np.exp(logits[0]).sum())
    assert sampling.token[0] == 1 and sampling.rank[0] == 3
    assert sampling.logprob[0] == pytest.approx(logprobs[1], abs=1e-6)
    assert sampling.top_ids[0, :2].tolist() == [3, 2]
    np.testing.assert_allclose(sampling.top_logprobs[0, :2], logprobs[[3, 2]], atol=1e-6)
    sampling.top_ids[:] = sampling.top_logprobs[:] = 7
    sampling.num_logprobs[0] = -1  # alone, without alternatives
    sample(logits, sampling)
    assert sampling.logprob[0] == pytest.approx(logprobs[1], abs=1e-6) and (sampling.top_ids == 7).all()


def test_logprobs_modes(sample):
    """The four modes of one row with a ban, a temperature and top-k, and of a greedy one."""
    logits = np.array([[3.0, 2.0, 1.0, 0.0]] * 8, np.float32)
    sampling = SamplingBuffers.allocate(8)
    sampling.temperature[:4], sampling.top_k[:4] = 0.5, 2
    sampling.num_logprobs[:] = 4
    sampling.logprobs_mode[:] = [0, 1, 2, 3] * 2
    rules = RowRules(sampling)
    for row in range(8):
        rules.edit(row, banned=[0])
    sample(logits, sampling)
    raw = logits[0] - np.log(np.exp(logits[0]).sum())
    drawn = np.array([-np.inf, 4.0, 2.0, -np.inf])
    greedy = np.array([-np.inf, 2.0, 1.0, 0.0])
    expected = [
        raw, drawn - np.log(np.exp(drawn).sum()), logits[0], drawn,
        raw, greedy - np.log(np.exp(greedy).sum()), logits[0], greedy,
    ]  # fmt: skip
    for row, values in enumerate(expected):
        order = np.argsort(-values, kind="stable")
        assert sampling.top_ids[row, :4].tolist() == order.tolist()
        np.testing.assert_allclose(sampling.top_logprobs[row, :4], values[order], atol=1e-6)
        assert sampling.logprob[row] == pytest.approx(values[sampling.token[row]], abs=1e-6)
        assert sampling.rank[row] == 1 + (values > values[sampling.token[row]]).sum()


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_flat_rows_keep_the_same_tokens(instruction_set, step):
    """Where a large part of the vocabulary is kept, nothing is sorted: another way to the same sets. With a
    step there are many ties."""
    rng = np.random.default_rng(3)
    rows, vocab_size = 60, 20_011
    logits = rng.standard_normal((rows, vocab_size)).astype(np.float32)
    logits *= rng.choice([0.0, 0.3, 1.0], (rows, 1)).astype(np.float32)
    if step:
        logits = np.round(logits / step).astype(np.float32) * np.float32(step)
    logits[:10, rng.random(vocab_size) < 0.5] = -np.inf
    native = SamplingBuffers.allocate(rows)
    native.temperature[:] = rng.choice([0.5, 1.0, 2.0], rows)
    native.top_k[:] = rng.choice([0, 0, 0, 700, 5000], rows)
    native.top_p[:] = rng.choice([1.0, 0.05, 0.5, 0.95, 0.999], rows)
    native.min_p[:] = rng.choice([0.0, 0.0, 0.02, 0.3], rows)
    native.position[:] = np.arange(rows)
    native.num_logprobs[:], native.logprobs_mode[:] = 0, LogprobsMode.PROCESSED_LOGPROBS
    reference = copy_buffers(native)
    native_sample(logits, vocab_size, native)
    sampler.sample(logits, reference)
    differing = native.token != reference.token
    assert differing.sum() <= 2, np.flatnonzero(differing)
    # The logprob is the size of the kept set in disguise; a token on its edge more or less hardly shows.
    np.testing.assert_allclose(native.logprob[~differing], reference.logprob[~differing], atol=1e-3)


FEATURES = {
    "plain": {},
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "bias": {"bias": {0: 2.0, 5: -3.0, 39: 1.5}},
    "repetition": {"penalties": (1.8, 0.0, 0.0)},
    "frequency": {"penalties": (1.0, 0.6, 0.0)},
    "presence": {"penalties": (1.0, 0.0, -0.9)},
    "bans": {"banned": [1, 2, 3, 17]},
    "allowed": {"allowed": [0, 3, 8, 20, 31, 32, 39]},
    "grammar": {"grammar": [2, 3, 4, 33, 38]},
    "replacement": {"replacement": True},
    "all of them": {
        "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "bias": {4: 1.0, 6: 2.0},
        "penalties": (1.3, 0.2, 0.4), "banned": [9], "allowed": range(0, 30), "grammar": range(3, 40),
        "replacement": True,
    },
}  # fmt: skip
SEEN = {2: 0, 4: 1, 5: 3, 20: 2, 33: 1}


def exact_distribution(logits: np.ndarray, feature: dict) -> np.ndarray:
    """Probabilities in float64, step by step, one token after the other."""
    x = logits.astype(np.float64)
    for token, value in feature.get("bias", {}).items():
        x[token] += value
    repetition, frequency, presence = feature.get("penalties", (1.0, 0.0, 0.0))
    for token, count in SEEN.items():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= frequency * count + presence * (count > 0)
    everything = range(len(x))
    allowed = set(feature.get("allowed", everything)) & set(feature.get("grammar", everything))
    for token in everything:
        if token not in allowed or token in feature.get("banned", []):
            x[token] = -np.inf
    p = np.exp((x - x.max()) / feature.get("temperature", 1.0))
    p[p < feature.get("min_p", 0.0) * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    p[order[feature.get("top_k", len(p)) :]] = 0
    share = np.cumsum(p[order]) / p.sum()
    p[order[np.searchsorted(share, feature.get("top_p", 1.0)) + 1 :]] = 0
    return p / p.sum()


@pytest.mark.parametrize("name", FEATURES)
def test_draws_follow_the_exact_distribution(name):
    """Chi-square of 100,000 draws, a feature each, and of all of them together."""
    feature = FEATURES[name]
    draws, vocab_size = 100_000, 40
    rng = np.random.default_rng(5)
    logits, other = (rng.standard_normal((2, vocab_size)) * 1.2).astype(np.float32)
    sampling = SamplingBuffers.allocate(draws)
    sampling.temperature[:] = feature.get("temperature", 1.0)
    for setting in ("top_k", "top_p", "min_p"):
        if setting in feature:
            getattr(sampling, setting)[:] = feature[setting]
    sampling.seed[:], sampling.position[:] = 11, np.arange(draws)
    rules = RowRules(sampling)
    edits = {key: feature[key] for key in ("bias", "penalties", "banned") if key in feature}
    if edits:
        rules.edit(0, seen=SEEN, **edits)
    for key in ("allowed", "grammar"):
        if key in feature:
            rules.allow(0, np.isin(np.arange(vocab_size), list(feature[key])), grammar=key == "grammar")
    if "replacement" in feature:
        rules.replace(0, other)
    for array in ("edits", "allowed_mask", "grammar_mask", "replacement"):
        getattr(sampling, array)[:] = getattr(sampling, array)[0]
    native_sample(np.tile(logits, (draws, 1)), vocab_size, sampling)

    expected = draws * exact_distribution(other if "replacement" in feature else logits, feature)
    counts = np.bincount(sampling.token, minlength=vocab_size)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4, (statistic, freedom)
