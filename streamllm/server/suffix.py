"""``suffix`` of completions: what is generated stands between the prompt and it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.server.generation import Prompt
from streamllm.server.protocol import CompletionRequest
from streamllm.text.fill_in_middle import middle_marks

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine


async def around_suffix(
    engine: AsyncEngine,
    request: CompletionRequest,
    prompts: list[Prompt],
    params: SamplingParams | BeamSearchParams,
) -> list[Prompt]:
    """The prompts as token ids with the suffix in them; unchanged without a suffix.

    Raises:
        InvalidRequestError: the model has no fill-in-the-middle tokens, a field contradicts the suffix, or
            one of the texts cannot be served.
    """
    if not request.suffix:
        return prompts
    marks = middle_marks(engine.tokenizer)
    if marks is None:
        raise InvalidRequestError(
            "suffix is not supported by this model, which has no fill-in-the-middle tokens; leave it out.",
            param="suffix",
        )
    for field in ("echo", "truncate_prompt_tokens"):
        if getattr(request, field):
            raise InvalidRequestError(f"{field} cannot be combined with suffix.", param=field)
    try:
        suffix = await engine.check_prompt(request.suffix, params, add_special_tokens=False)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param="suffix", code=error.code) from None
    starts_with_bos = engine.tokenizer.adds_bos and request.add_special_tokens is not False
    wrapped: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        bos = [engine.tokenizer.bos_token_id] if starts_with_bos and isinstance(prompt, str) else []
        try:
            prefix = await engine.check_prompt(prompt, params, add_special_tokens=False) if prompt else []
        except InvalidRequestError as error:
            raise error if len(prompts) == 1 else error.at_index("prompt", index) from None
        wrapped.append(marks.prompt([token for token in bos if token is not None], prefix, suffix))
    return wrapped
