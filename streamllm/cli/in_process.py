"""An engine in this process behind the server's own routes, on a Unix socket that nobody else can reach."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import StreamLLMError

if TYPE_CHECKING:
    from streamllm.server.run import Server


@contextlib.contextmanager
def private_server(engine_config: EngineConfig, request_settings: dict[str, Any]) -> Iterator[str]:
    """A loaded and running server; yields the path of its socket.

    Templates, reasoning parsers, streaming and aborts are then the same as over the network.

    Args:
        request_settings: of ServerConfig, those that decide what becomes of a request.

    Raises:
        ConfigError: a setting cannot be honoured.
        ModelLoadError: the model cannot be run.
    """
    # The folder is the user's alone (mode 0700), and so is the socket in it.
    with tempfile.TemporaryDirectory(prefix="streamllm-") as folder:
        config = ServerConfig(
            **request_settings,
            data_dir=folder,
            access_log="off",
            uvicorn_log_level="warning",
            disable_page=True,
        )
        from streamllm.engine.async_engine import AsyncEngine
        from streamllm.server.run import calm_garbage_collector, make_server

        engine = AsyncEngine.from_config(engine_config)
        calm_garbage_collector()
        path = str(Path(folder) / "engine.sock")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            sock.listen()
            sock.setblocking(False)
            with _running(make_server(engine, config), sock):
                yield path


@contextlib.contextmanager
def _running(server: Server, sock: socket.socket) -> Iterator[None]:
    """The server in a thread of its own: Ctrl-C is the main thread's."""
    thread = threading.Thread(target=server.run, args=([sock],), name="streamllm-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise StreamLLMError("the engine did not start; the lines above say why.")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()
