"""The workloads of ``streamllm bench``: what is asked, under vLLM's flag names.

Prompts are words, not token ids, so that a server can be measured whose tokenizer nobody here knows;
:class:`~streamllm.bench.prompts.TokensPerWord` says how many words make a wanted number of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamllm.bench.arguments import count, positive_count, share
from streamllm.bench.prompts import WORDS, Request, TokensPerWord, prompts_of_lengths, uniform_lengths
from streamllm.errors import ConfigError

CUSTOM_OUTPUT_LEN = 256
"""Tokens to generate where a custom data set's line does not say."""

CHARACTERS_PER_TOKEN = 4
"""Of English in the usual vocabularies: how the lengths of a ShareGPT file's texts are estimated."""

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Which conversations of a ShareGPT file are taken, as vLLM's benchmark does: neither part shorter than this,
and neither the prompt nor both together longer."""


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`make_requests` reads."""
    # fmt: off
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=tuple(_DATASETS), default="random",
        help="random: words of given lengths; sharegpt: its conversations' lengths, or a file's "
        "conversations; prefix_repetition: few prefixes, many endings; custom: a file of prompts. "
        "Default: %(default)s.")
    add("--dataset-path", metavar="FILE",
        help='sharegpt: its JSON file; custom: lines {"prompt": "...", "output_tokens": 100}')
    add("--num-prompts", type=positive_count, default=1000, metavar="N",
        help="requests to send. Default: %(default)s.")
    add("--seed", type=int, default=0, metavar="N",
        help="draws prompts, lengths and arrivals; change it between runs, or a prefix cache answers. "
        "Default: %(default)s.")
    add("--input-len", type=positive_count, metavar="N", help="as --random-input-len")
    add("--output-len", type=positive_count, metavar="N", help="as the data set's own output length")
    add("--no-oversample", action="store_true",
        help="send a file's prompts once each, even if they are fewer than --num-prompts")
    add("--disable-shuffle", action="store_true", help="keep the data set's order")
    _add_lengths(parser)
    # fmt: on


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    add = parser.add_argument_group("random").add_argument
    add("--random-input-len", type=positive_count, default=1024, metavar="N",
        help="prompt tokens, the common prefix not counted. Default: %(default)s.")
    add("--random-output-len", type=positive_count, default=128, metavar="N",
        help="tokens to generate. Default: %(default)s.")
    add("--random-range-ratio", type=share, default=0.0, metavar="R",
        help="draw both lengths uniformly from LEN * (1 - R) to LEN * (1 + R). Default: 0.")
    add("--random-prefix-len", type=count, default=0, metavar="N",
        help="tokens in front that all prompts share. Default: 0.")

    add = parser.add_argument_group("sharegpt and custom").add_argument
    add("--sharegpt-output-len", type=positive_count, metavar="N",
        help="tokens to generate, in place of the data set's")
    add("--custom-output-len", type=_custom_output_len, metavar="N",
        help="tokens to generate; -1, the default: each line's output_tokens, "
        f"{CUSTOM_OUTPUT_LEN} where it has none")

    add = parser.add_argument_group("prefix_repetition").add_argument
    add("--prefix-repetition-prefix-len", type=count, default=256, metavar="N",
        help="prompt tokens that come again. Default: %(default)s.")
    add("--prefix-repetition-suffix-len", type=positive_count, default=256, metavar="N",
        help="prompt tokens of each request's own. Default: %(default)s.")
    add("--prefix-repetition-num-prefixes", type=positive_count, default=10, metavar="N",
        help="different prefixes, each for as many requests. Default: %(default)s.")
    add("--prefix-repetition-output-len", type=positive_count, default=128, metavar="N",
        help="tokens to generate. Default: %(default)s.")
    # fmt: on


def _custom_output_len(text: str) -> int | None:
    return None if text == "-1" else positive_count(text)


def check_dataset(options: argparse.Namespace) -> None:
    """Look whether the flags fit together, and whether a file is needed.

    Raises:
        ConfigError: they do not.
    """
    name = options.dataset_name
    if options.input_len is not None and name != "random":
        own = "--prefix-repetition-prefix-len and --prefix-repetition-suffix-len decide"
        whose = own if name == "prefix_repetition" else "the data set's prompts have their lengths"
        raise ConfigError(f"--input-len is for --dataset-name random; with {name} {whose}.")
    if options.dataset_path is not None and name in ("random", "prefix_repetition"):
        raise ConfigError(f"--dataset-path is for sharegpt and custom; --dataset-name {name} reads no file.")
    if options.dataset_path is None and name == "custom":
        raise ConfigError("--dataset-name custom needs --dataset-path FILE.")


def input_length(options: argparse.Namespace) -> int:
    """Tokens of a typical prompt: about this long a probe should be that measures
    :class:`~streamllm.bench.prompts.TokensPerWord`."""
    if options.dataset_name == "random":
        return options.random_prefix_len + (options.input_len or options.random_input_len)
    if options.dataset_name == "prefix_repetition":
        return options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len
    return 128


def make_requests(
    options: argparse.Namespace, tokens_per_word: TokensPerWord, *, seed: int | None = None
) -> list[Request]:
    """The data set's requests, in the order of sending.

    Args:
        options: the parsed flags of :func:`add_dataset_arguments`.
        tokens_per_word: how the measured server or engine counts.
        seed: in place of ``--seed``.

    Raises:
        ConfigError: flags do not fit together, or the file cannot be read, has a broken line (which is named)
            or nothing to send.
    """
    check_dataset(options)
    return _DATASETS[options.dataset_name](options, tokens_per_word, options.seed if seed is None else seed)


