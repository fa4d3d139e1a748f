"""A start on a GPU: what is found, what is refused in one line, how the KV pool is sized."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import GIB, FixedMemory, cpu_target
from helpers.drive import generate
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model

from streamllm import LLM, SamplingParams, machine
from streamllm.config import EngineConfig
from streamllm.engine import gpu_loader
from streamllm.engine.async_engine import AsyncEngine
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.machine import Gpu
from streamllm.ops.gpu import dispatch
from streamllm.runner.gpu_backend import GpuBackend

H100 = Gpu("NVIDIA H100", (9, 0), 80 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(monkeypatch, model):
    """Loads an engine on a GPU that the CPU stands for."""

    def load(*, memory: FixedMemory | None = None, graphs: bool = False, path=model, **settings):
        monkeypatch.setattr(gpu_loader, "find_gpu", lambda config: cpu_target(graphs=graphs, memory=memory))
        settings = {"backend": "cuda", "dtype": "float32", "max_num_batched_tokens": 64, **settings}
        return AsyncEngine.from_config(EngineConfig(model=str(path), **settings))

    return load


def runner_of(engine: AsyncEngine):
    return engine._executor.runner


BLOCK_BYTES = 2 * 2 * 16 * 32 * 4  # layers, K and V, positions, two heads of 16, float32


def test_the_pool_takes_what_weights_and_the_largest_step_leave(start):
    memory = FixedMemory(total=40 * 2**20, step_bytes=10 * 2**20)
    runner = runner_of(start(memory=memory, enforce_eager=True))
    weights = runner.weight_bytes
    assert runner.num_blocks == (int(0.92 * 40 * 2**20) - weights - 10 * 2**20) // BLOCK_BYTES
    half = runner_of(start(memory=memory, gpu_memory_utilization=0.5))
    assert half.num_blocks == (20 * 2**20 - weights - 10 * 2**20) // BLOCK_BYTES


def test_a_share_of_memory_is_of_all_and_of_no_more_than_is_free(start):
    memory = FixedMemory(total=80 * 2**20, free=40 * 2**20, step_bytes=2**20)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization asks for .* 40\.0 MiB available"):
        start(memory=memory, gpu_memory_utilization=0.9)
    assert runner_of(start(memory=memory)).kv_cache_bytes < 0.92 * 40 * 2**20


def test_graphs_are_counted_in(start):
    memory = FixedMemory(total=400 * 2**20, step_bytes=16 * 2**20)
    eager, captured = (
        runner_of(start(memory=memory, graphs=graphs, max_num_seqs=8)).kv_cache_bytes
        for graphs in (False, True)
    )
    # Sizes 1, 2, 4 and 8, and for mixed steps those up to 64.
    expected = 16 * 2**20 + 4 * gpu_loader.GRAPH_BYTES + 11 * 3 * gpu_loader.PIECE_BYTES
    assert 0 <= eager - captured - expected < 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [({"num_gpu_blocks_override": 99}, 99), ({"kv_cache_memory_bytes": 50 * BLOCK_BYTES + 7}, 50)],
)
def test_a_pool_of_a_given_size(start, settings, blocks):
    assert runner_of(start(**settings)).num_blocks == blocks


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "half", "bfloat16"])
def test_activations_have_the_checkpoints_type_unless_told(start, tmp_path, stored, dtype):
    path = make_tiny_model(tmp_path, dtype=stored)
    runner = runner_of(start(path=path, dtype=dtype, num_gpu_blocks_override=40))
    auto = stored if stored != "float32" else "bfloat16"
    expected = {"auto": auto, "half": "float16"}.get(dtype, dtype)
    backend = runner._backend
    assert backend.ops.dtype == getattr(torch, expected)
    assert backend._device_inputs._kv_cache.dtype_name == expected


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_activations_keep_the_type_of_a_checkpoint_that_is_quantised_as_it_loads(start, tmp_path, stored):
    path = make_tiny_model(tmp_path, dtype=stored)
    runner = runner_of(start(path=path, dtype="auto", quantization="int8", num_gpu_blocks_override=40))
    expected = "float16" if stored == "float16" else "bfloat16"
    assert runner._backend.ops.dtype == getattr(torch, expected)


def test_a_quantised_gguf_does_not_say_what_activations_are(start, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, quantization="Q8_0")
    runner = runner_of(start(path=path, dtype="auto", num_gpu_blocks_override=40))
    assert runner._backend.ops.dtype == torch.bfloat16


def test_an_8_bit_cache_holds_more(start):
    memory = FixedMemory(total=40 * 2**20, step_bytes=2**20)
    plain, coarse = (
        runner_of(start(memory=memory, dtype="bfloat16", kv_cache_dtype=kind)).num_blocks
        for kind in ("auto", "fp8")
    )
    assert coarse == pytest.approx(2 * plain, abs=1)


def test_an_int8_cache_has_room_for_its_scales(start):
    """A head of 16 dimensions takes 20 bytes instead of bfloat16's 32."""
    memory = FixedMemory(total=40 * 2**20, step_bytes=2**20)
    plain, coarse = (
        runner_of(start(memory=memory, dtype="bfloat16", kv_cache_dtype=kind)) for kind in ("auto", "int8")
    )
    assert coarse.num_blocks == pytest.approx(32 / 20 * plain.num_blocks, abs=1)
    cache = coarse._backend._device_inputs._kv_cache
    assert cache.num_bytes == cache.planes.nbytes == coarse.kv_cache_bytes


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_heads_that_a_kernel_cannot_read_from_bytes_are_refused(kind):
    cuda, triton = SimpleNamespace(name="cuda"), SimpleNamespace(name="triton")
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {kind} needs heads of a multiple of 16 .* 40;"):
        gpu_loader._check_head_size(cuda, 40, kind)
    for kernels, head_dim, other in ((cuda, 48, kind), (cuda, 40, "bfloat16"), (triton, 40, kind)):
        gpu_loader._check_head_size(kernels, head_dim, other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_dtype": "float16"}, "float16 does not go with float32 activations .* use auto .* or fp8"),
        ({"max_model_len": 512, "num_gpu_blocks_override": 10}, "--max-model-len 512 does not fit .* 160"),
        ({"memory": FixedMemory(40 * 2**20, step_bytes=39 * 2**20)}, "nothing is left for the KV cache"),
        ({"memory": FixedMemory(10**5)}, r"The weights need .* on the GPU and 97\.7 KiB are free"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(start, settings, words):
    with pytest.raises((ConfigError, ModelLoadError), match=words) as caught:
        start(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("run_largest_step", "a step of 64 tokens beside the weights; lower --max-num-batched-tokens"),
        ("_capture_graphs", "beside weights and KV pool; lower --gpu-memory-utilization, .*--enforce-eager"),
    ],
)
def test_where_memory_ends_is_said_in_a_line(start, monkeypatch, where, words):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(GpuBackend, where, full)
    with pytest.raises(ModelLoadError, match=words) as caught:
        start(graphs=True)
    assert "\n" not in str(caught.value)


def test_a_head_size_without_kernels_is_refused(start, tmp_path):
    path = make_tiny_model(tmp_path, head_dim=264)
    with pytest.raises(ModelLoadError, match=r"head_dim 264 is not supported; .* multiple of 8 up to 256"):
        start(path=path)


def test_a_start_says_where_it_runs(start, caplog):
    with caplog.at_level(logging.INFO, "streamllm"):
        start()
    (line,) = [r.getMessage() for r in caplog.records if "KV pool" in r.getMessage()]
    assert line.endswith("float32 on a test's GPU, reference kernels")


# -- finding a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def with_gpus(monkeypatch):
    def show(*gpus: Gpu, torch_is_usable: bool = True, cuda_works: bool = True):
        monkeypatch.setattr(machine, "gpus", lambda: list(gpus))
        monkeypatch.setattr(machine, "has_cuda_torch", lambda: torch_is_usable)
        monkeypatch.setattr(machine, "cuda_driver_version", lambda: (12, 2))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_works)
        machine.gpu_is_usable.cache_clear()

    yield show
    monkeypatch.undo()
    machine.gpu_is_usable.cache_clear()


