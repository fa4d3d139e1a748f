"""Logprobs in the formats of chat and of completions."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from streamllm.outputs import CompletionOutput, Logprob, PromptEntry
from streamllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from streamllm.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's value)."""

Entries = list[dict[int, Logprob]]
"""Per token: id -> logprob, the sampled token first."""

PromptEntries = Sequence[PromptEntry]
"""The same of a prompt's tokens."""

MANY_CANDIDATES = 2_000
"""Candidates from which their formatting leaves the event loop (a few milliseconds of work)."""

T = TypeVar("T")

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where each token's text begins, in characters; a token that begins inside of one stands at that one.

    Args:
        position: characters in front of the first token.
    """

    __slots__ = ("_decoder", "position")

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._decoder = _Utf8Decoder("replace")

    def take(self, data: bytes) -> int:
        """The offset of the next token, whose bytes are ``data``."""
        offset = self.position
        self.position += len(self._decoder.decode(data))
        return offset


class LogprobFormatter:
    """Formats one request's logprobs.

    A token that is not part of the text (EOS, a stop token, a special token that is skipped) is listed
    without bytes, so that the bytes of all tokens are the text and the list is as long as the usage says.

    Args:
        tokenizer: knows each token's bytes.
        params: the request's; ``logprobs`` is the number of alternatives to list.
        as_token_ids: tokens are named ``token_id:N``.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._as_token_ids = as_token_ids

    def chat(self, entries: Entries, output: CompletionOutput) -> dict[str, Any]:
        """``{"content": [{token, logprob, bytes, top_logprobs}]}`` of the tokens up to this output's end."""
        content = []
        for position, entry in enumerate(entries):
            token_id, sampled = next(iter(entry.items()))
            item = self._chat_item(token_id, sampled)
            if self._ends_by_id(entries, position, output):
                item["bytes"] = []
            item["top_logprobs"] = [self._chat_item(*candidate) for candidate in self._top(entry)]
            content.append(item)
        return {"content": content}

    def completions(self, entries: Entries, output: CompletionOutput, offsets: TextOffsets) -> dict[str, Any]:
        """``{tokens, token_logprobs, top_logprobs, text_offset}``; ``offsets`` moves on behind the tokens.

        ``top_logprobs`` holds the sampled token too, as in vLLM.
        """
        token_ids = [next(iter(entry)) for entry in entries]
        pieces = [
            b"" if self._ends_by_id(entries, position, output) else self._bytes(token_id)
            for position, token_id in enumerate(token_ids)
        ]
        return self._completions(token_ids, entries, [offsets.take(data) for data in pieces])

    def prompt(self, token_ids: Sequence[int], entries: PromptEntries, text: str) -> dict[str, Any]:
        """The same of a prompt that is echoed as ``text``.

        A special token that the tokenizer put there (BOS) is listed, and no part of the text.
        """
        offsets, text_offset = TextOffsets(), []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_special(token_id) and not text.startswith(data.decode(), offsets.position):
                data = b""
            elif offsets.position == 0 and data[:1] == b" " and text[:1] != " ":
                data = data[1:]  # SentencePiece's space in front of every text
            text_offset.append(offsets.take(data))
        return self._completions(token_ids, entries, text_offset)

    def _completions(
        self, token_ids: Sequence[int], entries: PromptEntries, text_offset: list[int]
    ) -> dict[str, Any]:
        token_logprobs: list[float | None] = []
        top_logprobs: list[orjson.Fragment | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            token_logprobs.append(None if entry is None else _floored(entry[token_id].logprob))
            top_logprobs.append(None if entry is None else self._alternatives(entry))
        return {
            "tokens": [self._token(token_id) for token_id in token_ids],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def _alternatives(self, entry: dict[int, Logprob]) -> orjson.Fragment:
        """As JSON already, so that a long prompt's need not all be serialised at once on the event loop."""
        alternatives: dict[str, float] = {}
        for candidate, logprob in _shown(entry, self._params.logprobs or 0):
            alternatives.setdefault(self._token(candidate), _floored(logprob.logprob))
        return orjson.Fragment(orjson.dumps(alternatives))

    def _chat_item(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": self._token(token_id),
            "logprob": _floored(logprob.logprob),
            "bytes": list(self._bytes(token_id)),
        }

    def _top(self, entry: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """The likeliest candidates; a sampled token that is not among them comes last and is cut."""
        ranked = sorted(entry.items(), key=lambda candidate: -candidate[1].logprob)
        return ranked[: self._params.logprobs]

    def _token(self, token_id: int) -> str:
        """The token's text; OpenAI's ``bytes:\\xf0\\x9f`` where it is a part of a character."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token_id: int) -> bytes:
        if self._params.skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _ends_by_id(self, entries: Entries, position: int, output: CompletionOutput) -> bool:
        """Whether this token ended the choice as EOS or stop token, and so is no text."""
        if not output.ended_by_id:
            return False
        shown = self._params.include_stop_str_in_output and output.stop_reason is not None
        return position == len(entries) - 1 and not shown


def logprob_formatter(
    tokenizer: Tokenizer, params: SamplingParams | BeamSearchParams, *, as_token_ids: bool | None
) -> LogprobFormatter | None:
    """The formatter of a request that asks for logprobs; beam search has none to show."""
    if isinstance(params, BeamSearchParams) or params.logprobs is None:
        return None
    return LogprobFormatter(tokenizer, params, as_token_ids=bool(as_token_ids))


def prompt_logprobs_field(entries: PromptEntries, count: int) -> list[orjson.Fragment | None]:
    """vLLM's ``prompt_logprobs``: per token ``null`` or ``{id: {logprob, rank, decoded_token}}``, the token
    itself and the ``count`` likeliest."""
    return [None if entry is None else _field_entry(entry, count) for entry in entries]


def _field_entry(entry: dict[int, Logprob], count: int) -> orjson.Fragment:
    shown = {
        str(token_id): {
            "logprob": _floored(candidate.logprob),
            "rank": candidate.rank,
            "decoded_token": candidate.decoded_token,
        }
        for token_id, candidate in _shown(entry, count)
    }
    return orjson.Fragment(orjson.dumps(shown))


async def format_prompt(entries: PromptEntries, format: Callable[[], T]) -> T:
    """The result of ``format``, which reads all of a prompt's ``entries``: on a thread if they are many."""
    if len(entries) * len(entries[-1] or ()) < MANY_CANDIDATES:
        return format()
    return await asyncio.to_thread(format)


def _shown(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The token itself and the ``count`` likeliest candidates: a prompt may know of more."""
    own, *others = entry.items()
    return [own, *(other for other in others if other[1].rank is None or other[1].rank <= count)]


def _floored(logprob: float) -> float:
    # Written so that NaN becomes the floor too.
    return logprob if logprob > FLOOR else FLOOR
