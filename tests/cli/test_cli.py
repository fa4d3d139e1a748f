from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest

from streamllm.cli import serve
from streamllm.cli.main import build_parser, main
from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError
from streamllm.logs import EscapingFormatter
from streamllm.settings import settings_of


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


def test_where_api_keys_come_from(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", "second")
    assert parse()[1].api_key == ("second",)
    monkeypatch.setenv("STREAMLLM_API_KEY", "first, more")
    assert parse()[1].api_key == ("first", "more")
    flags = parse("--api-key", "a", "--api-key", "b,c", "d")[1]
    assert flags.api_key == ("a", "b", "c", "d")
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-ключ \n\n  other\n")
    assert parse("--api-key-file", str(file))[1].api_key == ("sk-ключ", "other")
    assert parse("--api-key-file", str(file), "--api-key", "a")[1].api_key == ("a", "sk-ключ", "other")
    assert parse("--admin-api-key", "root")[1].admin_api_key == ("root",)


def test_a_key_file_without_keys_leaves_no_server_open(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        parse("--api-key-file", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("--api-key-file", str(tmp_path / "missing"))


def test_chat_templates_as_files_and_as_text(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert parse("--chat-template", str(file))[1].chat_template == "{{ messages }}"
    assert parse("--chat-template", "{% if true %}x{% endif %}")[1].chat_template.startswith("{% if")
    for wrong in (str(tmp_path / "missing"), "{% for %}"):
        with pytest.raises(ConfigError, match="--chat-template"):
            parse("--chat-template", wrong)
    assert parse("--default-chat-template-kwargs", '{"a": 1}')[1].chat_template_variables == {"a": 1}
    for wrong in ("{", "[]", "3"):
        with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
            parse("--default-chat-template-kwargs", wrong)


def test_lists_in_vllms_spelling():
    assert parse("--allowed-origins", '["http://a", "http://b"]')[1].allowed_origins == (
        "http://a",
        "http://b",
    )
    assert parse("--allowed-origins", "x", "y")[1].allowed_origins == ("x", "y")
    with pytest.raises(ConfigError, match="--allowed-origins"):
        parse("--allowed-origins", "[x")


def test_logs_cannot_steer_a_terminal():
    formatter = EscapingFormatter("%(message)s")
    try:
        raise ValueError("\x1b[31m\r\x9b\u2028 ď")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "failed \x07", (), sys.exc_info())
    text = formatter.format(record)
    assert "failed \\x07" in text and "ValueError: \\x1b[31m\\r\\x9b\\u2028 ď" in text
    assert text.count("\n") >= 3


@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-parallel-size", "1"),
        ("-tp", "1"),
        ("--enable-chunked-prefill",),
        ("--no-enable-prefix-caching",),
        ("--load-format=auto",),
        ("--enable-request-id-headers",),
        ("--enable-server-load-tracking",),
    ],
)
def test_vllm_flags_that_change_nothing_are_passed_over(flags):
    assert parse(*flags, "m")[0].model == "m"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-num-sqs", "4"], ["--max-num-sqs", "--max-num-seqs"]),
        (["serve", "--data-parallel-size", "2"], ["--data-parallel-size 2", "not supported"]),
        (["serve", "--lora-modules", "a"], ["--lora-modules takes NAME=FOLDER, got a"]),
        (
            ["serve", "--max-loras", "4", "--max-cpu-loras", "2"],
            ["--max-cpu-loras", "at least --max-loras (4)"],
        ),
        (["serve", "--port", "99999"], ["--port", "65535"]),
        (["serve", "--port"], ["--port"]),
        (["serve", "--ssl-certfile", "/no/such.pem"], ["--ssl-certfile", "No such file"]),
        (["serve", "--ssl-keyfile", "/no/such.pem"], ["--ssl-certfile"]),
        (["serve", "--threads", "0"], ["--threads", "between 1 and 1024, got 0"]),
        (["serve", "--threads", "-2"], ["--threads", "between 1 and 1024, got -2"]),
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


def test_a_unix_socket_in_use_is_said_and_one_left_behind_replaced(capsys, tmp_path):
    path = tmp_path / "s.sock"
    serve = ["serve", "/no/such/model", "--uds", str(path)]
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        assert main(serve) == 2
        assert f"--uds {path} cannot be used (a server listens there)" in capsys.readouterr().err
    assert path.is_socket()
    assert main(serve) == 1  # the model is not there; the socket was to be had
    assert "/no/such/model" in capsys.readouterr().err
    assert not path.exists()
    path.write_text("a file")
    assert main(serve) == 2
    assert path.read_text() == "a file"
    for impossible in (str(tmp_path / "none" / "s.sock"), str(tmp_path / ("x" * 200)), ""):
        capsys.readouterr()
        assert main(["serve", "--uds", impossible]) == 2
        assert "--uds" in (error := capsys.readouterr().err) and error.count("\n") == 1


@pytest.mark.parametrize("path", ["llm", "llm/", "/a b", "/a?b", "/a#b", "http://x/llm", "/a\n"])
def test_a_root_path_that_is_none_is_refused(path, capsys):
    assert main(["serve", "--root-path", path]) == 2
    error = capsys.readouterr().err
    assert "--root-path must begin with /" in error and error.count("\n") == 1


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
