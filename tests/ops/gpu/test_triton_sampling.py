"""Triton's sampling kernel against the definition in numpy, in Triton's interpreter where there is no GPU.

The interpreter runs a program at a time with numpy: it sees neither races nor what the compiler makes of the
code, nor the GPU's own exp().
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.sampling_checks import (  # noqa: E402
    blank_results,
    check_against_definition,
    random_logits,
    random_rules,
    random_settings,
)
from helpers.sampling_rows import RowRules, copy_buffers  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.ops.gpu.kernels import PADDING_TARGET, DeviceSampling  # noqa: E402
from streamllm.ops.gpu.sampling_upload import pack  # noqa: E402
from streamllm.ops.gpu.triton_kernels import sampling as triton_sampling  # noqa: E402
from streamllm.ops.step_inputs import (  # noqa: E402
    TOKEN_NOT_FINITE,
    TOKEN_NOTHING_ALLOWED,
    LogprobsMode,
    SamplingBuffers,
)
from streamllm.runner import sampler  # noqa: E402


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows have several, the last one not full."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_sampling, "BLOCK", 128)


def sample(logits: np.ndarray, sampling: SamplingBuffers) -> None:
    """With everything that the rows point to on the device."""
    rows, vocab_size = logits.shape
    staging = np.zeros(1 << 22, np.uint8)
    memory = torch.zeros(len(staging), dtype=torch.uint8, device=DEVICE)
    packed = pack(sampling, rows, vocab_size, staging, memory.data_ptr())
    memory.copy_(torch.from_numpy(staging))
    fields = {name: getattr(sampling, name) for name in SamplingBuffers.__slots__}
    fields["seed"] = fields["seed"].view(np.int64)
    for name in ("edits", "allowed_mask", "grammar_mask", "replacement"):
        fields[name] = getattr(packed, name)
    tensors = {name: torch.from_numpy(array.copy()).to(DEVICE) for name, array in fields.items()}
    device_logits = torch.from_numpy(logits).to(DEVICE)
    with np.errstate(all="ignore"):
        triton_sampling.sample(device_logits, vocab_size, DeviceSampling(**tensors), rows)
    for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
        getattr(sampling, name)[...] = tensors[name].cpu().numpy()


@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 6), (31, 8), (32, 8), (33, 8), (300, 8)])
def test_everything_at_once(vocab_size, rows):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, rows, vocab_size)
    sampling = random_settings(rng, rows)
    rules = random_rules(rng, sampling, vocab_size)
    check_against_definition(sample, logits, sampling)
    del rules


@pytest.mark.parametrize("settings", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.5}])
def test_a_thousand_ids(settings, monkeypatch):
    rows, vocab_size = 2, 1000
    monkeypatch.setattr(triton_sampling, "BLOCK", 512)
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((rows, vocab_size)) * 2).astype(np.float32)
    logits[1] = np.round(logits[1])
    sampling = random_settings(rng, rows)
    sampling.temperature[:], sampling.min_p[:] = 1.0, 0.0
    sampling.top_k[:], sampling.top_p[:] = settings.get("top_k", 0), settings.get("top_p", 1.0)
    sampling.num_logprobs[:], sampling.logprobs_mode[:] = 20, LogprobsMode.PROCESSED_LOGPROBS
    check_against_definition(sample, logits, sampling)


def test_a_row_does_not_depend_on_the_batch():
    rng = np.random.default_rng(8)
    rows, vocab_size = 3, 200
    logits = random_logits(rng, rows, vocab_size)
    together = random_settings(rng, rows)
    together.temperature[:], together.num_logprobs[:] = 1.0, 3
    alone = copy_buffers(together)
    sample(logits, together)
    for row in range(rows):
        one = SamplingBuffers.allocate(1)
        for name in SamplingBuffers.__slots__:
            getattr(one, name)[0] = getattr(alone, name)[row]
        sample(logits[row : row + 1], one)
        for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(one, name)[0], getattr(together, name)[row])


def test_padding_rows_are_left_alone():
    sampling = SamplingBuffers.allocate(4)
    blank_results(sampling)
    sampling.target[1::2] = PADDING_TARGET
    sampling.edits[1::2] = sampling.allowed_mask[1::2] = 8  # no address
    sampling.num_logprobs[:] = 2
    logits = np.zeros((4, 40), np.float32)
    logits[1], logits[2, 5] = np.nan, 1.0
    sample(logits, sampling)
    assert sampling.token.tolist() == [0, -77, 5, -77]
    assert np.isnan(sampling.logprob[1::2]).all() and (sampling.top_ids[1::2] == -77).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, np.nan])
def test_rows_that_give_no_token(temperature):
    logits = np.zeros((6, 40), np.float32)
    logits[0, -1], logits[1, 20], logits[2] = np.nan, np.inf, -np.inf
    sampling = SamplingBuffers.allocate(6)
    sampling.temperature[:], sampling.num_logprobs[:] = temperature, 1
    rules = RowRules(sampling)
    rules.allow(3, np.zeros(40, bool))
    rules.replace(4, np.array([*range(39), np.nan]))
    sample(logits, sampling)
    assert sampling.token[:3].tolist() == [TOKEN_NOT_FINITE] * 3
    assert sampling.token[3:5].tolist() == [TOKEN_NOTHING_ALLOWED, TOKEN_NOT_FINITE]
    assert (sampling.token[5] >= 0) == (temperature == temperature)


def test_top_p_cuts_ties_by_id_and_top_k_keeps_them():
    rows = 3
    logits = np.zeros((rows, 34), np.float32)
    logits[:, :2] = -np.inf
    sampling = SamplingBuffers.allocate(rows)
    sampling.temperature[:], sampling.top_p[:], sampling.position[:] = 1.0, 0.25, np.arange(rows)
    sampling.num_logprobs[:], sampling.logprobs_mode[:] = 34, LogprobsMode.PROCESSED_LOGITS
    sample(logits, sampling)
    assert ((sampling.top_logprobs[:, :34] == 0).sum(1) == 8).all()
    assert (np.sort(sampling.top_ids[:, :8]) == np.arange(2, 10)).all()
    logits[:, 20] = 1.0
    sampling.top_p[:], sampling.top_k[:] = 1.0, 2
    sample(logits, sampling)
    assert (np.isfinite(sampling.top_logprobs[:, :34]).sum(1) == 32).all()


@pytest.mark.parametrize(
    ("position", "uniform", "token"),
    [(14883995, 0.0, 1), (630968, 0.25, 3), (9297664, 0.5, 5), (150078, 0.75, 7)],
)
def test_an_id_owns_the_lower_end_of_its_interval(position, uniform, token):
    logits = np.array([[-np.inf, 0.0] * 4], np.float32)
    sampling = SamplingBuffers.allocate(1)
    sampling.temperature[0], sampling.position[0] = 1.0, position
    assert sampler.uniform(0, 0, position) == uniform
    sample(logits, sampling)
    assert sampling.token[0] == token


def test_logits_that_are_too_narrow_are_refused():
    with pytest.raises(ValueError, match="1 rows of 41 contiguous values"):
        triton_sampling.sample(torch.zeros((1, 40)), 41, DeviceSampling(*[torch.zeros((1, 64))] * 19), 1)
