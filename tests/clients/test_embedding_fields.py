"""The fields of ``/v1/embeddings``, walked with the unchanged ``openai`` client as those of generation."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from asking import MODEL

from streamllm.server.protocol import EmbeddingRequest, field_support, leave_out, refused_fields

TEXT = "The sea is wide, and blue, and deep, and those who live beside it know it by heart."
SUPPORT = field_support(EmbeddingRequest)
REFUSED: dict[str, Any] = {
    "embed_dtype": "float16",
    "endianness": "big",
    "messages": [{"role": "user", "content": "a"}],
    "mm_processor_kwargs": {"num_crops": 4},
    "truncation_side": "right",
}
IGNORED = {"request_id": "mine", "user": "someone"}


@pytest.fixture
def embed(client):
    def answer(text: Any = TEXT, **fields: Any) -> Any:
        body = {"model": MODEL, "encoding_format": "float", "input": text, **fields}
        return client.post("/embeddings", body=body, cast_to=openai.types.CreateEmbeddingResponse)

    return answer


def first(answer: Any) -> list[float]:
    return answer.data[0].embedding


def length(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


@pytest.fixture
def effects(embed, client):
    """Honoured field -> what it must do."""

    def refused(**fields: Any) -> str:
        with pytest.raises(openai.APIStatusError) as error:
            embed(**fields)
        return error.value.param

    def texts() -> bool:
        ids = client.post("/completions/render", body={"prompt": TEXT}, cast_to=object)["data"][0]
        answers = [embed(TEXT), embed([TEXT, "b"]), embed(ids["prompt_token_ids"]), embed([[5], [6, 7]])]
        assert first(answers[0]) == first(answers[1]) == first(answers[2])
        return len(answers[3].data) == 2 and refused(input=[]) == "input"

    def normalized(name: str) -> bool:
        plain = first(embed(**{name: False}))
        scaled = [value / length(plain) for value in plain]
        return first(embed()) == pytest.approx(scaled, abs=1e-6) and abs(length(plain) - 1) > 0.01

    def salted() -> bool:
        return first(embed(cache_salt="mine")) == first(embed()) and refused(cache_salt="") == "cache_salt"

    return {
        "input": texts,
        "model": lambda: embed(model=None).model == MODEL and refused(model="nope") == "model",
        "encoding_format": lambda: (
            isinstance(first(embed(encoding_format="base64")), str)
            and refused(encoding_format="hex") == "encoding_format"
        ),
        "dimensions": lambda: len(first(embed(dimensions=8))) == 8 and refused(dimensions=0) == "dimensions",
        "pooling": lambda: first(embed(pooling="mean")) != first(embed(pooling="last")),
        "normalize": lambda: normalized("normalize"),
        "use_activation": lambda: normalized("use_activation"),
        "truncate_prompt_tokens": lambda: embed(truncate_prompt_tokens=3).usage.prompt_tokens == 3,
        # The default model has no BOS that it could leave out.
        "add_special_tokens": lambda: first(embed(add_special_tokens=False)) == first(embed()),
        "priority": lambda: (
            first(embed(priority=3)) == first(embed()) and refused(priority="a") == "priority"
        ),
        "cache_salt": salted,
    }


def test_every_field_of_the_table_has_a_case_and_what_is_honoured_its_effect(effects):
    assert set(SUPPORT) == set(effects) | set(REFUSED) | set(IGNORED)
    for name, holds in effects.items():
        assert SUPPORT[name] == "honoured" and holds(), name


def test_refused_fields_say_so_and_ignored_ones_change_nothing(embed):
    for name, value in REFUSED.items():
        neutral = refused_fields(EmbeddingRequest)[name]
        with pytest.raises(openai.BadRequestError) as error:
            embed(**{name: value})
        assert error.value.param == name
        assert error.value.body["message"] == f"{name} is not supported yet; {leave_out(neutral)}."
        for accepted in (None, *neutral):
            assert embed(**{name: accepted}).data
    assert first(embed(**IGNORED)) == first(embed())
