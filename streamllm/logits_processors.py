"""Logits processors by name: code of your own between the model and the sampler.

A processor is made once a request, from what the request sends along::

    from streamllm import SamplingParams
    from streamllm.logits_processors import register_logits_processor

    def only_even(extra_args, vocab_size):
        def process(prompt_token_ids, output_token_ids, logits):
            logits[1::2] = -float("inf")
            return logits
        return process

    register_logits_processor("only_even", only_even)
    SamplingParams(logits_processors=["only_even"])

An installed package offers its own under the entry-point group ``streamllm.logits_processors``, the name
being the processor's and the object its factory. Nothing that a client sends is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.runner.token_rules import LogitsProcessor

ENTRY_POINT_GROUP = "streamllm.logits_processors"

LogitsProcessorFactory = Callable[[Mapping[str, Any], int], LogitsProcessor]
"""(the request's ``extra_args``, vocabulary size) -> processor. A ValueError refuses the request.

The processor is called for each token of each choice, on a thread of its own, with the ids of the prompt and
of the output so far and a float32 array ``[vocab_size]`` of the model's logits. It may change that array, and
returns one of this shape; -inf forbids a token. Bias, penalties and bans come after it. One that raises, or
returns anything else, NaN or +inf, ends its own request with an error. The step, and so every request in it,
waits for the processors.
"""

_registered: dict[str, LogitsProcessorFactory] = {}


def register_logits_processor(name: str, factory: LogitsProcessorFactory) -> None:
    """Offer a processor to requests of this process.

    Raises:
        ValueError: the name is empty, or taken by another factory.
    """
    if not name:
        raise ValueError("a logits processor needs a name")
    if _registered.setdefault(name, factory) is not factory:
        raise ValueError(f"a logits processor {name!r} is registered already")


def make_logits_processors(
    names: Sequence[str], extra_args: Mapping[str, Any] | None, vocab_size: int
) -> tuple[LogitsProcessor, ...]:
    """A request's processors, in the order of its names. May import plug-ins: not for the event loop.

    Raises:
        InvalidRequestError: a name is unknown, or a factory refuses ``extra_args``.
    """
    return tuple(_make(name, extra_args or {}, vocab_size) for name in names)


def _make(name: str, extra_args: Mapping[str, Any], vocab_size: int) -> LogitsProcessor:
    factory = _factory(name)
    try:
        return factory(dict(extra_args), vocab_size)
    except Exception as error:
        raise InvalidRequestError(
            f'the logits processor "{name}" refuses the request: {error or type(error).__name__}',
            param="extra_args",
        ) from error


def _factory(name: str) -> LogitsProcessorFactory:
    if name in _registered:
        return _registered[name]
    from importlib.metadata import entry_points

    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in plugins:
        known = ", ".join(sorted({*_registered, *plugins})) or "none is"
        raise InvalidRequestError(
            f'logits_processors holds "{name[:80]}", which is not registered; registered: {known}.',
            param="logits_processors",
        )
    try:
        factory: LogitsProcessorFactory = plugins[name].load()
    except Exception as error:
        raise InvalidRequestError(
            f'the plug-in of the logits processor "{name}" cannot be loaded: {error}',
            param="logits_processors",
        ) from error
    return _registered.setdefault(name, factory)
