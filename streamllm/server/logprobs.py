"""Logprobs in the formats of chat and of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamllm.outputs import CompletionOutput, Logprob
from streamllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from streamllm.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's value)."""

Entries = list[dict[int, Logprob]]
"""Per token: id -> logprob, the sampled token first."""


class LogprobFormatter:
    """Formats one request's logprobs.

    A token that is not part of the text (EOS, a stop token, a special token that is skipped) is listed
    without bytes, so that the bytes of all tokens are the text and the list is as long as the usage says.

    Args:
        tokenizer: knows each token's bytes.
        params: the request's; ``logprobs`` is the number of alternatives to list.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params

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

    def completions(
        self, entries: Entries, output: CompletionOutput, offset: int
    ) -> tuple[dict[str, Any], int]:
        """``{tokens, token_logprobs, top_logprobs, text_offset}`` and the offset where the next token begins.

        ``top_logprobs`` holds the sampled token too, as in vLLM. Offsets count characters.
        """
        tokens, token_logprobs, top_logprobs, text_offset = [], [], [], []
        for position, entry in enumerate(entries):
            token_id, sampled = next(iter(entry.items()))
            tokens.append(self._token(token_id))
            token_logprobs.append(_floored(sampled.logprob))
            alternatives: dict[str, float] = {}
            for candidate, logprob in entry.items():
                alternatives.setdefault(self._token(candidate), _floored(logprob.logprob))
            top_logprobs.append(alternatives)
            data = b"" if self._ends_by_id(entries, position, output) else self._bytes(token_id)
            # Every byte that does not continue a character begins one; a token may begin inside of one.
            text_offset.append(offset - 1 if data[:1] and data[0] & 0xC0 == 0x80 else offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in data)
        formatted = {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }
        return formatted, offset

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
        if output.finish_reason != "stop" or isinstance(output.stop_reason, str):
            return False
        shown = self._params.include_stop_str_in_output and output.stop_reason is not None
        return position == len(entries) - 1 and not shown


def logprob_formatter(
    tokenizer: Tokenizer, params: SamplingParams | BeamSearchParams
) -> LogprobFormatter | None:
    """The formatter of a request that asks for logprobs; beam search has none to show."""
    if isinstance(params, BeamSearchParams) or params.logprobs is None:
        return None
    return LogprobFormatter(tokenizer, params)


def _floored(logprob: float) -> float:
    # Written so that NaN becomes the floor too.
    return logprob if logprob > FLOOR else FLOOR
