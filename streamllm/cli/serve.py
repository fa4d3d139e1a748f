"""``streamllm serve``: flags, the port, the model, then the server, in the order in which they can fail."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from streamllm.cli.arguments import add_settings, drop_other_flags, settings_from
from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError

API_KEY_VARIABLE = "STREAMLLM_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_positional", nargs="?", metavar="MODEL", help="as --model; SmolLM2-135M-Instruct if left out"
    )
    add_settings(parser, EngineConfig, "engine")
    add_settings(parser, ServerConfig, "server")


def prepare(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments that ``parser`` knows; see :func:`drop_other_flags`."""
    return drop_other_flags(arguments, parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        ModelLoadError: the model cannot be run.
    """
    engine_config, server_config = read_configs(options)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for quiet in ("httpx", "httpcore", "huggingface_hub", "filelock"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    with bind(server_config) as sock:
        from streamllm.engine.async_engine import AsyncEngine
        from streamllm.server.run import serve

        return serve(lambda: AsyncEngine.from_config(engine_config), server_config, sock)


def read_configs(options: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The two configurations that a parsed command line asks for."""
    engine_settings = settings_from(options, EngineConfig)
    if options.model_positional is not None:
        if engine_settings.get("model", options.model_positional) != options.model_positional:
            raise ConfigError(
                f"two models were named, {options.model_positional} and --model {engine_settings['model']}."
            )
        engine_settings["model"] = options.model_positional
    server_settings = settings_from(options, ServerConfig)
    if "api_key" not in server_settings and os.environ.get(API_KEY_VARIABLE):
        server_settings["api_key"] = (os.environ[API_KEY_VARIABLE],)
    return EngineConfig(**engine_settings), ServerConfig(**server_settings)


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before the model loads so that a busy port is known at once.

    Raises:
        ConfigError: host or port cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {config.host} cannot be resolved: {error}.") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening at once makes a second server on the same port fail now, not after loading its model.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {config.port} on {config.host} cannot be used ({error.strerror or error}); "
            "choose another with --port."
        ) from None
    sock.setblocking(False)
    return sock
