"""Beam search in streamllm against ``transformers.generate(num_beams=...)``, and the memory that beams share.

    python loadtest/beam_search.py [--json FILE]

Both search the same prompts with the same weights in float32, on the same number of threads, for exactly
``--output-len`` tokens (end-of-sequence tokens end no beam). Transformers takes one prompt at a time, its
beams as a batch; streamllm gets all prompts at once. They take turns; each round has fresh prompts, so that
nothing can be answered from a prefix cache. While streamllm searches, its block tables are looked at again
and again: 1 - blocks / entries of block tables is the share of the memory of separate beams that is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_transformers import load_transformers
from tqdm import tqdm

from streamllm.bench.prompts import make_prompts

if TYPE_CHECKING:
    from streamllm import LLM, BeamSearchParams
    from streamllm.engine.stats import MemoryFigures

SAMPLING_INTERVAL = 0.02
"""Seconds between two looks at the memory."""

TOLERANCE = 1e-4
"""Scores closer than this count as equal: float32 sums in another order differ by so much."""

Hypothesis = tuple[list[int], float]
"""The generated ids of a prompt's best hypothesis, and its score."""


def search_transformers(
    model: Any, prompts: Sequence[list[int]], params: BeamSearchParams
) -> list[Hypothesis]:
    """The best hypothesis of each prompt, one prompt after the other."""
    import torch
    from transformers import GenerationConfig

    # On the model, not as an argument: generate() would fill its unset eos_token_id from the model's own.
    model.generation_config = GenerationConfig(
        num_beams=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = []
    for prompt in tqdm(prompts, desc="transformers", disable=None):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            result = model.generate(ids, attention_mask=torch.ones_like(ids))
        best.append((result.sequences[0, len(prompt) :].tolist(), float(result.sequences_scores[0])))
    return best


def search_streamllm(llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams) -> list[Hypothesis]:
    """The best hypothesis of each prompt, all prompts at once."""
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    best = [output.sequences[0] for output in outputs]
    return [(s.tokens[len(prompt) :], s.score) for s, prompt in zip(best, prompts, strict=True)]


@contextlib.contextmanager
def watch_memory(llm: LLM, figures: list[MemoryFigures]) -> Iterator[None]:
    """Collects the memory's figures from another thread, as long as there is something in it."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(SAMPLING_INTERVAL):
            memory = llm.stats().memory
            if memory.used_blocks:
                figures.append(memory)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def summarise(figures: Sequence[MemoryFigures]) -> dict[str, float]:
    """What the beams shared and wasted, over all looks at the memory."""
    if not figures:
        raise RuntimeError("The searches ended before the memory was looked at; ask for more tokens.")
    used = sum(memory.used_blocks for memory in figures)
    return {
        "looks": len(figures),
        "share_saved": 1 - used / sum(memory.logical_blocks for memory in figures),
        "waste": 1 - sum(memory.used_slots for memory in figures) / sum(m.allocated_slots for m in figures),
        "most_blocks": max(memory.used_blocks for memory in figures),
        "most_blocks_unshared": max(memory.logical_blocks for memory in figures),
    }


def compare(left: Sequence[Hypothesis], right: Sequence[Hypothesis]) -> dict[str, Any]:
    """How far the best hypotheses of two runs agree."""
    differences = [abs(a - b) for (_, a), (_, b) in zip(left, right, strict=True)]
    return {
        "of": len(differences),
        "same_tokens": sum(a == b for (a, _), (b, _) in zip(left, right, strict=True)),
        "same_score": sum(difference <= TOLERANCE for difference in differences),
        "largest_score_difference": max(differences),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load everything, run the rounds and return all numbers, ready for JSON."""
    import torch
    import transformers

    from streamllm import LLM, BeamSearchParams
    from streamllm.sources.resolve import resolve

    torch.set_num_threads(args.threads)
    llm = LLM(model=args.model, dtype="float32", threads=args.threads)
    files = resolve(args.model)
    reference = load_transformers(files)
    encode = llm.get_tokenizer().encode
    params = BeamSearchParams(
        beam_width=args.width,
        max_tokens=args.output_len,
        length_penalty=args.length_penalty,
        ignore_eos=True,
    )
    figures: list[MemoryFigures] = []

    def run_streamllm(prompts: Sequence[list[int]]) -> list[Hypothesis]:
        with watch_memory(llm, figures):
            return search_streamllm(llm, prompts, params)

    contenders = {
        "transformers": lambda prompts: search_transformers(reference, prompts, params),
        "streamllm": run_streamllm,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    theirs: list[Hypothesis] = []
    ours: list[Hypothesis] = []
    # Round 0 warms up, with one prompt.
    for round_number in range(args.rounds + 1):
        texts = make_prompts(args.prompts, args.input_len, args.seed * 1000 + round_number)
        prompts = [encode(text) for text in texts[: args.prompts if round_number else 1]]
        best = {}
        for name, run in contenders.items():
            start = time.perf_counter()
            best[name] = run(prompts)
            if round_number:
                seconds[name].append(time.perf_counter() - start)
        if round_number:
            theirs += best["transformers"]
            ours += best["streamllm"]
        else:
            figures.clear()
    llm.shutdown()

    tokens = args.prompts * args.output_len
    rates = {name: [tokens / duration for duration in durations] for name, durations in seconds.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "model": files.served_name,
        "arguments": {key: value for key, value in vars(args).items() if key != "json"},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "output_tokens_per_round": tokens,
        "seconds": seconds,
        "output_tokens_per_second": rates,
        "median_output_tokens_per_second": medians,
        "ratio": medians["streamllm"] / medians["transformers"],
        "agreement": compare(theirs, ours),
        "memory": summarise(figures),
    }


def render(result: dict[str, Any]) -> str:
    """The table on the terminal."""
    arguments, memory, agreement = result["arguments"], result["memory"], result["agreement"]
    lines = [
        f"{result['model']}, float32, {arguments['threads']} threads, beam width {arguments['width']}, "
        f"{arguments['prompts']} prompts of about {arguments['input_len']} tokens,",
        f"{arguments['output_len']} tokens each (transformers {result['versions']['transformers']})",
        "",
        f"{'':<16}{'output tokens/s':>16}   rounds",
    ]
    for name, rates in result["output_tokens_per_second"].items():
        rounds = " ".join(f"{rate:.1f}" for rate in rates)
        lines.append(f"{name:<16}{result['median_output_tokens_per_second'][name]:>16.1f}   {rounds}")
    lines += [
        "",
        f"streamllm is {result['ratio']:.2f} times as fast.",
        f"{agreement['same_tokens']} of {agreement['of']} best sequences are the same, "
        f"{agreement['same_score']} scores within {TOLERANCE:g} "
        f"(largest difference {agreement['largest_score_difference']:.1e}).",
        f"Sharing saved {100 * memory['share_saved']:.1f} % of the KV memory of separate beams: "
        f"at most {memory['most_blocks']} blocks instead of {memory['most_blocks_unshared']}.",
    ]
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/beam_search.py",
        description="Beam search in streamllm against transformers.generate.",
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add = parser.add_argument
    add("--model", help="folder or .gguf file, as for streamllm serve (default: the default model)")
    add("--width", type=int, default=4, help="beams of a prompt (default: %(default)s)")
    add("--prompts", type=int, default=8, help="prompts a round (default: %(default)s)")
    add("--input-len", type=int, default=64, help="words in a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens of a hypothesis (default: %(default)s)")
    add("--length-penalty", type=float, default=1.0, help="as in both (default: %(default)s)")
    add("--rounds", type=int, default=2, help="turns of each; medians are reported (default: %(default)s)")
    add("--threads", type=int, default=cores, help="threads of both (default: the cores, here %(default)s)")
    add("--seed", type=int, default=0, help="draws prompts (default: %(default)s)")
    add("--require", type=float, metavar="RATIO", help="exit with 1 if streamllm is not RATIO times as fast")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    args = parser.parse_args(argv)
    for name in ("width", "prompts", "input_len", "output_len", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from streamllm.errors import StreamLLMError

    try:
        result = measure(args)
    except (StreamLLMError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    agreement = result["agreement"]
    if agreement["same_score"] < agreement["of"]:
        print("The scores differ.")
        return 1
    if args.require is not None and result["ratio"] < args.require:
        print(f"streamllm is {result['ratio']:.2f} times as fast, not {args.require:g}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
