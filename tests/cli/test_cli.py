from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from streamllm.cli import serve
from streamllm.cli.main import build_parser, main
from streamllm.config import EngineConfig, ServerConfig, settings_of


def parse(*arguments: str):
    _, parser = build_parser()
    return serve.read_configs(parser.parse_args(serve.prepare(list(arguments), parser)))


def test_every_setting_is_a_flag_and_an_llm_argument():
    _, parser = build_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for declared in (*settings_of(EngineConfig), *settings_of(ServerConfig)):
        assert "--" + declared.name.replace("_", "-") in flags
        assert declared.metadata["help"]


def test_flags_reach_their_configuration():
    engine, server = parse(
        "some/model", "--max-model-len", "4K", "--num-kv-blocks=64", "--kv-cache-memory-bytes", "1GiB",
        "--gpu-memory-utilization", "0.5", "--enforce-eager", "--trust-remote-code", "--port", "9",
        "--api-key", "a", "b", "--served-model-name", "x",
    )  # fmt: skip
    assert (engine.model, engine.max_model_len, engine.num_gpu_blocks_override) == ("some/model", 4096, 64)
    assert (engine.kv_cache_memory_bytes, engine.gpu_memory_utilization) == (2**30, 0.5)
    assert engine.enforce_eager and engine.trust_remote_code
    assert (server.port, server.api_key, server.served_model_name) == (9, ("a", "b"), ("x",))


@pytest.mark.parametrize("arguments", [("m",), ("--model", "m"), ("m", "--model", "m")])
def test_the_model_is_named_either_way(arguments):
    assert parse(*arguments)[0].model == "m"


def test_the_api_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("STREAMLLM_API_KEY", "secret")
    assert parse()[1].api_key == ("secret",)
    assert parse("--api-key", "other")[1].api_key == ("other",)


@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-parallel-size", "1"),
        ("-tp", "1"),
        ("--enable-chunked-prefill",),
        ("--no-enable-prefix-caching",),
        ("--load-format=auto",),
    ],
)
def test_vllm_flags_that_change_nothing_are_passed_over(flags):
    assert parse(*flags, "m")[0].model == "m"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-num-sqs", "4"], ["--max-num-sqs", "--max-num-seqs"]),
        (["serve", "--tensor-parallel-size", "2"], ["--tensor-parallel-size 2", "not supported"]),
        (["serve", "--lora-modules", "a=b"], ["--lora-modules", "does not support"]),
        (["serve", "--port", "99999"], ["--port", "65535"]),
        (["serve", "--port"], ["--port"]),
        (["serve", "--dtype", "int3"], ["--dtype", "float32"]),
        (["serve", "a", "--model", "b"], ["two models"]),
        (["serve", "--host", "no.such.host.invalid"], ["--host no.such.host.invalid"]),
        (["frobnicate"], ["frobnicate"]),
    ],
)
def test_a_command_line_that_cannot_be_honoured_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words)


def test_a_busy_port_is_said_before_the_model_is_looked_for(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "/no/such/model", "--host", "127.0.0.1", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing.gguf"])
def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(model, capsys):
    assert main(["serve", model, "--host", "127.0.0.1", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("streamllm: error:") and error.count("\n") == 1
    assert model in error


@pytest.mark.parametrize(
    "code", ["import streamllm", "from streamllm.cli.main import main; main(['--help'])"]
)
def test_starting_imports_nothing_heavy(code):
    check = (
        f"import sys; {code}; assert not {{'torch', 'transformers', 'numpy', 'starlette'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL, env=os.environ)
