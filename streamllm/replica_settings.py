"""Settings of a server that is several whole engines on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.errors import ConfigError
from streamllm.settings import Settings, flag_of, setting


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(Settings):
    """How many engines serve together, and where."""

    replicas: int | None = setting(
        None,
        "Whole engines that serve together behind one port, on Ray Serve (needs the extra ray); with "
        "--max-replicas, the fewest. Default: one engine, without Ray.",
        kind="int",
        low=1,
        high=100_000,
    )
    max_replicas: int | None = setting(
        None,
        "Most replicas: Ray starts more as prompts queue up or first tokens come late, and ends them when "
        "the others can carry the load. Default: as many as --replicas, always.",
        kind="int",
        low=1,
        high=100_000,
    )
    ray_address: str | None = setting(
        None,
        "The Ray cluster to run the replicas on: HOST:PORT, or auto for the one on this machine. Default: "
        "one that lives on this machine as long as the server.",
    )
    gateways: int = setting(
        1,
        "Processes that pass requests on to the replicas, each with a memory of its own of which replica has "
        "which prompts.",
        kind="int",
        low=1,
        high=1024,
    )
    target_queued_tokens: int = setting(
        4096,
        "Prompt tokens that may wait at each replica, in the mean, before --max-replicas lets there be more.",
        kind="int",
        low=1,
        high=2**40,
    )
    target_first_token: float = setting(
        2.0,
        "Seconds that first tokens may take, in the mean, before --max-replicas lets there be more replicas.",
        kind="float",
        low=0.001,
        high=86400.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas is None:
            for name in ("max_replicas", "ray_address"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{flag_of(name)} goes with --replicas: say how many there are to be.")
        elif self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas must be at least --replicas ({self.replicas}), got {self.max_replicas}."
            )

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas != self.replicas

    @property
    def most_replicas(self) -> int:
        """How many there may be at once; 1 without ``--replicas``."""
        return self.max_replicas or self.replicas or 1
