"""Llama 3 and 4 when they call tools in JSON
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling)."""

from __future__ import annotations

from typing import ClassVar

from streamllm.parsers.call_grammar import CallForm, CallRules, calls_grammar
from streamllm.parsers.json_calls import JsonCallParser
from streamllm.parsers.json_reader import skip_whitespace
from streamllm.parsers.text_reader import Steps


class Llama3JsonParser(JsonCallParser):
    """The text is an object ``{"name": ..., "parameters": {...}}``, or several with ``;`` between them, with
    or without ``<|python_tag|>`` in front.

    Without the mark, calls are recognised at the beginning of the text alone, and only objects that have no
    other members than a call has: an answer may be JSON too.
    """

    name = "llama3_json"
    special_tokens: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    marks = ("<|python_tag|>",)
    starts = ("{", "[{")
    optional_ends: ClassVar[tuple[str, ...]] = ()
    arguments_member = "parameters"
    other_members = frozenset({"type", "id"})
    needs_arguments = True

    def _read_calls(self, mark: str) -> Steps[None]:
        while True:
            yield from self._read_objects()
            yield from skip_whitespace(self._reader)
            yield from self._reader.accept(*self.optional_ends, ";", ",")
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.ahead("{")):
                return

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = CallForm(before=cls._head, after="}", separator="; ", marks=cls.marks)
        return calls_grammar(rules, form, not_a_call=r"[^\s{\[]")


class Llama4JsonParser(Llama3JsonParser):
    """Llama 4 writes the same, between ``<|python_start|>`` and ``<|python_end|>`` if it marks calls at all,
    and one object after the other."""

    name = "llama4_json"
    special_tokens = ("<|python_start|>", "<|python_end|>")
    marks = ("<|python_start|>",)
    optional_ends = ("<|python_end|>",)
