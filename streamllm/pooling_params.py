"""How a prompt's hidden states become its embedding (``vllm.PoolingParams``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from streamllm.checks import check_flag, check_integer, show_value
from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import BeamSearchParams, SamplingParams

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """What an embedding is made of: the model's last hidden states, after its final norm.

    Attributes:
        pooling: ``"last"``: the hidden state of the prompt's last token; ``"mean"``: the mean over all its
            tokens; ``None``: what ``--pooling`` says.
        normalize: scale the embedding to length 1.
        dimensions: keep only so many of its leading values (before normalising); ``None`` keeps all.
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; -1: as many as the context
            holds.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InvalidRequestError(
                f'pooling must be "last" or "mean", got {show_value(self.pooling)}.', param="pooling"
            )
        check_flag("normalize", self.normalize)
        if self.dimensions is not None:
            self.dimensions = check_integer("dimensions", self.dimensions, 1, 2**31 - 1)
        if self.truncate_prompt_tokens not in (None, -1):
            self.truncate_prompt_tokens = check_integer(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1
            )

    @property
    def num_sequences(self) -> int:
        """Sequences that a request takes."""
        return 1

    def clone(self, **changes: Any) -> PoolingParams:
        """A copy with some fields changed; the rules are checked again."""
        return replace(self, **changes)


RequestParams = SamplingParams | BeamSearchParams | PoolingParams
"""What a request may ask for: tokens, a beam search, or an embedding."""


def resolved_pooling(params: PoolingParams, default: str) -> Pooling:
    """The pooling of a request; ``default`` is the configuration's."""
    return params.pooling or cast("Pooling", default)
