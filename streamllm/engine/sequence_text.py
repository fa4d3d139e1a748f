"""The text of one sequence as it grows."""

from __future__ import annotations

from streamllm.sampling_params import SamplingParams
from streamllm.text.detokenizer import IncrementalDetokenizer
from streamllm.text.stop import StopStrings
from streamllm.text.tokenizer import Tokenizer


class SequenceText:
    """The text side of one sequence: its detokeniser and its stop strings."""

    __slots__ = ("_detokenizer", "_stops", "cumulative_logprob", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self._detokenizer = None
        self._stops = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                kept_special_tokens=params.kept_special_tokens,
            )
            if params.stop:
                self._stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)

    def push(self, token_id: int, *, stops_armed: bool) -> tuple[str, str | None]:
        """One more token: (text that may be shown, the stop string that it completed)."""
        self.num_tokens += 1
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(token_id)
        if self._stops is None:
            return text, None
        return self._stops.push(text, armed=stops_armed)

    def finish(self) -> tuple[str, str | None]:
        """What was still held back, at the end of generation; it may yet hold a stop string."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, None
        emitted, stop = self._stops.push(text) if text else ("", None)
        return (emitted, stop) if stop is not None else (emitted + self._stops.finish(), None)
