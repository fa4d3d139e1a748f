"""From checked prompts and parameters to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from streamllm.config import EngineConfig
from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.embedding import Embedding
from streamllm.engine.prompt_logprobs import PromptLogprobs
from streamllm.engine.request import Request
from streamllm.engine.stream import RequestStream, Selection
from streamllm.lora.request import LoRARequest
from streamllm.ops.step_inputs import LogprobsMode
from streamllm.outputs import RequestMetrics
from streamllm.pooling_params import PoolingParams, RequestParams, resolved_pooling
from streamllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from streamllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from streamllm.engine.grammar_compile import CompiledGrammar
    from streamllm.runner.token_rules import TokenRules


class CheckedRequest(NamedTuple):
    """A request that may be queued."""

    text: str | None
    token_ids: list[int]
    params: RequestParams
    hash_seed: bytes | None
    hashes: list[bytes]
    rules: TokenRules | None
    grammar: CompiledGrammar | None


class RequestMaker:
    """
    Args:
        config: gives the defaults of what requests leave open.
        tokenizer: gives the texts of logprobs.
        eos_token_ids: ids that end a sequence.
        max_model_len: longest sequence, prompt and output together, in tokens.
        abort: ends the request with an id.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        abort: Callable[[str], None],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._abort = abort

    def make(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: RequestParams,
        arrival_time: float,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """A request with its stream, without sequences.

        Args:
            text: the prompt as text, ``None`` if it came as ids.
            token_ids: the prompt.
            arrival_time: seconds of ``time.monotonic()``.
            lora_request: its adapter, for its outputs.
        """
        beams = embedding = None
        selection = prompt_logprobs = num_logprobs = None
        logprobs_mode = LogprobsMode.RAW_LOGPROBS
        num_choices = params.num_sequences
        if isinstance(params, PoolingParams):
            embedding = Embedding(params, resolved_pooling(params, self._config.pooling))
            # What its row needs to know: it is never sampled from.
            params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        elif isinstance(params, BeamSearchParams):
            room = self._max_model_len - len(token_ids)
            max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
            beams = BeamSearch(params, self._eos_token_ids, max_tokens)
            num_logprobs = beams.num_candidates
            # What the rows of a beam need to know: they are never sampled from.
            params = SamplingParams(temperature=0.0, max_tokens=None, output_kind=params.output_kind)
        else:
            num_logprobs = params.num_reported_logprobs
            if params.prompt_logprobs is not None:
                prompt_logprobs = PromptLogprobs(token_ids, params.prompt_logprobs, self._tokenizer)
            if not params.selects_best:
                logprobs_mode = LogprobsMode[self._config.logprobs_mode.upper()]
            else:
                selection = Selection(params.n, show_logprobs=params.logprobs is not None)
        metrics = RequestMetrics(arrival_time=arrival_time)
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            max_total_tokens=self._max_model_len,
            metrics=metrics,
            stream=RequestStream(
                request_id,
                text,
                token_ids,
                num_choices=num_choices,
                output_kind=RequestOutputKind.FINAL_ONLY if selection else params.output_kind,
                metrics=metrics,
                abort=lambda: self._abort(request_id),
                selection=selection,
                prompt_logprobs=prompt_logprobs,
                embedding=embedding,
                lora_request=lora_request,
            ),
            num_logprobs=num_logprobs,
            logprobs_mode=logprobs_mode,
            prompt_logprobs=prompt_logprobs,
            embedding=embedding,
            beams=beams,
        )
