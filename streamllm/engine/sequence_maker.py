"""A request's sequences: one a choice, in the order in which they are served."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceType

from streamllm.config import EngineConfig
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import BlockTables
from streamllm.engine.request import Request, Sequence
from streamllm.engine.sequence_text import SequenceText
from streamllm.pooling_params import RequestParams
from streamllm.text.tokenizer import Tokenizer


class SequenceMaker:
    """Makes the sequences of requests.

    Args:
        config: says whether priorities count, and what the seeds of unseeded requests come from.
        pool: where their blocks come from.
        windows: of the KV groups, in tokens; ``None`` for one that sees everything.
        new_id: the next sequence id.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        pool: BlockPool,
        windows: SequenceType[int | None],
        new_id: Callable[[], int],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pool = pool
        self._windows = windows
        self._new_id = new_id
        self._num_requests = 0
        self._seeds = random.Random(config.seed)

    def make(
        self, request: Request, params: RequestParams, hashes: list[bytes], priority: int
    ) -> list[Sequence]:
        """The sequences of the request that came after all others so far.

        Args:
            params: as they came; ``request.params`` is what its rows need to know.
            hashes: of the prompt's full blocks.
            priority: lower is served first, if priorities count.
        """
        self._num_requests += 1
        if self._config.scheduling_policy != "priority":
            priority = 0
        seed = getattr(params, "seed", None)
        seed = self._seeds.getrandbits(64) if seed is None else seed & (2**64 - 1)
        num_sequences = 1 if request.beams is not None else params.num_sequences
        return [
            Sequence(
                key=(priority, self._num_requests, self._new_id()),
                request=request,
                choice_index=choice,
                seed=seed,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                blocks=BlockTables(self._pool, self._windows),
                text=SequenceText(self._tokenizer, request.params),
                block_hashes=hashes if choice == 0 else [],
            )
            for choice in range(num_sequences)
        ]
