"""Beam search over HTTP: ``use_beam_search`` (vLLM's extension), and the fields that go with it or not."""

from __future__ import annotations

from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.server.protocol import GenerationRequest, is_neutral, leave_out

ONLY_WITH_BEAMS: dict[str, tuple[Any, ...]] = {"length_penalty": (1,), "early_stopping": (False,)}
"""Fields that mean nothing to sampling -> values that change nothing."""

NEVER_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "seed": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "tools": ([],),
    "thinking_token_budget": (-1,),
}
"""Fields of sampling that a search cannot honour -> values that change nothing."""


def check_beam_fields(request: GenerationRequest) -> None:
    """
    Raises:
        InvalidRequestError: a field of sampling in a beam search, or one of beam search without it.
    """
    if request.use_beam_search:
        table, reason = NEVER_WITH_BEAMS, "cannot be combined with use_beam_search"
    else:
        table, reason = ONLY_WITH_BEAMS, "needs use_beam_search to be true"
    for name, neutral in table.items():
        if not is_neutral(getattr(request, name, None), neutral):
            raise InvalidRequestError(f"{name} {reason}; {leave_out(neutral)}.", param=name)


def beam_search_params(
    request: GenerationRequest, *, max_tokens: int | None, best_of: int | None
) -> BeamSearchParams:
    """The search that a request asks for. The model's sampling defaults have no part in it.

    Args:
        max_tokens: the limit, ``None`` for what the context leaves.
        best_of: number of beams if it is not ``n``; the ``n`` best hypotheses are returned.

    Raises:
        InvalidRequestError: a value out of its range; of the width, ``param`` is ``"beam_width"``.
    """
    n = 1 if request.n is None else request.n
    if best_of is not None:
        SamplingParams(n=n, best_of=best_of)  # the same rules as when sampling
    optional = {
        name: value
        for name in ("length_penalty", "early_stopping", "ignore_eos")
        if (value := getattr(request, name)) is not None
    }
    return BeamSearchParams(beam_width=n if best_of is None else best_of, max_tokens=max_tokens, **optional)


def width_field(request: GenerationRequest) -> str:
    """The field in which the client wrote the number of beams."""
    return "n" if getattr(request, "best_of", None) is None else "best_of"
