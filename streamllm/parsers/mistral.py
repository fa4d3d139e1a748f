"""Mistral's models (https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling)."""

from __future__ import annotations

import re
import secrets
import string

from streamllm.parsers.call_grammar import CallForm, CallRules, calls_grammar, check_plain_name
from streamllm.parsers.json_calls import JsonCallParser
from streamllm.parsers.json_reader import skip_whitespace
from streamllm.parsers.text_reader import Steps

_ALPHANUMERIC = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.\-]+")


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS]`` and a list of objects (up to tokenizer version 7), or ``[TOOL_CALLS]name[ARGS]{...}``
    for each call, with or without ``[CALL_ID]id`` after the name (from version 11 on; the first models of it
    also leave ``[ARGS]`` out).

    Ids are what Mistral's templates insist on: 9 letters and digits.
    """

    name = "mistral"
    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    marks = ("[TOOL_CALLS]",)

    @staticmethod
    def make_id() -> str:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def _read_calls(self, mark: str) -> Steps[None]:
        yield from skip_whitespace(self._reader)
        if (yield from self._reader.ahead("[", "{")):
            yield from self._read_objects()
            return
        name = self._check_name((yield from self._reader.word(_NAME)))
        if (yield from self._reader.accept("[CALL_ID]")):
            yield from self._reader.word(_NAME)
        yield from self._reader.accept("[ARGS]")
        yield from skip_whitespace(self._reader)
        yield from self._stream_arguments(name)

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        if "[ARGS]" not in rules.chat_template:
            form = CallForm(
                before=cls._head,
                after="}",
                opening="[TOOL_CALLS] [",
                separator=", ",
                closing="]",
                trigger="[TOOL_CALLS]",
                marks=cls.marks,
            )
        else:
            form = CallForm(
                before=lambda tool: f"[TOOL_CALLS]{check_plain_name(tool)}[ARGS]",
                trigger="[TOOL_CALLS]",
                marks=cls.marks,
            )
        return calls_grammar(rules, form)
