"""The call that takes torch tensors, with the emulated kernel on tensors of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.cuda_emulation import emulated
from helpers.sampling_rows import copy_buffers

from streamllm.ops.gpu.cuda import sampling as cuda_sampling
from streamllm.ops.gpu.kernels import DeviceSampling
from streamllm.ops.step_inputs import MAX_LOGPROBS, SamplingBuffers
from streamllm.runner import sampler


def on_device(sampling: SamplingBuffers) -> DeviceSampling:
    """Tensors that share the buffers' memory."""
    fields = {name: getattr(sampling, name) for name in SamplingBuffers.__slots__}
    fields["seed"] = fields["seed"].view(np.int64)
    return DeviceSampling(**{name: torch.from_numpy(array) for name, array in fields.items()})


def sample(logits: torch.Tensor, vocab_size: int, sampling: SamplingBuffers, num_outputs: int) -> None:
    library = emulated("sampling.cu")
    cuda_sampling.sample(library, logits, vocab_size, on_device(sampling), num_outputs, 0)


def test_leading_rows_of_padded_logits():
    """A buffer has more rows than the step has outputs, and more columns than the vocabulary has ids."""
    logits = np.random.default_rng(0).standard_normal((5, 120)).astype(np.float32)
    sampling = SamplingBuffers.allocate(5)
    sampling.temperature[:], sampling.position[:] = 1.0, np.arange(5)
    sampling.num_logprobs[:] = 3
    sampling.token[:] = -77
    expected = copy_buffers(sampling)
    sample(torch.from_numpy(logits), 100, sampling, 4)
    sampler.sample(logits[:4, :100], expected)
    assert sampling.token.tolist() == expected.token.tolist() and sampling.token[4] == -77
    assert sampling.top_ids[:4, :3].tolist() == expected.top_ids[:4, :3].tolist()
    np.testing.assert_allclose(sampling.logprob[:4], expected.logprob[:4], atol=1e-5)
    sample(torch.empty(0, 120), 100, sampling, 0)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 99), "2 rows of 100 contiguous values"),
        (torch.zeros(1, 100), "2 rows of 100 contiguous values"),
        (torch.zeros(100, 2).T, "2 rows of 100 contiguous values"),
        (torch.zeros(2, 100, dtype=torch.float16), "float32"),
    ],
)
def test_logits_that_do_not_fit_are_refused(logits, message):
    with pytest.raises(ValueError, match=message):
        sample(logits, 100, SamplingBuffers.allocate(2), 2)


def test_arrays_of_another_dtype_are_refused():
    sampling = on_device(SamplingBuffers.allocate(2))
    sampling.top_k = sampling.top_k.long()
    with pytest.raises(ValueError, match="top_k must be contiguous int32 with 2 rows or more"):
        cuda_sampling.sample(emulated("sampling.cu"), torch.zeros(2, 100), 100, sampling, 2, 0)
    assert sampling.top_ids.shape[1] == MAX_LOGPROBS
