"""The address of a Ray cluster, before Ray sees it."""

from __future__ import annotations

import socket

from streamllm.errors import ConfigError

CONNECT_SECONDS = 10.0


def check_address(address: str | None, name: str) -> None:
    """That somebody answers there: Ray itself would wait for minutes.

    Args:
        address: ``HOST:PORT`` or ``ray://HOST:PORT``; ``None``, words (``auto``) and other schemes are Ray's.
        name: where the user has set it.

    Raises:
        ConfigError: nobody answers at host and port, or the address is empty.
    """
    if address is None:
        return
    if not address.strip():
        raise ConfigError(
            f"{name} is empty: let it name a Ray cluster (HOST:PORT, or auto), or leave it out for one on "
            "this machine."
        )
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal() or "://" in host:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"the Ray cluster at {address} ({name}) does not answer: {error.strerror or error}. "
            "`ray start --head` starts one."
        ) from None
