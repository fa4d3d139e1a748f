"""Steps for operations that look at tokens and output rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamllm.ops.kv_cache import KVCache
from streamllm.ops.step_inputs import StepInputs

MAX_ROWS = 40


def token_inputs(ids: Sequence[int], output_rows: Sequence[int] = ()) -> StepInputs:
    """One step of these tokens, of which some rows are outputs."""
    cache = KVCache(
        layers_per_block=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=8, kv_cache_dtype="float32"
    )
    table = np.zeros((4, 4), np.float32)
    inputs = StepInputs.allocate(MAX_ROWS, MAX_ROWS, (table,), (table,), cache)
    inputs.num_tokens, inputs.num_sequences, inputs.num_outputs = len(ids), 1, len(output_rows)
    inputs.token_ids[: len(ids)] = ids
    inputs.output_rows[: len(output_rows)] = output_rows
    return inputs
