"""The grammar library: vocabulary, notations and limits (https://github.com/guidance-ai/llguidance).

Imported lazily: it takes 0.1 s, and most servers see no constraint. Neither torch nor transformers come with
it. What stands here is used by the engine and by the process in which constraints are tried first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import llguidance
import msgspec

from streamllm.engine.constraint import ConstraintSource

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=500_000,
    step_max_items=500_000,
    max_lexer_states=50_000,
    max_grammar_size=300_000,
    verbose_errors=False,
)
"""A mask may use what amounts to some 50 ms, the lexer's states some 15 MB."""

HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it, text that is determined may only be spelt in the tokenizer's own way, for which each mask would
call the tokenizer."""

OVERLAPPING_ONE_OF = "oneOf is supported only where its alternatives visibly exclude each other; use anyOf"


class ConstraintError(Exception):
    """A constraint that cannot be enforced; the text says why."""


class Vocabulary(msgspec.Struct, array_like=True):
    """What grammars know of a tokenizer.

    Attributes:
        token_bytes: per id what it adds to the text; ids without a token have none.
        special_ids: tokens that are no text.
        eos_ids: tokens that end the text.
    """

    token_bytes: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    def to_llguidance(self) -> Any:
        """The library's tokenizer; building it takes some 0.1 s for 50,000 tokens."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenTable(self)),
            n_vocab=len(self.token_bytes),
            eos_token=self.eos_ids,
        )


class _TokenTable:
    """The form in which the library takes a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = vocabulary.special_ids

    def __call__(self, text: bytes) -> list[int]:
        # Asked only to spell determined text, which the header switches off.
        return []


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A constraint that can be enforced.

    Attributes:
        matcher: in its first state; never advanced, only copied. The copies share what they find out about
            the grammar's lexer.
        failed: a copy has failed (the lexer may have grown beyond its limit), so that no more are made.
    """

    matcher: Any
    failed: bool = False


def to_llguidance(source: ConstraintSource) -> str:
    """The constraint in the library's notation.

    Raises:
        ConstraintError: it is malformed, or asks for what the library would ignore.
    """
    if not source.thinking and source.kind in ("regex", "lark"):
        return HEADER + _lark(source)
    nested = "before @answer" if source.thinking else "@answer"
    answer = (
        {"json_schema": json.loads(source.text)} if source.kind == "json" else {"lark_grammar": _lark(source)}
    )
    outer = f"{HEADER}start: {nested}\n{source.thinking}"
    return json.dumps({"grammars": [{"lark_grammar": outer}, {"name": "answer", **answer}]})


def _lark(source: ConstraintSource) -> str:
    if source.kind == "regex":
        return f"start: /{llguidance.regex_to_lark(source.text)}/"
    if source.kind == "lark":
        return source.text
    lark = source.text if _is_lark(source.text) else _lark_from_gbnf(source.text)
    _check_attributes(lark)
    return lark


def compile_grammar(tokenizer: Any, text: str) -> CompiledGrammar:
    """Compile a grammar in the library's notation. The interpreter's lock is released meanwhile.

    Raises:
        ConstraintError: it is wrong or too complex, a part of it would be ignored, or no text satisfies it.
    """
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error() and matcher.is_stopped() and not matcher.is_accepting():
        raise ConstraintError("no text satisfies it")
    for problem in [matcher.get_error(), *matcher.get_grammar_warnings()]:
        if problem:
            raise ConstraintError(one_line(problem))
    return CompiledGrammar(matcher)


def one_line(message: str) -> str:
    """The library's message without its excerpts of the source."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = " ".join(" ".join(lines).replace("<non-verbose/>", "").split())
    text = re.sub(r"Unimplemented keys: \[(.*?)\]", r"not supported: \1", text)
    text = re.sub("oneOf constraints are not supported.*", OVERLAPPING_ONE_OF, text)
    return (text if len(text) <= 300 else text[:297] + "...").rstrip(". ")


# -- what clients write ------------------------------------------------------------------------------------


def _is_lark(text: str) -> bool:
    return re.search(r"(?m)^\s*(%llguidance\b|\??start\s*(\[[^\]]*\])?\s*:(?!:=))", text) is not None


def _check_attributes(lark: str) -> None:
    if match := re.search(r"(?m)^\s*[?!]?\w+\s*\[[^\]\n]*\b(temperature|stop|capture)\b[^\]\n]*\]\s*:", lark):
        raise ConstraintError(f"the rule attribute {match[1]} is not supported")


def _lark_from_gbnf(text: str) -> str:
    """From llama.cpp's notation (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    names = Counter(re.findall(r"(?m)^\s*([\w-]+)\s*::=", text))
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ConstraintError(f"the rule {repeated[0]} stands twice in the grammar")
    if re.search(r"\[[^\]\n]*(&&|--|~~)", text):
        raise ConstraintError("&&, -- and ~~ inside of [] are not supported in a grammar")
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        message = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise ConstraintError(
            f"the grammar is neither Lark with a rule start nor GBNF with a rule root: {one_line(message)}"
        ) from None
