"""How far weights as the file holds them move a model's predictions.

    python loadtest/accuracy.py [--model M] [--floats FOLDER] [--llama-cpp]

runs the first 4,000 tokens of data/accuracy.txt through the float32 model (weights dequantised, float32
activations and KV cache), through the same file packed, and, if that holds floats, through what
``--quantization`` makes of it. It prints the mean Kullback-Leibler divergence of the next-token
distributions, the share of positions whose likeliest token is the same, and the perplexities.

With ``--floats`` a GGUF's dequantised weights are written to a folder as safetensors (by Transformers, on
first use), and ``--quantization`` is measured on those. With ``--llama-cpp`` llama.cpp (the package
llama-cpp-python) reads the same file and tokens, as a peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from streamllm import _native
from streamllm.models.checkpoint import Quantization, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.runner.messages import NewSequence, OutputRow, ScheduledBatch, ScheduledRow
from streamllm.runner.model_runner import ModelRunner
from streamllm.sampling_params import SamplingParams
from streamllm.sources import resolve
from streamllm.sources.model_files import ModelFiles
from streamllm.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("data") / "accuracy.txt"
BLOCK_SIZE = 16


@dataclass
class Comparison:
    """One variant against the float32 model, over all positions.

    Attributes:
        divergence: sum of KL(float32 || variant), in nats.
        same_choice: positions with the same likeliest token.
        surprise: sum of -log p of the tokens that follow.
    """

    divergence: float = 0.0
    same_choice: int = 0
    surprise: float = 0.0
    num_positions: int = 0
    num_predictions: int = 0

    def add(self, exact: np.ndarray, logprobs: np.ndarray, following: np.ndarray) -> None:
        """Rows of log-probabilities of both, float64 [rows, vocab], and the tokens that follow (-1: end)."""
        self.divergence += float((np.exp(exact) * (exact - logprobs)).sum())
        self.same_choice += int((exact.argmax(-1) == logprobs.argmax(-1)).sum())
        known = following >= 0
        self.surprise -= float(logprobs[known, following[known]].sum())
        self.num_positions += len(exact)
        self.num_predictions += int(known.sum())

    def line(self, name: str) -> str:
        kl = self.divergence / self.num_positions
        agreement = self.same_choice / self.num_positions
        perplexity = np.exp(self.surprise / self.num_predictions)
        return f"{name:32} {kl:12.3e} {agreement:10.2%} {perplexity:12.4f}"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def windows_of(token_ids: list[int], length: int, beginning: list[int]) -> np.ndarray:
    """Equal windows of about ``length`` tokens, each read from an empty context, behind the tokens with which
    the model's texts begin: int32 [windows, tokens]."""
    count = max(round(len(token_ids) / length), 1)
    rows = np.array(token_ids[: len(token_ids) // count * count], np.int32).reshape(count, -1)
    return np.concatenate([np.tile(np.array(beginning, np.int32), (count, 1)), rows], axis=1)


def write_floats(files: ModelFiles, folder: Path) -> ModelFiles:
    """The dequantised weights of a GGUF file in a folder, which is made unless it is there."""
    if not (folder / "config.json").is_file():
        from compare_transformers import load_transformers
        from transformers import AutoTokenizer

        load_transformers(files).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
        tokenizer.save_pretrained(folder)
    return resolve(str(folder))


def following_tokens(windows: np.ndarray, position: int) -> np.ndarray:
    last = position + 1 == windows.shape[1]
    return np.full(len(windows), -1) if last else windows[:, position + 1]


def runner_logits(
    files: ModelFiles,
    windows: np.ndarray,
    *,
    weight_mode: str,
    kv_cache_dtype: str,
    quantization: Quantization | None,
    threads: int,
) -> Iterator[np.ndarray]:
    """Logits of all windows, one position after the other: float32 [windows, vocab]."""
    config = ModelConfig.from_files(files)
    num_windows, length = windows.shape
    num_groups, blocks_each = config.kv_layout.num_groups, -(-length // BLOCK_SIZE)
    runner = ModelRunner(
        config,
        open_checkpoint(files, config, quantization=quantization),
        block_size=BLOCK_SIZE,
        num_blocks=num_windows * num_groups * blocks_each,
        max_num_batched_tokens=num_windows,
        max_num_seqs=num_windows,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=length,
        threads=threads,
        weight_mode=weight_mode,
    )
    blocks = np.arange(runner.num_blocks).reshape(num_windows, num_groups, blocks_each).tolist()
    greedy = SamplingParams(temperature=0.0)
    for position in range(length):
        batch = ScheduledBatch(position)
        if position == 0:
            batch.new_sequences = [
                NewSequence(
                    slot=slot,
                    sequence_id=slot,
                    token_ids=window.tolist(),
                    num_computed_tokens=0,
                    block_ids=blocks[slot],
                    params=greedy,
                    num_logprobs=None,
                    seed=0,
                    choice_index=0,
                    num_prompt_tokens=length,
                )
                for slot, window in enumerate(windows)
            ]
        batch.rows = [ScheduledRow(slot, position, 1, [], []) for slot in range(num_windows)]
        batch.output_rows = [OutputRow(row, row) for row in range(num_windows)]
        runner.step(batch)
        yield runner.logits()
    runner.close()


def llama_cpp_logits(files: ModelFiles, windows: np.ndarray, *, threads: int) -> Iterator[np.ndarray]:
    """The same from llama.cpp with its defaults, each window in one batch."""
    from llama_cpp import Llama

    num_windows, length = windows.shape
    model = Llama(
        str(files.path), n_ctx=length, n_batch=length, logits_all=True, n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    scores = np.empty((num_windows, length, model.n_vocab()), np.float32)
    for window, target in zip(windows, scores, strict=True):
        model.reset()
        model.eval(window.tolist())
        target[:] = model.scores[:length]
    for position in range(length):
        yield scores[:, position]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="as `streamllm serve` takes it; default: the default model")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--window", type=int, default=500, help="tokens that are read as one context")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--floats", type=Path, metavar="FOLDER", help="measure --quantization on floats, too")
    parser.add_argument("--llama-cpp", action="store_true", help="measure llama.cpp too")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="of the table's lines, besides float32")
    arguments = parser.parse_args()

    files, threads = resolve(arguments.model), arguments.threads
    tokenizer = Tokenizer.from_gguf if files.kind == "gguf" else Tokenizer.from_folder
    text = arguments.text.read_text(encoding="utf-8")
    token_ids = tokenizer(files.path).encode(text, add_special_tokens=False)[: arguments.tokens]
    windows = windows_of(token_ids, arguments.window, tokenizer(files.path).encode(""))

    def variant(
        weight_mode: str,
        kv_cache_dtype: str,
        quantization: Quantization | None = None,
        files: ModelFiles = files,
    ) -> Iterator[np.ndarray]:
        return runner_logits(
            files,
            windows,
            weight_mode=weight_mode,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            threads=threads,
        )

    variants = {
        "float32": variant("float32", "float32"),
        "float32, float16 KV": variant("float32", "float16"),
        "float32, int8 KV": variant("float32", "int8"),
        "packed, float32 KV": variant("packed", "float32"),
        "packed, float16 KV": variant("packed", "float16"),
        "packed, int8 KV": variant("packed", "int8"),
    }
    floats = files if arguments.floats is None else write_floats(files, arguments.floats)
    if floats.kind == "folder":
        for quantization in get_args(Quantization):
            name = f"--quantization {quantization}, float16 KV"
            variants[name] = variant("packed", "float16", quantization, floats)
    if arguments.llama_cpp:
        variants["llama.cpp"] = llama_cpp_logits(files, windows, threads=threads)
    if arguments.only is not None:
        variants = {name: variants[name] for name in ("float32", *arguments.only)}
    results = {name: Comparison() for name in variants}
    for position in range(windows.shape[1]):
        logprobs = {name: log_softmax(next(logits)) for name, logits in variants.items()}
        following = following_tokens(windows, position)
        for name, result in results.items():
            result.add(logprobs["float32"], logprobs[name], following)

    count, length = windows.shape
    print(f"{files.name}, {count * length} tokens in windows of {length}, {_native.instruction_set()}")
    print(f"{'':32} {'KL, nats':>12} {'same top 1':>10} {'perplexity':>12}")
    for name, result in results.items():
        print(result.line(name))


if __name__ == "__main__":
    main()
