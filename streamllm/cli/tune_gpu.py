"""``streamllm tune-gpu``: measures how Triton's attention and matrix products are tiled best on this GPU for
a model, and keeps that in the user's cache folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from streamllm import machine
from streamllm.errors import StreamLLMError

if TYPE_CHECKING:
    from streamllm.ops.gpu.kernels import AttentionShape
    from streamllm.ops.gpu.triton_kernels.matmul_plan import ProductConfig
    from streamllm.ops.gpu.triton_kernels.tune import Measured
    from streamllm.ops.gpu.triton_kernels.tune_products import MeasuredProduct


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="whose layers to tune for; as for serve, and its default"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the activations (bfloat16)",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the KV cache (the activations')"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print and write.

    Raises:
        StreamLLMError: there is no GPU, the extra is not installed, or the model cannot be found.
    """
    device = _gpu()
    shape = _attention(options.model)

    import torch

    from streamllm.ops.gpu.triton_kernels import tune, tuning

    dtype = getattr(torch, options.dtype)
    cache_dtype = torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else dtype
    problem = tune.problem_name(shape, dtype, cache_dtype)
    architecture = tuning.gpu_architecture(device)
    print(f"{torch.cuda.get_device_name(device)} ({architecture}): {problem}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for kernel in ("prefill", "decode"):
        print(f"{kernel}:", flush=True)
        measured = []
        for one in tune.measure(kernel, shape, dtype, cache_dtype, device, tune.Workload()):
            print(f"  {_line(one)}", flush=True)
            measured.append(one)
        best = tune.fastest(measured)
        if best is None:
            raise StreamLLMError(f"No configuration of the {kernel} kernel runs on this GPU.")
        print(f"  best: {_tiles(best)}", flush=True)
        found[kernel] = {problem: best}
    if products := _tune_products(options.model, dtype, device):
        found["matmul"] = products
    print(f"Written to {tuning.write_user_table(architecture, found)}.")
    return 0


def _gpu() -> Any:
    """The torch device to measure on."""
    if not machine.gpus():
        raise StreamLLMError(
            "There is no GPU to tune for: CUDA's driver shows none here (nvidia-smi lists what it shows). "
            "Without tuning, the tables of this package are used."
        )
    if not machine.has_cuda_torch():
        raise StreamLLMError(
            "tune-gpu needs the extra gpu, whose torch for CUDA is not installed: "
            "pip install 'streamllm[gpu]'."
        )
    import torch

    if not torch.cuda.is_available():
        raise StreamLLMError(
            f"torch {torch.__version__} cannot use this GPU: it is built for CUDA {torch.version.cuda}, "
            "which the driver does not support. Update the driver."
        )
    return torch.device("cuda", torch.cuda.current_device())


def _attention(model: str | None) -> AttentionShape:
    """The attention of the model's layers; windows do not count as another problem."""
    from streamllm.models.model_config import ModelConfig
    from streamllm.ops.gpu.kernels import AttentionShape
    from streamllm.sources import resolve

    config = ModelConfig.from_files(resolve(model))
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)


def _tune_products(model: str | None, dtype: Any, device: Any) -> dict[str, ProductConfig]:
    """The best configurations of those of the model's products that are not left to cuBLAS: with quantised
    weights, and in float32."""
    import torch

    from streamllm.models.checkpoint import open_checkpoint
    from streamllm.models.model_config import ModelConfig
    from streamllm.ops.gpu.triton_kernels.matmul_plan import product_problem
    from streamllm.ops.gpu.triton_kernels.tune_products import tune, weight_shapes
    from streamllm.ops.gpu.weight_layout import PACKED_FORMATS
    from streamllm.sources import resolve

    files = resolve(model)
    config = ModelConfig.from_files(files)
    if config.through_transformers:
        return {}
    checkpoint = open_checkpoint(files, config)
    found = {}
    for (n, k), name in weight_shapes(config).items():
        stored_as: Any = "dense" if dtype == torch.float32 else checkpoint.format(name)
        if stored_as != "dense" and stored_as not in PACKED_FORMATS:
            continue
        problem = product_problem(stored_as, dtype.itemsize, n, k)
        print(f"product, {problem}:", flush=True)
        found[problem] = tune(stored_as, n, k, dtype, device, _print_product)
    return found


def _print_product(rows: int, measured: MeasuredProduct) -> None:
    print(f"  {rows:4} rows, {measured.config}: {_time(measured.milliseconds)}", flush=True)


def _line(measured: Measured) -> str:
    return f"{_tiles(measured.config)}: {_time(measured.milliseconds)}"


def _time(milliseconds: float | None) -> str:
    return "does not run" if milliseconds is None else f"{1000 * milliseconds:8.1f} us"


def _tiles(config: Any) -> str:
    return f"{config.block_m:3} x {config.block_n:3}, {config.num_warps} warps, {config.num_stages} stages"
