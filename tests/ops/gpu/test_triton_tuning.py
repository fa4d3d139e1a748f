from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from streamllm.cli import tune_gpu  # noqa: E402
from streamllm.cli.main import main  # noqa: E402
from streamllm.ops.gpu.kernels import SPLIT_SIZE, AttentionShape  # noqa: E402
from streamllm.ops.gpu.triton_kernels import tune, tune_products, tuning  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul_plan import product_config  # noqa: E402
from streamllm.ops.gpu.triton_kernels.tune import Workload  # noqa: E402
from streamllm.ops.gpu.triton_kernels.tuning import TileConfig, attention_config  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path))
    tuning.configuration.cache_clear()
    yield
    tuning.configuration.cache_clear()


def config(architecture: str, kernel: str = "prefill", dtype=torch.bfloat16, **layer) -> TileConfig:
    shape = AttentionShape(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 1.0} | layer)
    return attention_config(kernel, architecture, torch.empty(0, dtype=dtype), torch.empty(0), shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_the_package_knows_every_head_size_and_dtype(architecture, kernel):
    for head_dim in (8, 32, 48, 64, 80, 96, 112, 128, 192, 256):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for soft_cap in (0.0, 30.0):
                found = config(architecture, kernel, dtype, head_dim=head_dim, soft_cap=soft_cap)
                assert SPLIT_SIZE % found.block_n == 0
                assert kernel == "prefill" or found.block_m == 16


def test_an_unknown_head_size_is_said():
    with pytest.raises(ValueError, match="no configuration for 16-bit head=512"):
        config("sm_90", head_dim=512)


@pytest.mark.parametrize(
    ("architecture", "like"),
    [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_120", "sm_80"), ("sm_103", "sm_100"), ("sm_110", "sm_100")],
)
def test_other_architectures_are_tiled_like_those_whose_instructions_they_have(architecture, like):
    assert tuning.tuned_as(architecture) == like
    assert config(architecture) == config(like)


def test_the_user_table_wins_where_it_knows_the_problem(tmp_path):
    package, found = config("sm_90"), TileConfig(64, 16, 4, 2)
    path = tuning.write_user_table("sm_90", {"prefill": {"16-bit head=128": found}})
    assert path == tmp_path / "triton-tuning.json"
    assert config("sm_90") == config("sm_90", num_heads=16) == found
    assert config("sm_90", "decode") != found
    assert config("sm_80") == config("sm_80", num_heads=2) != found

    specific = TileConfig(32, 32, 4, 2)
    tuning.write_user_table("sm_90", {"prefill": {"16-bit head=128 cache=32-bit group=4": specific}})
    assert config("sm_90") == specific
    assert config("sm_90", num_heads=16) == found != package


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"sm_90": {"prefill": {"16-bit": {"block_m": "a"}}}}', '{"a": 1}']
)
def test_a_broken_user_table_is_passed_over_with_a_warning(text, tmp_path, caplog):
    (tmp_path / "triton-tuning.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert config("sm_90").block_m > 0
    assert "triton-tuning.json is passed over" in caplog.text and "tune-gpu" in caplog.text


SMALL = Workload(decodes=2, context=40, prompt=33, chunk=9, chunks=2)


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_the_fastest_that_runs_is_found(kernel, monkeypatch):
    """On a step that really runs; time is what the test says."""
    monkeypatch.setattr(tune, "QUERY_ROWS", (16, 32))
    monkeypatch.setattr(tune, "KEYS", (32, 64))
    monkeypatch.setattr(tune, "WARPS", (4,))
    times = iter([3.0, None, 2.0, 2.0, *[5.0] * 10])

    def timer(call):
        time = next(times)
        if time is None:
            raise triton.runtime.errors.OutOfResources(200_000, 100_000, "shared memory")
        return time

    shape = AttentionShape(4, 2, 32, 1.0)
    device = torch.device("cpu")
    measured = list(tune.measure(kernel, shape, torch.float32, torch.float32, device, SMALL, timer))
    assert len({found.config for found in measured}) == len(measured) >= 4
    assert measured[0].config == attention_config(kernel, "sm_80", torch.empty(0), torch.empty(0), shape)
    assert measured[1].milliseconds is None
    assert tune.fastest(measured) == measured[2].config
    assert tune.fastest(measured[1:2]) is None


def test_without_a_gpu_tune_gpu_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(tune_gpu.machine, "gpus", lambda: [])
    assert main(["tune-gpu"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no GPU to tune for" in error


def test_without_the_extra_tune_gpu_says_what_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(tune_gpu.machine, "gpus", lambda: ["a GPU"])
    monkeypatch.setattr(tune_gpu.machine, "has_cuda_torch", lambda: False)
    assert main(["tune-gpu"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'streamllm[gpu]'" in error


def test_tune_gpu_writes_what_was_fastest(capsys, monkeypatch, tmp_path, default_model_path):
    """All of the command but the GPU: the timings are the test's."""
    monkeypatch.setattr(tune_gpu, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "test GPU")
    best = TileConfig(64, 32, 4, 2)

    def measure(kernel, shape, *_):
        assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (9, 3, 64)
        return [tune.Measured(TileConfig(128, 64, 8, 2), 2.0), tune.Measured(best, 1.5)]

    def measure_product(weight, known, *_):
        config = replace(known, num_stages=5)
        return [tune_products.MeasuredProduct(known, None), tune_products.MeasuredProduct(config, 0.02)]

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune_products, "measure", measure_product)
    assert main(["tune-gpu", str(default_model_path), "--kv-cache-dtype", "fp8"]) == 0
    printed = capsys.readouterr().out
    assert "1500.0 us" in printed and "  20.0 us" in printed
    table = json.loads((tmp_path / "triton-tuning.json").read_text())
    expected = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    problem = "16-bit head=64 cache=8-bit group=3"
    products = table["sm_80"].pop("matmul")
    assert table == {"sm_80": {"prefill": {problem: expected}, "decode": {problem: expected}}}
    assert [name.split(" ", 2)[2] for name in products] == [
        "n=3072 k=576",
        "n=576 k=1536",
        "n=576 k=576",
        "n=960 k=576",
    ]
    assert product_config("sm_80", "q4_1", 2, 576, 1536).num_stages == 5
