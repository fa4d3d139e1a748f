"""The Jinja environment of chat templates: what Transformers gives them, in a sandbox with limits.

A template comes with a model from anywhere, or even with a request. It can reach no attribute that the
sandbox
does not allow, and what it spends is bounded: processor time, by a look at the clock in every loop and call;
and memory, by a limit on every operation that can make a long text out of short ones.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

TIME_LIMIT = 2.0
"""Seconds of processor time for one rendering; a model's own template takes milliseconds."""

MAX_TEXT = 2**26
"""Characters (or list entries) that a template may build in one piece."""

MAX_TOTAL_TEXT = 2**30
"""Characters that a template may build in all: what it keeps of them takes memory until it ends."""

MAX_PADDING = 10_000
"""Largest width, indentation or count that a text operation may be given."""


class RefusedByTemplateError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class TemplateLimitError(jinja2.TemplateError):
    """The template spent too much."""


_spending = threading.local()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let what is rendered in this thread use so many seconds of its processor time."""
    _spending.end, _spending.built = time.thread_time() + seconds, 0
    try:
        yield
    finally:
        del _spending.end, _spending.built


@functools.cache
def environment() -> jinja2.Environment:
    """The one environment of all templates. Rendering is thread-safe."""
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.filters[_WATCH] = _Watched
    made.filters[_CONCATENATE] = lambda values: _joined(map(str, values))
    for name in ("center", "indent", "join", "replace", "format", "wordwrap", "batch", "slice"):
        made.filters[name] = _bounded_filter(name, jinja2.filters.FILTERS[name])
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del made.globals["lipsum"]
    return made


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training. It has no effect here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    _check_numbers((indent,))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# -- time --------------------------------------------------------------------------------------------------


def _check_time() -> None:
    if time.thread_time() > getattr(_spending, "end", float("inf")):
        raise TemplateLimitError("it takes too long")


_WATCH = "streamllm_watch"
_CONCATENATE = "streamllm_concatenate"


class _Limits(NodeTransformer):
    """Rewrites a parsed template: loops look at the clock, and ``~`` at the length of its result."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _WATCH)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Watched:
    """What a loop iterates over."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            _check_time()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


# -- memory ------------------------------------------------------------------------------------------------


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Limits().visit(super()._parse(source, name, filename))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        """What joins a rendering, a macro's or a block's pieces."""
        return _joined(pieces)

    def call(self, context: jinja2.runtime.Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        if isinstance(getattr(function, "__self__", None), str):
            _check_text_operation(function.__name__, (function.__self__, *args), kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_length(len(left) + len(right))
            return left + right
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    _check_length(len(sequence) * count)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            _check_length(bits)
        return super().call_binop(context, operator, left, right)


def _joined(pieces: Iterable[str]) -> str:
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_TEXT:
            break
        kept.append(piece)
    _check_length(length)
    return "".join(kept)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # Some filters get Jinja's context or environment ahead of the value.
        values = [
            arg for arg in args
            if not isinstance(arg, (jinja2.nodes.EvalContext, jinja2.Environment, jinja2.runtime.Context))
        ]  # fmt: skip
        _check_text_operation(name, values, kwargs)
        return function(*args, **kwargs)

    return bounded


def _check_text_operation(name: str, values: Any, options: dict[str, Any]) -> None:
    """An operation on ``values[0]``, as a filter or as a method of a string."""
    _check_numbers((*values[1:], *options.values()))
    if name == "replace":
        old, new = (*values[1:], options.get("s", options.get("old")), options.get("new"))[:2]
        if isinstance(old, str) and isinstance(new, str):
            _check_length(str(values[0]).count(old) * len(new))
    elif name == "format":
        _check_format(str(values[0]))
    elif name == "join":
        sequence, separator = values[0], (*values[1:], options.get("d", ""))[0]
        if isinstance(sequence, str) and not isinstance(separator, str):  # the method: "-".join(items)
            sequence, separator = separator, sequence
        if hasattr(sequence, "__len__"):
            _check_length(len(sequence) * len(str(separator)))


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_PADDING for value in values):
        raise TemplateLimitError(f"it pads or repeats by more than {MAX_PADDING}")


def _check_format(text: str) -> None:
    if re.search(r"[0-9]{5,}|\*", text) and re.search(
        r"%[^a-zA-Z%]*(?:[0-9]{5,}|\*)|[{][^}]*[0-9]{5,}", text
    ):
        raise TemplateLimitError(f"it pads by more than {MAX_PADDING}")


def _check_length(length: int) -> None:
    built = getattr(_spending, "built", 0) + length
    if length > MAX_TEXT or built > MAX_TOTAL_TEXT:
        raise TemplateLimitError("it builds a text that is too long")
    _spending.built = built