@pytest.mark.parametrize(
    ("gpus", "settings", "words"),
    [
        ([], {}, "needs an NVIDIA GPU, and CUDA's driver shows none here"),
        ([Gpu("Tesla T4", (7, 5), GIB)], {}, "compute capability 8.0 or later .* Tesla T4 has 7.5"),
        ([H100], {"torch_is_usable": False}, r"needs the extra gpu, .* pip install 'streamllm\[gpu\]'"),
        ([H100], {"cuda_works": False}, r"cannot use NVIDIA H100: .* the driver supports CUDA 12\.2"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_a_line(with_gpus, gpus, settings, words):
    with_gpus(*gpus, **settings)
    with pytest.raises(ConfigError, match=words) as caught:
        gpu_loader.find_gpu(EngineConfig(backend="cuda"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kernels", "enforce_eager", "captures"),
    [("triton", False, True), ("triton", True, False), ("reference", False, False)],
)
def test_what_reads_results_on_the_host_is_not_captured(
    with_gpus, monkeypatch, kernels, enforce_eager, captures
):
    with_gpus(H100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    target = gpu_loader.find_gpu(EngineConfig(backend="cuda", enforce_eager=enforce_eager))
    assert target.kernels.name == kernels
    assert (target.recorder is not None) is captures


def test_what_a_step_leaves_behind_counts_like_what_it_takes(monkeypatch):
    """Kernels' modules, say, which torch's allocator knows nothing of."""
    free, allocated = iter([1000, 950]), iter([100])
    for name, answer in {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (next(free), 2000),
        "memory_allocated": lambda device: next(allocated),
        "max_memory_allocated": lambda device: 700,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    calls = []
    assert gpu_loader.CudaMemory(torch.device("cuda", 0)).peak_of(lambda: calls.append(1)) == 600 + 50
    assert calls == [1]


def test_auto_takes_a_gpu_where_it_can_be_used(with_gpus):
    with_gpus()
    assert EngineConfig().resolved_backend == "cpu"
    with_gpus(Gpu("Tesla T4", (7, 5), GIB))
    assert EngineConfig().resolved_backend == "cpu"
    assert EngineConfig().max_num_batched_tokens == 256
    with_gpus(H100, torch_is_usable=False)
    assert EngineConfig().resolved_backend == "cpu"
    with_gpus(H100)
    assert EngineConfig().resolved_backend == "cuda"
    assert EngineConfig().max_num_batched_tokens == 2048
    assert EngineConfig(max_num_batched_tokens=300).max_num_batched_tokens == 300
    assert EngineConfig(backend="cpu").resolved_backend == "cpu"
    assert EngineConfig(backend="cpu").max_num_batched_tokens == 256


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "bfloat16"}, "--dtype bfloat16 needs a GPU .* use auto or float32"),
        ({"dtype": "half", "backend": "cpu"}, "--dtype half needs a GPU"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 needs a GPU .* auto or float32 or float16 or int8"),
    ],
)
def test_precisions_that_a_cpu_does_not_have_are_refused(with_gpus, settings, words):
    with_gpus()
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)
    with_gpus(H100)
    if "backend" not in settings:
        EngineConfig(**settings)


# -- a whole engine ----------------------------------------------------------------------------------------

PROMPTS = ["The quick brown fox", "A language model predicts", "東京 " * 20, "a"]
REQUESTS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "n": 3, "logprobs": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias and bans": {"temperature": 0, "logit_bias": {65: 5.0}, "min_tokens": 6, "bad_words": ["the"]},
    "allowed": {"temperature": 1.0, "seed": 1, "allowed_token_ids": [40, 41, 50, 60]},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "[a-f]{3,9}"}},
}


