"""Connections between the engine and its workers: sockets that carry pickled messages in frames.

A frame is its payload's length (8 bytes, little-endian) and the payload. What comes over a connection is
unpickled, and so runs with this process's rights: before anything else both sides prove that they know the
launch's key (the challenge of :mod:`multiprocessing.connection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

HANDSHAKE_SECONDS = 10
"""What a stranger who connects and says nothing costs at most."""

_LENGTH = struct.Struct("<Q")
_RECEIVE_BYTES = 1 << 18
_SMALL_BYTES = 1 << 16
"""Up to here a copy is cheaper than a system call."""
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 4),
    # Keepalive waits for what was sent last, and that for a quarter of an hour.
    ("TCP_USER_TIMEOUT", 30_000),
)
"""A connection whose other side is silent breaks after 30 seconds."""

Address = str | tuple[str, int]
"""A Unix socket's path, or host and port."""


def packed(message: Any) -> bytes:
    """A message as :meth:`FrameChannel.send` takes it."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Listener:
    """Where workers connect to; a context manager.

    Args:
        host: the address to listen on, for workers on other machines; ``None`` for a Unix socket in a folder
            that is this user's alone.
        key: what workers must know.
    """

    def __init__(self, host: str | None, key: bytes) -> None:
        self._key = key
        self._folder = None
        if host is None:
            self._folder = tempfile.TemporaryDirectory(prefix="streamllm-")
            self.address: Address = str(Path(self._folder.name) / "workers.sock")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self.address)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.socket(family)
            self._socket.bind((host, 0))
            self.address = host, self._socket.getsockname()[1]
        self._socket.listen(256)

    def accept(self, timeout: float) -> socket.socket | None:
        """The next connection of somebody who knows the key; ``None`` if there is none within ``timeout``
        seconds."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.setblocking(True)
        try:
            return _authenticated(connection, self._key, first=deliver_challenge, then=answer_challenge)
        except (OSError, EOFError, AuthenticationError):
            return None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()


def connect(address: Address, key: bytes) -> socket.socket:
    """A connection to a :class:`Listener`.

    Raises:
        OSError: nobody listens there.
        AuthenticationError: who listens does not know the key.
    """
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        connection = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
        connection.setblocking(True)
    return _authenticated(connection, key, first=answer_challenge, then=deliver_challenge)


def _authenticated(
    connection: socket.socket,
    key: bytes,
    *,
    first: Callable[[Any, bytes], None],
    then: Callable[[Any, bytes], None],
) -> socket.socket:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is gone says nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    _limit(connection, HANDSHAKE_SECONDS)
    challenged = Connection(os.dup(connection.fileno()))
    try:
        first(challenged, key)
        then(challenged, key)
    except BaseException:
        connection.close()
        raise
    finally:
        challenged.close()
    _limit(connection, 0)
    return connection


def _limit(connection: socket.socket, seconds: int) -> None:
    """How long one system call may block; 0: for ever."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def send_blocking(connection: socket.socket, message: bytes) -> None:
    """Sends a packed message, however long that takes.

    Raises:
        OSError: the other side is gone.
    """
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def receive_blocking(connection: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side has closed the connection.
        OSError: it is broken.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


class FrameChannel:
    """A connection on an event loop. Nothing blocks: what the socket does not take at once goes when it does.

    A message is sent in the call, not at the loop's next turn: the worker computes while the engine delivers.

    Args:
        connection: of :func:`connect` or :class:`Listener`; the channel's from now on.
        on_message: called on the loop with each message, in order.
        on_end: called on the loop, once, when the other side has closed the connection or it broke; not
            after :meth:`close`.
    """

    def __init__(
        self, connection: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._socket = connection
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._open = True
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def send(self, message: bytes) -> None:
        """Sends a packed message behind those before it; of a closed channel nothing."""
        if not self._open:
            return
        header, unsent = _LENGTH.pack(len(message)), self._unsent
        was_idle = not unsent
        if len(message) < _SMALL_BYTES:
            unsent.append(memoryview(header + message))
        else:
            unsent += (memoryview(header), memoryview(message))
        if was_idle:
            self._write()
            if unsent:
                self._loop.add_writer(self._socket, self._write)

    def close(self) -> None:
        """Closes the connection; harmless when it is closed."""
        if not self._open:
            return
        self._open = False
        self._unsent.clear()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _end(self) -> None:
        if self._open:
            self.close()
            self._on_end()

    def _write(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                sent = self._socket.send(unsent[0])
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                    return
                unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            unsent.clear()
            self._loop.call_soon(self._end)
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._received += data
        while self._open and (message := self._next_frame()) is not None:
            self._on_message(pickle.loads(message))

    def _next_frame(self) -> bytes | None:
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        with memoryview(received) as view:
            message = bytes(view[_LENGTH.size : end])
        del received[:end]
        return message


def interface_of(host: str) -> str | None:
    """The network interface that has an IPv4 address: collectives must not take another by a host's name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(sock, 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None
