"""``streamllm serve``: flags, the port, the model, then the server, in the order in which they can fail."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from streamllm.cli.arguments import add_settings, drop_other_flags, engine_settings, settings_from
from streamllm.cli.config_file import add_config_argument, expand_config
from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.logs import quieten_libraries, stderr_handler
from streamllm.replica_settings import ReplicaConfig

API_KEY_VARIABLES = ("STREAMLLM_API_KEY", "VLLM_API_KEY")
"""Where keys come from if no flag gives any; the first that is set counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_positional", nargs="?", metavar="MODEL", help="as --model; SmolLM2-135M-Instruct if left out"
    )
    add_config_argument(parser)
    add_settings(parser, EngineConfig, "engine")
    add_settings(parser, ServerConfig, "server")
    add_settings(parser, ReplicaConfig, "replicas")


def prepare(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments that ``parser`` knows, those of ``--config`` among them; see :func:`drop_other_flags` and
    :func:`expand_config`."""
    return expand_config(drop_other_flags(arguments, parser), parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        ModelLoadError: the model cannot be run.
    """
    replica_config = ReplicaConfig(**settings_from(options, ReplicaConfig))
    engine_config, server_config = read_configs(options)
    check_tls(server_config)
    logging.basicConfig(level=logging.INFO, handlers=[stderr_handler()])
    quieten_libraries()
    if replica_config.replicas is not None:
        from streamllm.deploy.launch import serve_replicas

        return serve_replicas(engine_settings(options), server_config, replica_config)
    with bind(server_config) as sock:
        from streamllm.engine.async_engine import AsyncEngine
        from streamllm.server.run import serve

        try:
            return serve(lambda: AsyncEngine.from_config(engine_config), server_config, sock)
        finally:
            if server_config.uds is not None:
                Path(server_config.uds).unlink(missing_ok=True)


def read_configs(options: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The two configurations that a parsed command line asks for."""
    server_settings = settings_from(options, ServerConfig)
    server_settings["api_key"] = read_api_keys(server_settings)
    if server_settings.get("chat_template"):
        server_settings["chat_template"] = read_chat_template(server_settings["chat_template"])
    return EngineConfig(**engine_settings(options)), ServerConfig(**server_settings)


def read_api_keys(settings: dict[str, Any]) -> tuple[str, ...]:
    """The keys that flags, file and environment give.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    keys = [*settings.get("api_key", ())]
    if (path := settings.get("api_key_file")) is not None:
        lines = [line.strip() for line in _read(path, "--api-key-file").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {path} holds no key.")
        keys += found
    if not keys:
        keys = [key for name in API_KEY_VARIABLES if (key := os.environ.get(name))][:1]
    return tuple(keys)


def read_chat_template(value: str) -> str:
    """A template's text: ``value`` itself where it is Jinja, else the file's that it names.

    Raises:
        ConfigError: no such file, or no valid Jinja.
    """
    source = value if "{{" in value or "{%" in value else _read(value, "--chat-template")
    from streamllm.text.chat_template import ChatTemplate

    try:
        ChatTemplate(source, {})
    except ModelLoadError as error:
        raise ConfigError(f"--chat-template: {error}") from None
    return source


def check_tls(config: ServerConfig) -> None:
    """Say before the model loads what is wrong with the TLS files.

    Raises:
        ConfigError: they cannot be read or do not fit together.
    """
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs cannot be used: {error.strerror or error}."
        ) from None


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before the model loads so that a busy port is known at once.

    Raises:
        ConfigError: host or port, or the Unix socket, cannot be had.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
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


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket at ``path``; one that a server left behind is replaced, anything else there is not."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError("a server listens there")
            Path(path).unlink()
        sock.bind(path)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds {path} cannot be used ({error.strerror or error}); name another.") from None
    sock.setblocking(False)
    return sock
