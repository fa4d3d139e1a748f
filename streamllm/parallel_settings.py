"""Settings of an engine whose model is spread over several processes."""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.errors import ConfigError
from streamllm.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """How many workers run the model, and who starts them."""

    tensor_parallel_size: int = setting(
        1,
        "Workers among which every layer's weights and KV heads are divided, each a process with a GPU or a "
        "share of the cores of its own. Above 1 it needs the extra gpu, whose torch they speak through.",
        kind="int",
        low=1,
        high=1024,
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages, each of as many workers as --tensor-parallel-size says, which have some of the layers each: "
        "for workers joined by slow links. A step flows through them in as many parts.",
        kind="int",
        low=1,
        high=1024,
    )
    distributed_executor_backend: str | None = setting(
        None,
        "Who starts the workers: mp (this machine), or ray (the cluster of $RAY_ADDRESS; needs the extra "
        "ray). Default: mp where there are several; one model in one process (uni) has none.",
        choices=("mp", "ray", "uni"),
    )
    worker_timeout: float = setting(
        30.0,
        "Seconds that a worker may give no sign of life before the engine counts as dead.",
        kind="float",
        low=1.0,
        high=86400.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ConfigError(
                f"--distributed-executor-backend uni runs one process, and {self.world_flags} needs "
                f"{self.world_size}; use mp or ray."
            )

    @property
    def world_size(self) -> int:
        """Workers in all: rank ``stage * tensor_parallel_size + rank within the stage``."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_flags(self) -> str:
        """The flags that ask for so many workers, for messages."""
        tensor = f"--tensor-parallel-size {self.tensor_parallel_size}"
        pipeline = f"--pipeline-parallel-size {self.pipeline_parallel_size}"
        if self.pipeline_parallel_size == 1:
            return tensor
        return pipeline if self.tensor_parallel_size == 1 else f"{tensor} with {pipeline}"

    @property
    def launcher(self) -> str | None:
        """``"mp"`` or ``"ray"``; ``None`` where the model runs in the engine's own process."""
        backend = self.distributed_executor_backend
        if backend is None:
            return "mp" if self.world_size > 1 else None
        return None if backend == "uni" else backend
