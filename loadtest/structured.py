"""What structured output costs: the decode step of a batch in which every row follows a grammar, against the
same batch without.

As in ``sampling.py`` the batches take turns step by step, and a step is everything but the scheduler. Masks
are filled while the forward runs, as in the engine, and the sampled tokens are taken in by the grammars; a
row whose text is complete begins a new one. Of the larger vocabulary the further tokens are pairs of known
ones.

    python loadtest/structured.py [--batch 32] [--vocabularies 49152 151936] [--threads 2] [--check]
                                  [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

import numpy as np
from sampling import DecodingBatch, Kind, make_runner, parse_options

from streamllm.engine.grammar_compile import CompiledGrammar
from streamllm.engine.structured import GrammarCompiler, GrammarMasks, GrammarState
from streamllm.engine.token_rules import TokenRuleMaker
from streamllm.sampling_params import SamplingParams
from streamllm.sources import resolve
from streamllm.structured_outputs import StructuredOutputsParams
from streamllm.text.tokenizer import Tokenizer

GOAL = 1.15
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Köln", "Łódź", "東京"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age", "city", "tags", "parent"],
    "additionalProperties": False,
}


def optional_fields(count: int, **more: object) -> dict[str, object]:
    properties = {f"field_{i}": {"type": ["string", "integer", "null"]} for i in range(count)}
    return {"type": "object", "properties": properties, **more}


CONSTRAINTS = {
    "JSON schema": {"json": RECORD},
    "JSON schema, 50 optional fields": {"json": optional_fields(50, additionalProperties=False)},
    "any JSON object": {"json_object": True},
    "a choice of 1,000": {"choice": [f"category number {i}" for i in range(1000)]},
    "grammar": {"grammar": 'start: e\ne: e "+" t | t\nt: t "*" f | f\nf: "(" e ")" | /[0-9]+/ | /[a-z]+/'},
}
EXTREMES = {
    "JSON schema, 300 optional fields and any other": {"json": optional_fields(300)},
    "regex that counts letters": {"regex": r"([A-Z]?[a-zé]{1,12}[ ,.])*"},
}
"""Without a goal: each of their masks looks at much of the vocabulary anew."""


class PairedVocabulary:
    """A tokenizer with more tokens: pairs of its own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        pick = random.Random(0)
        ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]
        self._pairs = [pick.choices(ids, k=2) for _ in range(tokenizer.vocab_size, vocab_size)]

    def token_bytes(self, token_id: int) -> bytes:
        known = self._tokenizer.vocab_size
        if token_id < known:
            return self._tokenizer.token_bytes(token_id)
        return b"".join(map(self._tokenizer.token_bytes, self._pairs[token_id - known]))

    def is_special(self, token_id: int) -> bool:
        return token_id < self._tokenizer.vocab_size and self._tokenizer.is_special(token_id)


class ConstrainedRow:
    """What the masks need to know of a sequence."""

    request = None
    finished = False

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = GrammarState(grammar)


class ConstrainedBatch(DecodingBatch):
    """A batch whose rows all follow ``grammar``."""

    def __init__(
        self, grammar: CompiledGrammar, eos_ids: frozenset[int], vocab_size: int, *arguments
    ) -> None:
        super().__init__(*arguments)
        self.fill_seconds: list[float] = []
        self._compiled = grammar
        self._eos_ids = eos_ids
        self._rows = [ConstrainedRow(grammar) for _ in self._slots]
        self._masks = GrammarMasks(len(self._rows), vocab_size)

    def run(self, batch):
        runner = self._runner
        runner.start(batch)
        began = time.perf_counter()
        masks = self._masks.fill(self._rows, _fail)
        self.fill_seconds.append(time.perf_counter() - began)
        runner.wait()
        output = runner.finish(masks)
        for row, (token_id,) in zip(self._rows, output.token_ids, strict=True):
            if token_id in self._eos_ids or row.grammar.accept(token_id):
                row.grammar = GrammarState(self._compiled)
        return output


def _fail(request: object, error: str) -> None:
    raise RuntimeError(error)


async def compile_all(compiler: GrammarCompiler) -> dict[str, CompiledGrammar]:
    grammars = {}
    for name, constraint in (CONSTRAINTS | EXTREMES).items():
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
        grammars[name] = await compiler.compile(params)
    compiler.close()
    return grammars


def measure(options: argparse.Namespace, vocab_size: int) -> list[dict[str, object]]:
    """Median step of each constraint, its ratio to the free step, and what filling a mask took."""
    files = resolve(options.model)
    tokenizer = Tokenizer.from_gguf(files.path) if files.kind == "gguf" else Tokenizer.from_folder(files.path)
    runner = make_runner(options, files, vocab_size, 1 + len(CONSTRAINTS | EXTREMES))
    eos_ids = frozenset(tokenizer.eos_token_ids)
    compiler = GrammarCompiler(PairedVocabulary(tokenizer, vocab_size), eos_ids, vocab_size)
    grammars = asyncio.run(compile_all(compiler))
    maker = TokenRuleMaker(tokenizer, vocab_size, tokenizer.eos_token_ids)
    kind = Kind("", GOAL, {"temperature": 0.8})
    prompts = np.random.default_rng(1).integers(1000, tokenizer.vocab_size, (options.batch, options.prompt))
    blocks = iter(range(runner.num_blocks))
    free = DecodingBatch(runner, kind, maker, prompts, 0, blocks)
    batches = [
        ConstrainedBatch(
            grammar, eos_ids, vocab_size, runner, kind, maker, prompts, index * options.batch, blocks
        )
        for index, grammar in enumerate(grammars.values(), start=1)
    ]
    turns = [free, *batches]
    for number in range(options.steps):
        for index in range(len(turns)):
            turns[(index + number) % len(turns)].step()
    runner.close()
    results = [{"kind": "no constraint", "step_ms": 1e3 * statistics.median(free.seconds), "ratio": 1.0}]
    for name, batch in zip(grammars, batches, strict=True):
        masks = sorted(1e6 * seconds / options.batch for seconds in batch.fill_seconds)
        results.append(
            {
                "kind": name,
                "step_ms": 1e3 * statistics.median(batch.seconds),
                "ratio": statistics.median(a / b for a, b in zip(batch.seconds, free.seconds, strict=True)),
                "mask_us": statistics.median(masks),
                "mask_us_p95": masks[int(0.95 * len(masks))],
            }
        )
    return results


def main() -> None:
    options = parse_options(__doc__, check=f"exit with 1 where a step takes over {GOAL}x")
    results = {}
    for vocab_size in options.vocabularies:
        rows = results[vocab_size] = measure(options, vocab_size)
        print(f"batch {options.batch}, vocabulary {vocab_size}, {options.threads} threads (goal x {GOAL})")
        for row in rows:
            masks = ""
            if "mask_us" in row:
                masks = f"   a mask {row['mask_us']:.0f} µs, 95th percentile {row['mask_us_p95']:.0f}"
            print(f"  {row['kind']:48}{row['step_ms']:8.2f} ms   x {row['ratio']:.3f}{masks}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    missed = [row for rows in results.values() for row in rows if row["ratio"] > GOAL]
    if options.check and any(row["kind"] not in EXTREMES for row in missed):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