@pytest.fixture(scope="module")
def cpu(model):
    llm = LLM(str(model), dtype="float32", num_gpu_blocks_override=128, max_num_batched_tokens=64)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def gpu(request, model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_loader, "find_gpu", lambda config: cpu_target(graphs=request.param))
        llm = LLM(
            str(model),
            dtype="float32",
            num_gpu_blocks_override=128,
            max_num_batched_tokens=64,
            backend="cuda",
        )
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("request_name", REQUESTS)
def test_an_engine_gives_what_the_cpu_gives(cpu, gpu, request_name):
    fields = {"max_tokens": 16, **REQUESTS[request_name]}
    if "structured_outputs" in fields:
        from streamllm.structured_outputs import StructuredOutputsParams

        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    params = SamplingParams(**fields)
    for expected, actual in zip(
        cpu.generate(PROMPTS, params, use_tqdm=False),
        gpu.generate(PROMPTS, params, use_tqdm=False),
        strict=True,
    ):
        for one, two in zip(expected.outputs, actual.outputs, strict=True):
            assert one.token_ids == two.token_ids and one.finish_reason == two.finish_reason
            for left, right in zip(one.logprobs or [], two.logprobs or [], strict=True):
                assert {t: e.rank for t, e in left.items()} == {t: e.rank for t, e in right.items()}
                assert left.keys() == right.keys()
        for left, right in zip(expected.prompt_logprobs or [], actual.prompt_logprobs or [], strict=True):
            for token_id, entry in (left or {}).items():
                assert right[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_embeddings_and_beams_too(cpu, gpu):
    for one, two in zip(cpu.embed(PROMPTS, use_tqdm=False), gpu.embed(PROMPTS, use_tqdm=False), strict=True):
        assert one.outputs.embedding == pytest.approx(two.outputs.embedding, abs=1e-4)
    from streamllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6)
    for one, two in zip(cpu.beam_search(PROMPTS, params), gpu.beam_search(PROMPTS, params), strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]


