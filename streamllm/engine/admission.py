"""What a request must satisfy before it is queued. Everything that is wrong is said here, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.pooling_params import PoolingParams, RequestParams
from streamllm.sampling_params import BeamSearchParams
from streamllm.text.tokenizer import Tokenizer

MAX_SALT_LENGTH = 128
MAX_CUT_TEXT = 4_000_000
"""Characters of a prompt of which only the end will be kept: some seconds of tokenising."""


class Admission:
    """Checks prompts and parameters against the model.

    Args:
        tokenizer: knows the vocabulary.
        max_model_len: longest sequence, prompt and output together, in tokens.
        hidden_size: values of the model's hidden states.
        max_beam_width: beams that can run at once.
        num_blocks: KV blocks in the pool.
        blocks_for: KV blocks that a sequence of so many tokens holds at most.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        hidden_size: int,
        max_beam_width: int,
        num_blocks: int,
        blocks_for: Callable[[int], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._hidden_size = hidden_size
        self._max_beam_width = max_beam_width
        self._num_blocks = num_blocks
        self._blocks_for = blocks_for
        self._known_ids = frozenset(filter(tokenizer.contains, range(tokenizer.vocab_size)))
        self._longest_token = max(map(len, map(tokenizer.token_bytes, self._known_ids)), default=1)

    @staticmethod
    def output_room(params: RequestParams) -> int:
        """Tokens that must fit into the context behind the prompt."""
        return 0 if isinstance(params, PoolingParams) else 1

    def check_text(self, text: str, *, may_be_cut: bool = False, output_room: int = 1) -> None:
        """Refuse a text that is too long before it is tokenised: no token spans more than so many bytes.

        Args:
            may_be_cut: what is too long for the context is cut, not refused; there is a limit all the same.
            output_room: tokens that must fit behind it.
        """
        if may_be_cut:
            if len(text) > MAX_CUT_TEXT:
                raise InvalidRequestError(
                    f"The prompt has {len(text)} characters; with truncate_prompt_tokens at most "
                    f"{MAX_CUT_TEXT} are tokenised. Shorten the prompt.",
                    param="prompt",
                )
            return
        at_least = -(-len(text) // self._longest_token)
        if at_least > self._max_model_len - output_room:
            raise self._too_long(f"at least {at_least}", output_room)

    def check_length(self, token_ids: Sequence[Any], output_room: int = 1) -> None:
        """Refuse a prompt that is empty, or leaves no room for so many more tokens.

        Raises:
            InvalidRequestError: with ``param="prompt"``; too long ones with OpenAI's code
                ``context_length_exceeded``.
        """
        if not token_ids:
            raise InvalidRequestError("prompt is empty: it holds no token.", param="prompt")
        if len(token_ids) > self._max_model_len - output_room:
            raise self._too_long(str(len(token_ids)), output_room)

    def num_kept_tokens(self, params: RequestParams) -> int | None:
        """How many tokens at the end of a prompt ``truncate_prompt_tokens`` keeps; ``None`` for all.

        -1 keeps what leaves room for ``max_tokens`` (one token if there is no such limit).

        Raises:
            InvalidRequestError: so many would not leave room for a token of output.
        """
        limit = getattr(params, "truncate_prompt_tokens", None)
        longest = self._max_model_len - self.output_room(params)
        if limit == -1:
            if isinstance(params, PoolingParams):
                return longest
            return max(self._max_model_len - (params.max_tokens or 1), 1)
        if limit is not None and limit > longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {longest} with this model's context "
                f"of {self._max_model_len} tokens, got {limit}.",
                param="truncate_prompt_tokens",
            )
        return limit

    def check_token_ids(self, token_ids: Any, num_kept: int | None = None, output_room: int = 1) -> list[int]:
        """A client's prompt ids as a list of known ids of a length that :meth:`check_length` allows.

        Args:
            num_kept: so many of them at the end are kept.
            output_room: tokens that must fit behind them.

        Raises:
            InvalidRequestError: with ``param="prompt"``.
        """
        if not isinstance(token_ids, (list, tuple)):
            raise InvalidRequestError("prompt must be a text or a list of token ids.", param="prompt")
        if num_kept is not None:
            token_ids = token_ids[-num_kept:]
        self.check_length(token_ids, output_room)
        # Whole-list checks take a few ms for 100,000 ids; the loop is only to name the culprit.
        if set(map(type, token_ids)) != {int} or not self._known_ids.issuperset(token_ids):
            self._name_culprit(token_ids)
        return list(token_ids)

    def _name_culprit(self, token_ids: Sequence[Any]) -> None:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(
                    f"prompt must hold integer token ids, got {_json_name(token_id)}.", param="prompt"
                )
            if not self._tokenizer.contains(token_id):
                raise InvalidRequestError(
                    f"prompt holds the token id {str(token_id)[:40]}, which is not in the vocabulary "
                    f"(0 to {self._tokenizer.vocab_size - 1}).",
                    param="prompt",
                )

    def check_params(self, params: RequestParams, num_prompt_tokens: int) -> None:
        """What the parameters cannot know by themselves: room for all beams, the size of an embedding."""
        if isinstance(params, BeamSearchParams):
            self._check_beams(params, num_prompt_tokens)
        elif isinstance(params, PoolingParams) and (params.dimensions or 0) > self._hidden_size:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {self._hidden_size} with this model, got "
                f"{params.dimensions}.",
                param="dimensions",
            )

    def _check_beams(self, params: BeamSearchParams, num_prompt_tokens: int) -> None:
        if params.beam_width > self._max_beam_width:
            raise InvalidRequestError(
                f"beam_width must be at most {self._max_beam_width} with this model and --max-num-seqs, got "
                f"{params.beam_width}.",
                param="beam_width",
            )
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(num_prompt_tokens + params.max_tokens, longest)
        needed, available = params.beam_width * self._blocks_for(longest), self._num_blocks
        if needed > available:
            raise InvalidRequestError(
                f"{params.beam_width} beams of {longest} tokens need {needed} KV blocks and there are "
                f"{available}; lower beam_width or max_tokens.",
                param="beam_width",
            )

    @staticmethod
    def check_priority(priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 2**63 - 1:
            raise InvalidRequestError(
                f"priority must be an integer of 64 bits, got {_json_name(priority)}.", param="priority"
            )

    @staticmethod
    def check_cache_salt(salt: Any) -> None:
        if salt is None:
            return
        if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_LENGTH:
            raise InvalidRequestError(
                f"cache_salt must be a string of 1 to {MAX_SALT_LENGTH} characters.", param="cache_salt"
            )

    def _too_long(self, num_tokens: str, output_room: int) -> InvalidRequestError:
        room = "; it must leave room for at least one token of output" if output_room else ""
        return InvalidRequestError(
            f"This model's maximum context length is {self._max_model_len} tokens and the prompt has "
            f"{num_tokens}{room}. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {float: "a float", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
