"""The search for how products are tiled best; the products are real, the timings are the tests'."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from helpers.quantized_weights import FORMATS  # noqa: E402
from helpers.random_runner import CONFIG  # noqa: E402
from helpers.tiny_models import make_tiny_model  # noqa: E402
from helpers.triton_device import DEVICE  # noqa: E402

from streamllm.models.model_config import ModelConfig  # noqa: E402
from streamllm.ops.gpu.triton_kernels import tune_products  # noqa: E402
from streamllm.ops.gpu.triton_kernels.matmul_plan import product_config  # noqa: E402
from streamllm.sources import resolve  # noqa: E402

HERE = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    monkeypatch.setattr(tune_products, "MANY_ROWS", 80)
    tiles = {size: ((64, 4), (128, 4)) for size in (2, 4)}
    monkeypatch.setattr(tune_products, "_FEW_ROWS_TILES", tiles)
    monkeypatch.setattr(tune_products, "_MANY_ROWS_TILES", tiles)


@pytest.mark.parametrize("row_format", FORMATS)
def test_a_random_weight_is_one_that_can_be_multiplied(row_format):
    weight = tune_products.random_weight(row_format, 40, 96, torch.float16, HERE)
    assert weight.dequantize(torch.arange(3, device=HERE)).shape == (3, 96)
    known = product_config("sm_90", row_format, 2, 40, 96)
    measured = next(tune_products.measure(weight, known, 2, torch.float16, lambda call: 1.0))
    assert measured == tune_products.MeasuredProduct(known, 1.0)


def test_few_rows_decide_on_the_sums_and_many_on_the_rest():
    known = product_config("sm_80", "q4_1", 2, 40, 96)
    reports = []

    def timer(call):
        call()
        if len(reports) == 1:
            raise triton.runtime.errors.OutOfResources(200_000, 100_000, "shared memory")
        return {3: 2.0, 5: 1.0, 6: 1.0, 14: 3.0, 16: 2.5}.get(len(reports), 9.0)

    best = tune_products.tune(
        "q4_1", 40, 96, torch.float16, HERE, lambda rows, measured: reports.append((rows, measured)), timer
    )
    few = [measured.config for rows, measured in reports if rows == tune_products.FEW_ROWS]
    many = [measured.config for rows, measured in reports if rows == 80]
    assert few[0] == known and reports[1][1].milliseconds is None
    assert len(set(few)) == len(few) == 12 and len(set(many)) == len(many) >= 6
    assert many[0] == few[5] and best == reports[16][1].config
    assert {(c.block_n, c.num_warps, c.num_stages, c.programs) for c in many} == {
        (best.block_n, best.num_warps, best.num_stages, best.programs)
    }


def test_the_shapes_of_a_model():
    assert tune_products.weight_shapes(CONFIG) == {
        (64, 32): "model.layers.0.self_attn.q_proj.weight",
        (32, 32): "model.layers.0.self_attn.o_proj.weight",
        (96, 32): "model.layers.0.mlp.gate_proj.weight",
        (32, 48): "model.layers.0.mlp.down_proj.weight",
    }


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "olmo2"])
def test_the_shapes_of_other_families(family, tmp_path):
    config = ModelConfig.from_files(resolve(str(make_tiny_model(tmp_path / family, family))))
    shapes = tune_products.weight_shapes(config)
    hidden, q_width = config.hidden_size, config.num_heads * config.head_dim
    assert {(hidden, q_width), (q_width + 2 * config.num_kv_heads * config.head_dim, hidden)} <= set(shapes)
    assert all(n < config.vocab_size or k != hidden for n, k in shapes)
    assert any("experts" in name for name in shapes.values()) == (family == "mixtral")
