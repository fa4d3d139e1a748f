from __future__ import annotations

import socket

import pytest

from streamllm.errors import ConfigError
from streamllm.ray_cluster import check_address


def test_an_address_that_does_not_answer_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        check_address(f"127.0.0.1:{port}", "--ray-address")
        check_address(f"ray://127.0.0.1:{port}", "--ray-address")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        said = rf"the Ray cluster at {address} \(--ray-address\) does not answer: Connection refused"
        with pytest.raises(ConfigError, match=said):
            check_address(address, "--ray-address")


@pytest.mark.parametrize("address", [None, "auto", "local", "other://127.0.0.1:1"])
def test_what_is_rays_to_find(address: str | None) -> None:
    check_address(address, "$RAY_ADDRESS")


@pytest.mark.parametrize("address", ["", " "])
def test_an_address_without_a_word(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^\$RAY_ADDRESS is empty: let it name a Ray cluster \(HOST:PORT"):
        check_address(address, "$RAY_ADDRESS")
