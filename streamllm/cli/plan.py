"""``streamllm plan``: what a model takes and what it could serve here, from its config and headers alone."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from streamllm.cli.arguments import add_settings, engine_settings
from streamllm.config import EngineConfig
from streamllm.errors import ModelLoadError
from streamllm.sources import DEFAULT_MODEL, ModelFiles, hub, pypi, resolve

if TYPE_CHECKING:
    from streamllm.engine.capacity import Capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_positional", nargs="?", metavar="MODEL", help="as --model; SmolLM2-135M-Instruct if left out"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_settings(parser, EngineConfig, "engine (as for serve)")


def run(options: argparse.Namespace) -> int:
    """Print the plan; 1 if the model does not fit.

    Raises:
        ConfigError: a flag is wrong.
        ModelLoadError: the model is not there, not supported, or must be pulled first.
    """
    config = EngineConfig(**engine_settings(options))
    name = DEFAULT_MODEL if config.model is None else config.model
    with tempfile.TemporaryDirectory(prefix="streamllm-plan-") as temporary:
        found = _capacity(config, _files(name, config.revision, Path(temporary)))
    if options.json:
        print(json.dumps({"model": name, "fits": found.problem is None, **asdict(found)}, indent=2))
    else:
        print(render(name, found))
    return 0 if found.problem is None else 1


def _files(name: str, revision: str | None, temporary: Path) -> ModelFiles:
    """The model on this machine, or of one on the hub what says how large it is."""
    is_local = name.startswith("pypi:") or Path(name).expanduser().exists()
    hub_name = None if is_local else hub.HubName.parse(name)
    if hub_name is None or hub.is_offline() or hub.cached(hub_name, revision):
        if name.startswith("pypi:"):
            pypi.WheelSource.parse(name)
        try:
            return resolve(name, revision=revision, offline=True)
        except ModelLoadError as error:
            if not name.startswith("pypi:") or revision is not None:
                raise
            raise ModelLoadError(
                f"{name} is not on this machine; fetch it with `streamllm pull {name}` and plan then."
            ) from error
    from streamllm.sources.hub_headers import fetch_headers

    return fetch_headers(hub_name, revision=revision, folder=temporary)


def _capacity(config: EngineConfig, files: ModelFiles) -> Capacity:
    from streamllm.engine.capacity import capacity
    from streamllm.models.checkpoint import open_checkpoint
    from streamllm.models.model_config import ModelConfig

    model_config = ModelConfig.from_files(files, trust_remote_code=config.trust_remote_code)
    checkpoint = open_checkpoint(files, model_config, quantization=config.quantization)
    return capacity(config, model_config, checkpoint)


def render(name: str, plan: Capacity) -> str:
    """The plan as text: names and values in two columns."""
    from streamllm.engine.memory import gib

    formats = ", ".join(f"{stored_as} {gib(size)}" for stored_as, size in plan.weight_formats.items())
    rows = [
        ("model", name),
        ("architecture", plan.architecture),
        ("parameters", f"{plan.num_parameters / 1e6:,.1f} million"),
        ("weights in the file", formats),
        *([("workers", f"{plan.num_workers}; of the fullest one:")] if plan.num_workers > 1 else []),
        ("weights in memory", gib(plan.weight_bytes)),
        *([("adapters", f"{gib(plan.adapter_bytes)} in full slots")] if plan.adapter_bytes else []),
        ("KV cache", f"{plan.kv_cache_dtype}, {gib(plan.kv_bytes_per_token)} a token"),
        ("KV block", f"{plan.block_size} tokens, {gib(plan.kv_bytes_per_block)}"),
        ("context of the model", f"{plan.context_length:,} tokens"),
        ("memory", f"{gib(plan.available)} available on {plan.place}"),
    ]
    if plan.problem is None:
        rows += [
            ("KV pool", f"{gib(plan.kv_pool_bytes)} = {plan.num_blocks:,} blocks"),
            ("longest sequence", f"{plan.max_model_len:,} tokens"),
            ("fits", "yes"),
        ]
        rows += [(f"  at {length:,} tokens", f"{count:,} sequences") for length, count in plan.sequences]
    else:
        rows.append(("fits", f"no: {plan.problem}"))
        rows += [("  would fit with", remedy) for remedy in plan.remedies]
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:{width}}  {value}" for title, value in rows)
