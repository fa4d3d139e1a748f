"""From a configuration to a model runner on a GPU: find the GPU, load the weights, see what the largest step
takes, and give the KV pool what is left."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streamllm import machine
from streamllm.config import EngineConfig
from streamllm.engine.memory import gib, longest_sequence, num_kv_blocks
from streamllm.engine.model_shard import ModelShard
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightMode, weight_bytes
from streamllm.runner.pending_runner import PendingRunner, Share
from streamllm.settings import AUTO_LENGTH

if TYPE_CHECKING:
    import torch

    from streamllm.ops.gpu.kernels import GpuKernels
    from streamllm.runner.graphs import GraphRecorder
    from streamllm.runner.model_runner import ModelRunner

logger = logging.getLogger("streamllm.engine")

INSTALL = "pip install 'streamllm[gpu]'"
_FLOATS = ("float32", "float16", "bfloat16")
GRAPH_BYTES, PIECE_BYTES = 3 * 2**20, 2**17
"""What the launches of one forward take as a graph, and each piece of one that is cut at attention, besides
activations: a generous guess."""


class DeviceMemory(Protocol):
    """Memory of a GPU, in bytes."""

    def total(self) -> int: ...

    def free(self) -> int: ...

    def peak_of(self, work: Callable[[], None]) -> int:
        """The most that ``work`` takes at a time beyond what is taken already; what it leaves behind for
        good (compiled kernels, libraries' workspaces) included."""


@dataclass(frozen=True)
class GpuTarget:
    """Where a model runs, and with what; tests describe a CPU instead."""

    name: str
    device: torch.device
    kernels: GpuKernels
    memory: DeviceMemory
    recorder: GraphRecorder | None


class CudaMemory:
    """The protocol :class:`DeviceMemory`, of a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def total(self) -> int:
        import torch

        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, work: Callable[[], None]) -> int:
        import torch

        free_before = self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        gc.collect()
        # Modules of kernels and the like are not torch's: no statistics of its allocator know them.
        return peak + max(free_before - self.free(), 0)


def find_gpu(config: EngineConfig) -> GpuTarget:
    """The GPU that is used.

    Raises:
        ConfigError: one line: there is none, or what is needed to use it is not installed.
    """
    gpus = machine.gpus()
    if not gpus:
        raise ConfigError(
            "--backend cuda needs an NVIDIA GPU, and CUDA's driver shows none here (nvidia-smi lists what it "
            "shows); leave the flag out to run on the CPU."
        )
    if gpus[0].compute_capability < machine.OLDEST_CAPABILITY:
        raise ConfigError(
            f"--backend cuda needs a GPU of compute capability 8.0 or later (A100, RTX 30 and newer); "
            f"{gpus[0].name} has {'.'.join(map(str, gpus[0].compute_capability))}. Use --backend cpu."
        )
    if not machine.has_cuda_torch():
        raise ConfigError(
            f"--backend cuda needs the extra gpu, whose torch for CUDA is not installed: {INSTALL}; or use "
            "--backend cpu."
        )
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} cannot use {gpus[0].name}: it is built for CUDA "
            f"{torch.version.cuda or '(none)'}, the driver supports {_driver_version()}. Update the driver, "
            "or use --backend cpu."
        )
    from streamllm.ops.gpu.dispatch import choose_kernels
    from streamllm.runner.graphs import CudaGraphRecorder

    device = torch.device("cuda", torch.cuda.current_device())
    chosen = choose_kernels(device)
    is_eager = config.enforce_eager or chosen.choice.name == "reference"  # which reads results on the host
    recorder = None if is_eager else CudaGraphRecorder()
    logger.info("%s kernels: %s", chosen.choice.name, chosen.choice.why)
    return GpuTarget(gpus[0].name, device, chosen.kernels, CudaMemory(device), recorder)


def activation_dtype(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """``"float32"``, ``"float16"`` or ``"bfloat16"``: what the flag asks for, or the checkpoint's own dtype
    if that has 16 bits, or bfloat16, which never overflows where float32 does not. It is the largest
    weight's; where that is quantised, the largest vector's, as those never are (in a GGUF they are float32).
    """
    if config.dtype != "auto":
        return {"float": "float32", "half": "float16"}.get(config.dtype, config.dtype)
    names = sorted(checkpoint.names(), key=checkpoint.num_bytes, reverse=True)
    vectors = (name for name in names if len(checkpoint.shape(name)) == 1)
    candidates = (checkpoint.format(name) for name in (names[0], *vectors))
    stored = next((dtype for dtype in candidates if dtype in _FLOATS), "float32")
    return "bfloat16" if stored == "float32" else stored


def cache_dtype(config: EngineConfig, activations: str) -> str:
    """
    Raises:
        ConfigError: there are no kernels for the pair.
    """
    wanted = config.kv_cache_dtype
    if wanted in ("fp8", "fp8_e4m3"):
        return "fp8"
    if wanted == "int8":
        return wanted
    if wanted not in ("auto", activations):
        raise ConfigError(
            f"--kv-cache-dtype {wanted} does not go with {activations} activations on a GPU; use auto (which "
            f"is {activations}), int8 or fp8."
        )
    return activations


def _check_head_size(kernels: GpuKernels, head_dim: int, kv_cache_dtype: str) -> None:
    """
    Raises:
        ConfigError: the kernels cannot read such heads from such a cache.
    """
    if kernels.name == "cuda" and kv_cache_dtype in ("int8", "fp8") and head_dim % 16:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype} needs heads of a multiple of 16 dimensions, and this model's "
            f"have {head_dim}; use auto, or Triton's kernels (STREAMLLM_GPU_KERNELS=triton)."
        )


def load_on_gpu(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    sampled_vocab_size: int,
    progress: bool,
    share: Share,
    target: GpuTarget | None = None,
) -> PendingRunner:
    """The weights on a GPU, and what the largest step leaves beside them.

    Raises:
        ConfigError: a flag cannot be honoured here.
        ModelLoadError: the model is not supported, or memory is too small for its weights.
    """
    target = target or find_gpu(config)
    from streamllm.ops.gpu.device_kv_cache import device_kv_bytes_per_block
    from streamllm.ops.gpu.gpu_ops import DTYPES
    from streamllm.runner.backends import LoadedModel, load_model
    from streamllm.runner.gpu_backend import GpuBackend
    from streamllm.runner.model_runner import ModelRunner, check_supported

    shard = ModelShard.of(model_config, checkpoint, share)
    check_supported(shard.config)
    dtype = activation_dtype(config, checkpoint)
    kv_cache_dtype = cache_dtype(config, dtype)
    _check_head_size(target.kernels, model_config.head_dim, kv_cache_dtype)
    weight_mode: WeightMode = "float32" if config.exact else "packed"
    available = target.memory.free()
    _check_weights_fit(shard.checkpoint, weight_mode, DTYPES[dtype].itemsize, available)
    # The code of Transformers' models looks at values on the host, which no graph can hold.
    recorder = None if model_config.through_transformers else target.recorder
    make_backend = functools.partial(
        GpuBackend, target.kernels, target.device, DTYPES[dtype], lora=config.lora_limits
    )
    backend = make_backend(recorder=recorder, progress=progress)
    with _where_memory_ends(
        f"Not enough memory on the GPU for the weights ({gib(available)} were free); take a smaller model or "
        "quantised weights."
    ):
        loaded = load_model(model_config, backend, checkpoint, progress, weight_mode, shard.parallel)
    taken = max(available - target.memory.free(), backend.ops.weight_bytes)

    def runner(loaded: LoadedModel, num_blocks: int, max_model_len: int) -> ModelRunner:
        return ModelRunner(
            shard.config,
            checkpoint,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            threads=1,
            sampled_vocab_size=sampled_vocab_size,
            loaded=loaded,
        )

    def run_largest_step() -> None:
        trial = make_backend()
        limit = config.max_model_len
        longest = model_config.context_length
        if limit is not None and limit != AUTO_LENGTH:
            longest = min(limit, longest)
        trial_runner = runner(LoadedModel(loaded.family, trial, loaded.model), 1, longest)
        trial.run_largest_step()
        trial_runner.close()

    with _where_memory_ends(
        f"Not enough memory on the GPU for a step of {config.max_num_batched_tokens} tokens beside the "
        "weights; lower --max-num-batched-tokens and --max-num-seqs, or take quantised weights."
    ):
        step_bytes = target.memory.peak_of(run_largest_step)
    bytes_per_block = device_kv_bytes_per_block(
        shard.config.kv_layout.layers_per_block,
        shard.config.num_kv_heads,
        shard.config.head_dim,
        config.block_size,
        kv_cache_dtype,
    )
    num_blocks = num_kv_blocks(
        config,
        bytes_per_block=bytes_per_block,
        weight_bytes=taken + step_bytes + _graph_bytes(config, shard.config, recorder, step_bytes),
        available=available,
        total=target.memory.total(),
    )

    def make_runner(num_blocks: int) -> ModelRunner:
        max_model_len = longest_sequence(
            config,
            model_limit=model_config.context_length,
            num_blocks=num_blocks,
            windows=model_config.kv_layout.windows,
        )
        with _where_memory_ends(
            "Not enough memory on the GPU beside weights and KV pool; lower --gpu-memory-utilization, or do "
            "without graphs (--enforce-eager)."
        ):
            return runner(loaded, num_blocks, max_model_len)

    place = f"{dtype} on {target.name}, {target.kernels.name} kernels"
    return PendingRunner(num_blocks, make_runner, place, shard.shard_adapter)


@contextlib.contextmanager
def _where_memory_ends(message: str) -> Iterator[None]:
    """
    Raises:
        ModelLoadError: the GPU's memory was not enough.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(message) from error


def _check_weights_fit(
    checkpoint: Checkpoint, weight_mode: WeightMode, itemsize: int, available: int
) -> None:
    """Refuses at once what would fail after minutes of loading."""
    from streamllm.ops.gpu.weight_layout import PACKED_FORMATS

    needed = weight_bytes(checkpoint, PACKED_FORMATS, weight_mode, dense_itemsize=itemsize)
    if needed > available:
        raise ModelLoadError(
            f"The weights need {gib(needed)} on the GPU and {gib(available)} are free: free memory there, or "
            "take a smaller model or quantised weights."
        )


def _graph_bytes(
    config: EngineConfig, model_config: ModelConfig, recorder: GraphRecorder | None, step_bytes: int
) -> int:
    """What graphs will take: they have memory of their own for the activations of the largest of them."""
    if recorder is None:
        return 0
    from streamllm.runner.graphs import LARGEST_PIECEWISE, ladder

    tokens = config.max_num_batched_tokens
    largest = min(tokens, LARGEST_PIECEWISE)
    num_whole, num_cut = len(ladder(min(config.max_num_seqs, tokens))), len(ladder(largest))
    num_layers = len(model_config.own_layers or range(model_config.num_layers))
    launches = num_whole * GRAPH_BYTES + num_cut * (num_layers + 1) * PIECE_BYTES
    if config.lora_limits is not None:
        launches *= 2  # with adapters and without
    return step_bytes * largest // tokens + launches


def _driver_version() -> str:
    version = machine.cuda_driver_version()
    return "none" if version is None else f"CUDA {version[0]}.{version[1]}"
