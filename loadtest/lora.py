"""What LoRA adapters cost: the decode step of a full batch in which the sequences have adapters, against the
step of a model without room for any.

The adapters are random, of one rank, and change every matrix of the model's layers; each has an equal share
of the batch. Batches take turns step by step, so that noise of the machine meets all of them.

    python loadtest/lora.py [--batch 32] [--rank 16] [--adapters 1 8] [--threads 2] [--check] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from sampling import BLOCK, DecodingBatch, Kind

from streamllm.engine.token_rules import TokenRuleMaker
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.lora_targets import adaptable_matrices
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import NO_ADAPTER, LoraAdapter, LoraLimits, LoraUpdate
from streamllm.runner.messages import LoraLoad, ScheduledBatch
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources import resolve
from streamllm.sources.model_files import ModelFiles
from streamllm.text.tokenizer import Tokenizer

GREEDY = Kind("greedy", None, {"temperature": 0.0})
LEAST_THROUGHPUT, LARGEST_IDLE_STEP = 0.7, 1.02
"""Goals: throughput with adapters against the model alone, and a step of sequences without adapters."""


def random_adapter(config: ModelConfig, rank: int, seed: int) -> LoraAdapter:
    """An adapter of every adaptable layer, small enough to leave the model a model."""
    rng = np.random.default_rng(seed)

    def update(first_row: int, rows: int, columns: int) -> LoraUpdate:
        a = (0.01 * rng.standard_normal((rank, columns))).astype(np.float32)
        return LoraUpdate(first_row, a, (0.01 * rng.standard_normal((rows, rank))).astype(np.float32))

    updates = {}
    for matrix in adaptable_matrices(config):
        first_rows = np.cumsum([0, *(rows for _, rows in matrix.parts)]).tolist()
        updates[matrix.name] = tuple(
            update(first_row, rows, matrix.columns)
            for first_row, (_, rows) in zip(first_rows, matrix.parts, strict=False)
        )
    return LoraAdapter(f"random-{seed}", bytes([seed]), rank, updates)


def make_runner(
    options: argparse.Namespace, files: ModelFiles, num_batches: int, lora: LoraLimits | None
) -> ModelRunner:
    config = ModelConfig.from_files(files)
    length = options.prompt + options.steps + 1
    return ModelRunner(
        config,
        open_checkpoint(files, config),
        block_size=BLOCK,
        num_blocks=num_batches * options.batch * -(-length // BLOCK),
        max_num_batched_tokens=max(256, options.batch, options.prompt),
        max_num_seqs=num_batches * options.batch,
        kv_cache_dtype="float32" if options.exact else "float16",
        max_model_len=length,
        threads=options.threads,
        weight_mode="float32" if options.exact else "packed",
        lora=lora,
    )


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Median step of each batch, and the median over rounds of its ratio to that of the model alone."""
    files = resolve(options.model)
    config = ModelConfig.from_files(files)
    tokenizer = Tokenizer.from_gguf(files.path) if files.kind == "gguf" else Tokenizer.from_folder(files.path)
    maker = TokenRuleMaker(tokenizer, config.vocab_size, tokenizer.eos_token_ids)
    num_adapters = max(options.adapters)
    plain = make_runner(options, files, 1, None)
    roomy = make_runner(
        options, files, 1 + len(options.adapters), LoraLimits(num_adapters, max(options.rank, 16))
    )
    adapters = [random_adapter(config, options.rank, seed) for seed in range(num_adapters)]
    roomy.step(ScheduledBatch(0, lora_loads=[LoraLoad(slot, each) for slot, each in enumerate(adapters)]))
    prompts = np.random.default_rng(1).integers(1000, config.vocab_size, (options.batch, options.prompt))
    blocks = iter(range(roomy.num_blocks))
    alone = DecodingBatch(plain, GREEDY, maker, prompts, 0, iter(range(plain.num_blocks)))
    batches = {"the model alone": alone}
    for index, count in enumerate([0, *options.adapters]):
        name = f"{count} adapters" if count else "room for adapters, none in use"
        slots = [row % count if count else NO_ADAPTER for row in range(options.batch)]
        first = index * options.batch
        batches[name] = DecodingBatch(roomy, GREEDY, maker, prompts, first, blocks, slots)
    turns = list(batches.values())
    for number in range(options.steps):
        for index in range(len(turns)):
            turns[(index + number) % len(turns)].step()
    plain.close()
    roomy.close()
    return [
        {
            "batch": name,
            "step_ms": 1e3 * statistics.median(batch.seconds),
            "ratio": statistics.median(a / b for a, b in zip(batch.seconds, alone.seconds, strict=True)),
        }
        for name, batch in batches.items()
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="as of streamllm serve; the default model if left out")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8], help="different ones in a batch")
    parser.add_argument("--exact", action="store_true", help="float32 instead of packed weights")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=60, help="steps of each batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    rows = measure(options)
    print(f"batch {options.batch}, rank {options.rank}, {options.threads} threads")
    missed = False
    for index, row in enumerate(rows):
        limit = LARGEST_IDLE_STEP if index < 2 else 1 / LEAST_THROUGHPUT
        missed |= row["ratio"] > limit
        goal = f"   (goal {limit:.2f})" if index else ""
        print(f"  {row['batch']:32}{row['step_ms']:8.2f} ms   x {row['ratio']:.3f}{goal}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    if options.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
