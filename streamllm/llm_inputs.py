"""What the methods of :class:`streamllm.llm.LLM` take: one prompt or several, options for all or one each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from streamllm.errors import InvalidRequestError
from streamllm.lora.request import LoRARequest
from streamllm.pooling_params import PoolingParams
from streamllm.sampling_params import SamplingParams
from streamllm.text.content_format import CONTENT_FORMATS, ContentFormat

Params = TypeVar("Params", SamplingParams, PoolingParams)
Prompt = str | dict[str, Any] | list[int]
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


@dataclasses.dataclass(frozen=True)
class Input:
    """A prompt with what belongs to it alone."""

    prompt: str | list[int]
    priority: int = 0
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the engine's ``add_requests`` takes beside prompt and parameters."""
        return {
            "priority": self.priority, "cache_salt": self.cache_salt, "lora_request": self.lora_request,
        }  # fmt: skip


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Always a sequence of prompts, also where one was given."""
    is_token_ids = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
    one = isinstance(prompts, (str, dict)) or is_token_ids
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def one_each(params: Params | Sequence[Params], count: int, name: str) -> list[Params]:
    """Parameters for each of ``count`` prompts: given for all of them, or one by one.

    Raises:
        InvalidRequestError: there are more or fewer of them than prompts; ``name`` is the field to blame.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * count
    if len(each) != count:
        raise InvalidRequestError(f"{name} holds {len(each)} entries for {count} prompts.", param=name)
    return each


def lora_requests(given: LoraRequests, count: int) -> list[LoRARequest | None]:
    """The adapter of each of ``count`` prompts."""
    each = list(given) if isinstance(given, (list, tuple)) else [cast("LoRARequest | None", given)] * count
    if len(each) != count:
        raise InvalidRequestError(
            f"lora_request holds {len(each)} entries for {count} prompts.", param="lora_request"
        )
    return each


def inputs_of(
    prompts: Sequence[Prompt], priority: int | Sequence[int] | None, lora_request: LoraRequests
) -> list[Input]:
    """Each prompt with its options.

    Raises:
        InvalidRequestError: a prompt is none, or there are more or fewer priorities or adapters than prompts.
    """
    count = len(prompts)
    # Whatever is no list is one for all; the engine says so if it is no integer.
    one = cast("int | None", priority)
    priorities = (
        list(priority) if isinstance(priority, (list, tuple)) else [0 if one is None else one] * count
    )
    if len(priorities) != count:
        raise InvalidRequestError(
            f"priority holds {len(priorities)} entries for {count} prompts.", param="priority"
        )
    return [
        Input(
            _prompt_of(prompt, index),
            each,
            prompt.get("cache_salt") if isinstance(prompt, dict) else None,
            adapter,
        )
        for index, (prompt, each, adapter) in enumerate(
            zip(prompts, priorities, lora_requests(lora_request, count), strict=True)
        )
    ]


def _prompt_of(prompt: Prompt, index: int) -> str | list[int]:
    if isinstance(prompt, dict):
        for key in ("prompt_token_ids", "prompt"):
            if key in prompt:
                return prompt[key]
        raise InvalidRequestError(
            f"prompts[{index}] must hold 'prompt' or 'prompt_token_ids', got {sorted(prompt)}.",
            param=f"prompts[{index}]",
        )
    if isinstance(prompt, (str, list)):
        return prompt
    raise InvalidRequestError(
        f"prompts[{index}] must be a text, a list of token ids or a dict, got {type(prompt).__name__}.",
        param=f"prompts[{index}]",
    )


def check_tools(tools: Any) -> None:
    """Refuse what a chat template could not print as tools.

    Raises:
        InvalidRequestError: ``param`` is the place, such as ``tools[1].function``.
    """
    if tools is None:
        return
    if not isinstance(tools, (list, tuple)):
        raise InvalidRequestError(f"tools must be a list, got {type(tools).__name__}.", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}.',
                param=f"tools[{index}].function",
            )


def content_format_of(name: str) -> ContentFormat | None:
    """The content format of that name of vLLM's; ``None`` for ``"auto"``.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in CONTENT_FORMATS:
        raise InvalidRequestError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got {name!r}.",
            param="chat_template_content_format",
        )
    return CONTENT_FORMATS[name]
