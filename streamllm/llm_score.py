"""Scores of pairs of texts, from their embeddings."""

from __future__ import annotations

import numpy as np

from streamllm.errors import InvalidRequestError, RequestFailedError
from streamllm.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput


def text_pairs(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Which of the first texts goes with which of the second: one with each, or each with its own.

    Raises:
        InvalidRequestError: there are none, or neither one nor equally many.
    """
    if not num_first or not num_second:
        raise InvalidRequestError("text_1 and text_2 must hold at least one text each.", param="text_1")
    if num_first not in (1, num_second):
        raise InvalidRequestError(
            f"text_1 holds {num_first} texts and text_2 {num_second}; text_1 must hold one, or as many as "
            "text_2.",
            param="text_1",
        )
    return [(index % num_first, index) for index in range(num_second)]


def score_of(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
    """The cosine similarity of two embeddings; 0 where one has no length.

    Raises:
        RequestFailedError: one has no embedding: its request was aborted.
    """
    if first.embedding is None or second.embedding is None:
        raise RequestFailedError("the request was aborted.")
    a, b = first.embedding.astype(np.float64), second.embedding.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    score = float(np.clip(a @ b / lengths, -1.0, 1.0)) if lengths else 0.0
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        outputs=ScoringOutput(score),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )
