"""``--config FILE.yaml``."""

from __future__ import annotations

import pytest

from streamllm.cli import serve
from streamllm.cli.main import build_parser, main


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def parse(*arguments: str):
    _, parser = build_parser()
    return serve.read_configs(parser.parse_args(serve.prepare(list(arguments), parser)))


FILE = """
model: some/model          # spelt either way
max-num-seqs: 64
max_model_len: 8K
port: 9
enable-prefix-caching: false
trust_remote_code: true
api-key: [a, b]
kv-cache-memory-bytes: 1GiB
default-chat-template-kwargs: {enable_thinking: false}
revision:
data-parallel-size: 1    # of vLLM's, changes nothing here
"""


def test_a_file_holds_flags(config):
    engine, server = parse("--config", config(FILE))
    assert (engine.model, engine.max_num_seqs, engine.max_model_len) == ("some/model", 64, 8192)
    assert not engine.enable_prefix_caching and engine.trust_remote_code and engine.revision is None
    assert engine.kv_cache_memory_bytes == 2**30
    assert (server.port, server.api_key) == (9, ("a", "b"))
    assert server.chat_template_variables == {"enable_thinking": False}


@pytest.mark.parametrize("before", [True, False])
def test_the_command_line_wins(config, before):
    own = ["other/model", "--max-num-seqs=32", "--enable-prefix-caching", "--api-key", "c", "--port", "8000"]
    file = [f"--config={config(FILE)}"]
    engine, server = parse(*(own + file if before else file + own))
    assert (engine.model, engine.max_num_seqs, engine.max_model_len) == ("other/model", 32, 8192)
    assert engine.enable_prefix_caching
    assert (server.port, server.api_key) == (8000, ("c",))


def test_negated_keys_and_empty_files(config):
    assert not parse("--config", config("no-enable-prefix-caching: true"))[0].enable_prefix_caching
    assert parse("--config", config("no_enable_prefix_caching: false"))[0].enable_prefix_caching
    assert parse("--config", config("# nothing yet"))[0].max_num_seqs == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-sqs: 4", ["unknown key max-num-sqs", "Did you mean max-num-seqs?"]),
        ("data-parallel-size: 2", ["--data-parallel-size 2 is not supported"]),
        ("enable-eplb: true", ["--enable-eplb"]),
        ("enforce-eager: 3", ["enforce-eager must be true or false, got 3"]),
        ("port: 99999", ["--port", "65535"]),
        ("port: 1\nmax-num-seqs: [", ["is no YAML: line 2"]),
        ("- port", ["must hold lines like"]),
        ("config: x.yaml", ["config has no place"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2", ["are the same setting"]),
        ("num-kv-blocks: 1\nnum-gpu-blocks-override: 2", ["are the same setting"]),
        ("api-key: []", ["api-key is an empty list"]),
        ("1: 2", ["unknown key 1"]),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(config, capsys, text, words):
    assert main(["serve", "--config", config(text)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


def test_a_missing_file_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["chat", "--config", str(tmp_path / "none.yaml")]) == 2
    error = capsys.readouterr().err
    assert "cannot be read: No such file" in error and error.count("\n") == 1


def test_what_a_command_needs_may_stand_in_the_file(config, capsys, tmp_path):
    path = config(f"input-file: {tmp_path}/none.jsonl\noutput-file: {tmp_path}/out.jsonl\noverwrite: true")
    assert main(["run-batch", "--config", path]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err
    assert main(["run-batch", "--config", path, "-iother.jsonl"]) == 2
    assert "other.jsonl cannot be read" in capsys.readouterr().err
    assert main(["run-batch", "--config", config("overwrite: true")]) == 2
    assert "-i/--input-file" in capsys.readouterr().err


def test_chat_takes_a_file(config, capsys):
    assert main(["chat", "--config", config("quick: hi\nurl: ftp://x\nstats: true\nmax-tokens: 3")]) == 2
    assert "--url must be like" in capsys.readouterr().err
