"""DeepSeek V3, R1 and V3.1 (https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall)."""

from __future__ import annotations

import re

from streamllm.parsers.call_grammar import CallForm, CallRules, calls_grammar, check_plain_name
from streamllm.parsers.json_calls import JsonCallParser
from streamllm.parsers.json_reader import skip_whitespace
from streamllm.parsers.text_reader import Steps
from streamllm.parsers.tool_call_parser import NotACallError

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_WORD = re.compile(r"[\w.\-]+")


class DeepSeekV3Parser(JsonCallParser):
    """V3 and R1: ``function``, a separator, the name, and the arguments in a fenced block. The form of V3.1,
    name, separator and arguments, is read as well."""

    name = "deepseek_v3"
    special_tokens = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
    marks = (_CALLS_BEGIN, _CALL_BEGIN)

    def _read_calls(self, mark: str) -> Steps[None]:
        if mark == _CALLS_BEGIN:
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept(_CALL_BEGIN)):
                raise NotACallError
        while True:
            yield from self._read_call()
            yield from skip_whitespace(self._reader)
            if not (yield from self._reader.accept(_CALL_BEGIN)):
                break
        yield from self._skip_end(_CALLS_END)

    def _read_call(self) -> Steps[None]:
        name = yield from self._read_word()
        if not (yield from self._reader.accept(_SEPARATOR)):
            raise NotACallError
        self._candidate = name if name in self._tools else None
        yield from skip_whitespace(self._reader)
        fenced = (yield from self._reader.peek()) != "{"
        if fenced:
            name = yield from self._read_word()
        self._check_name(name)
        if fenced and not (yield from self._reader.accept("```json", "```")):
            raise NotACallError
        yield from skip_whitespace(self._reader)
        yield from self._stream_arguments(name)
        if fenced:
            yield from self._skip_end("```")
        yield from self._skip_end(_CALL_END)

    def _read_word(self) -> Steps[str]:
        yield from skip_whitespace(self._reader)
        word = yield from self._reader.word(_WORD)
        yield from skip_whitespace(self._reader)
        return word

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = CallForm(
            before=lambda tool: f"{_CALL_BEGIN}function{_SEPARATOR}{check_plain_name(tool)}\n```json\n",
            after=f"\n```{_CALL_END}",
            opening=_CALLS_BEGIN,
            separator="\n",
            closing=_CALLS_END,
            trigger=_CALLS_BEGIN,
            marks=cls.marks,
        )
        return calls_grammar(rules, form)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """V3.1 and later: name, separator, arguments. The form of V3 is read as well."""

    name = "deepseek_v31"

    @classmethod
    def grammar(cls, rules: CallRules) -> str:
        form = CallForm(
            before=lambda tool: f"{_CALL_BEGIN}{check_plain_name(tool)}{_SEPARATOR}",
            after=_CALL_END,
            opening=_CALLS_BEGIN,
            closing=_CALLS_END,
            trigger=_CALLS_BEGIN,
            marks=cls.marks,
        )
        return calls_grammar(rules, form)
