"""The ranges of pooling parameters."""

from __future__ import annotations

import pytest

from streamllm import PoolingParams
from streamllm.errors import InvalidRequestError


def test_defaults_are_the_servers_pooling_normalised_and_whole():
    params = PoolingParams()
    assert (params.pooling, params.normalize, params.dimensions) == (None, True, None)
    assert params.clone(pooling="mean", truncate_prompt_tokens=-1) == PoolingParams(
        pooling="mean", truncate_prompt_tokens=-1
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pooling", "max"),
        ("pooling", ""),
        ("pooling", 1),
        ("normalize", 1),
        ("normalize", None),
        ("dimensions", 0),
        ("dimensions", -1),
        ("dimensions", True),
        ("dimensions", 2.0),
        ("dimensions", 2**31),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", True),
    ],
)
def test_what_is_out_of_range_is_named(field, value):
    with pytest.raises(InvalidRequestError, match=field) as caught:
        PoolingParams(**{field: value})
    assert caught.value.param == field