def _random(options: argparse.Namespace, tokens_per_word: TokensPerWord, seed: int) -> list[Request]:
    ratio = options.random_range_ratio

    def lengths(mean: int, what: str) -> list[int]:
        low, high = max(math.floor(mean * (1 - ratio)), 1), math.ceil(mean * (1 + ratio))
        return uniform_lengths(options.num_prompts, low, high, seed, what)

    prompt_tokens = lengths(options.input_len or options.random_input_len, "input")
    prefix_len = options.random_prefix_len
    prefix = _random_words(round(prefix_len / tokens_per_word.slope), f"random prefix {seed}")
    num_words = [
        max(tokens_per_word.words_for(prefix_len + length) - len(prefix), 1) for length in prompt_tokens
    ]
    prompts = [" ".join([*prefix, prompt]) for prompt in prompts_of_lengths(num_words, seed)]
    return _requests(prompts, lengths(options.output_len or options.random_output_len, "output"))


def _prefix_repetition(
    options: argparse.Namespace, tokens_per_word: TokensPerWord, seed: int
) -> list[Request]:
    prefix_len, num_prefixes = options.prefix_repetition_prefix_len, options.prefix_repetition_num_prefixes
    prefixes = prompts_of_lengths([round(prefix_len / tokens_per_word.slope)] * num_prefixes, seed)
    total = tokens_per_word.words_for(prefix_len + options.prefix_repetition_suffix_len)
    num_own = max(total - len(prefixes[0].split()), 1)
    endings = prompts_of_lengths([num_own] * options.num_prompts, f"endings {seed}")
    prompts = [
        f"{prefix} {ending}".strip()
        for prefix, ending in zip(itertools.cycle(prefixes), endings, strict=False)
    ]
    _shuffle(prompts, options, seed)
    output_len = options.output_len or options.prefix_repetition_output_len
    return _requests(prompts, [output_len] * len(prompts))


def _sharegpt(options: argparse.Namespace, tokens_per_word: TokensPerWord, seed: int) -> list[Request]:
    output_len = options.output_len or options.sharegpt_output_len
    if options.dataset_path is not None:
        return _from_file(options, seed, list(_conversations(Path(options.dataset_path), output_len)))
    from streamllm.bench.traces import SHAREGPT

    lengths = SHAREGPT.sample(options.num_prompts, seed)
    prompts = prompts_of_lengths([tokens_per_word.words_for(each.prompt) for each in lengths], seed)
    return _requests(prompts, [output_len or each.output for each in lengths])


def _custom(options: argparse.Namespace, tokens_per_word: TokensPerWord, seed: int) -> list[Request]:
    output_len = options.output_len or options.custom_output_len
    return _from_file(options, seed, list(_custom_lines(Path(options.dataset_path), output_len)))


_DATASETS: dict[str, Callable[[argparse.Namespace, TokensPerWord, int], list[Request]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
}


# -- files -------------------------------------------------------------------------------------------------


def _from_file(options: argparse.Namespace, seed: int, samples: list[tuple[str, int]]) -> list[Request]:
    """``--num-prompts`` of a file's (prompt, output tokens), from the beginning again where it has fewer."""
    if not samples:
        raise ConfigError(f"--dataset-path {options.dataset_path} has no prompt to send.")
    _shuffle(samples, options, seed)
    source = samples if options.no_oversample else itertools.cycle(samples)
    taken = list(itertools.islice(source, options.num_prompts))
    return _requests([prompt for prompt, _ in taken], [length for _, length in taken])


def _custom_lines(path: Path, output_len: int | None) -> Iterator[tuple[str, int]]:
    for line_number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"--dataset-path {path}, line {line_number}"
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: no JSON ({error}).") from None
        prompt = sample.get("prompt") if isinstance(sample, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{place}: must be an object with a "prompt" that is a text and not empty.')
        length = sample.get("output_tokens", CUSTOM_OUTPUT_LEN)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ConfigError(f'{place}: "output_tokens" must be an integer of at least 1, got {length!r}.')
        yield prompt, output_len or length


def _conversations(path: Path, output_len: int | None) -> Iterator[tuple[str, int]]:
    """The first question of each conversation and the length of its answer."""
    try:
        conversations = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path}: no JSON ({error}).") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {path} must hold a list of conversations, as ShareGPT's files do.")
    for number, entry in enumerate(conversations, 1):
        try:
            prompt, answer = ([turn["value"] for turn in entry["conversations"]] + [None, None])[:2]
        except (TypeError, KeyError):
            raise ConfigError(
                f'--dataset-path {path}, conversation {number}: must be {{"conversations": [{{"from": ..., '
                '"value": ...}, ...]}.'
            ) from None
        if not isinstance(prompt, str) or not isinstance(answer, str):
            continue
        num_prompt, num_output = _estimated_tokens(prompt), output_len or _estimated_tokens(answer)
        is_short = num_prompt < MIN_TOKENS or (output_len is None and num_output < MIN_TOKENS)
        is_long = num_prompt > MAX_PROMPT_TOKENS or num_prompt + num_output > MAX_TOTAL_TOKENS
        if not is_short and not is_long:
            yield prompt, num_output


def _estimated_tokens(text: str) -> int:
    return round(len(text) / CHARACTERS_PER_TOKEN)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--dataset-path {path} cannot be read: {reason}.") from None


# -- parts -------------------------------------------------------------------------------------------------


def _requests(prompts: Sequence[str], output_tokens: Sequence[int]) -> list[Request]:
    pairs = zip(prompts, output_tokens, strict=True)
    return [Request(index, prompt, length) for index, (prompt, length) in enumerate(pairs)]


def _random_words(num_words: int, seed: str) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)


def _shuffle(items: list[Any], options: argparse.Namespace, seed: int) -> None:
    if not options.disable_shuffle:
        random.Random(f"order {seed}").shuffle(items)
