from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamllm.bench.client import sse_data

STREAM = ": ping\r\n\r\ndata: one\u2028\x85 line\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_events_are_the_same_however_the_network_cuts_them(size: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(STREAM), size):
            yield STREAM[start : start + size]

    data = [item async for item in sse_data(chunks())]
    assert data == ["one\u2028\x85 line".encode(), b"two", b"[DONE]"]