def test_a_prefix_hit_gives_the_same(cpu, gpu):
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = [{"prompt_token_ids": list(range(40, 110))}]
    first, second = (gpu.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 64
    expected = cpu.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected


@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_quantised_weights_stay_as_the_file_holds_them(start, tmp_path, quantization):
    path = tmp_path / "m.gguf"
    wide = (
        {"hidden_size": 256, "intermediate_size": 256}
        if "_K" in quantization or "_XS" in quantization
        else {}
    )
    save_tiny_gguf(path, quantization=quantization, **wide)
    packed, dense = (
        runner_of(start(path=path, dtype=dtype, num_gpu_blocks_override=40)) for dtype in ("auto", "float32")
    )
    assert packed.weight_bytes < dense.weight_bytes / 3
    prompts = [[5, 6, 7, 8], [9] * 20]
    exact = generate(dense, prompts, max_tokens=1)
    for one, two in zip(exact, generate(packed, prompts, max_tokens=1), strict=True):
        np.testing.assert_allclose(one.logits, two.logits, atol=0.05 * np.abs(one.logits).max())
    expected = generate(cpu_runner(path), prompts, max_tokens=8)
    assert [run.output for run in generate(dense, prompts, max_tokens=8)] == [run.output for run in expected]


def test_experts_stay_as_the_file_holds_them(start, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, "gpt-oss", quantization="MXFP4")
    packed, dense = (
        runner_of(start(path=path, dtype=dtype, num_gpu_blocks_override=40)) for dtype in ("auto", "float32")
    )
    assert packed.weight_bytes < dense.weight_bytes / 2  # a tile is wider than these rows
    prompts = [[5, 6, 7, 8], [9] * 20]
    exact = generate(dense, prompts, max_tokens=1)
    for one, two in zip(exact, generate(packed, prompts, max_tokens=1), strict=True):
        np.testing.assert_allclose(one.logits, two.logits, atol=0.05 * np.abs(one.logits).max())


def cpu_runner(path):
    config = EngineConfig(model=str(path), dtype="float32", backend="cpu", num_gpu_blocks_override=40)
    return runner_of(AsyncEngine.from_config(config))
