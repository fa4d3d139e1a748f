"""``--help=TOPIC`` and the completion scripts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from streamllm.cli.completion import commands_of
from streamllm.cli.main import build_parser, main


def help_of(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_parts_of_the_help(capsys):
    server = help_of(capsys, "serve", "--help=server")
    assert "--port" in server and "--max-num-seqs" not in server
    assert help_of(capsys, "chat", "--help=sampling").count("  --") == 3
    for spelling in ("max-num-seqs", "--max-num-seqs", "max_num_seqs"):
        one = help_of(capsys, "serve", f"--help={spelling}")
        assert one.count("  --") == 1 and "Sequences that run at once" in one
    load = help_of(capsys, "bench", "serve", "--help=load")
    assert "--burst-size" in load and "--goodput" not in load
    assert help_of(capsys, "bench", "serve", "--help=goodput").count("  --") == 1
    word = help_of(capsys, "serve", "--help=chunk")
    assert "--max-num-batched-tokens" in word and "--port" not in word


@pytest.mark.parametrize(
    "command", [["serve"], ["bench"], ["bench", "serve"], ["bench", "latency"], ["bench", "throughput"]]
)
def test_the_whole_help(capsys, command):
    everything = help_of(capsys, *command, "--help=all")
    assert f"usage: streamllm {' '.join(command)} " in everything
    assert command != ["serve"] or ("--port" in everything and "--max-num-seqs" in everything)
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert capsys.readouterr().out == everything


@pytest.mark.parametrize(
    ("topic", "words"), [("max-num-sqs", "Did you mean max-num-seqs?"), ("zzz", "Groups: "), ("", "Groups: ")]
)
def test_help_about_nothing_is_one_line_and_exit_code_2(capsys, topic, words):
    assert main(["serve", f"--help={topic}"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def script(capsys, shell: str) -> str:
    return help_of(capsys, "completion", shell)


def bash_offers(text: str, *words: str) -> list[str]:
    call = """
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _streamllm
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", text + call, "bash", "streamllm", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_and_values(capsys):
    text = script(capsys, "bash")
    assert bash_offers(text, "ch") == ["chat"]
    assert {"serve", "run-batch", "completion"} <= set(bash_offers(text, ""))
    assert bash_offers(text, "serve", "--max-num-s") == ["--max-num-seqs"]
    assert bash_offers(text, "serve", "model", "--scheduling-policy", "") == ["fcfs", "priority"]
    assert bash_offers(text, "serve", "model", "--port", "1", "--no-enable-pre") == [
        "--no-enable-prefix-caching"
    ]
    assert bash_offers(text, "completion", "--max") == []
    assert bash_offers(text, "chat", "--quick", "serve", "--por") == []
    assert bash_offers(text, "bench", "") == ["serve", "latency", "throughput", "-h", "--help"]
    assert bash_offers(text, "bench", "serve", "--max-c") == ["--max-concurrency"]
    assert bash_offers(text, "bench", "serve", "--port", "1", "--ramp-up-strategy", "") == [
        "linear", "exponential",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_scripts_name_everything_and_parse(capsys, shell):
    text = script(capsys, shell)
    for command in commands_of(build_parser()[0]):
        for flag in command.flags:
            assert flag.lstrip("-") in text
        assert " ".join(command.words) in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_flags_and_values(capsys):
    def offers(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"{text}\ncomplete -C '{line}'"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    text = script(capsys, "fish")
    assert offers("streamllm ch") == ["chat"]
    assert offers("streamllm serve --max-num-s") == ["--max-num-seqs"]
    assert offers("streamllm serve m --scheduling-policy ") == ["fcfs", "priority"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_commands_flags_and_values(capsys):
    def offers(*words: str) -> list[str]:
        call = """
        compadd() { shift; print -l -- ${(M)${(P)1}:#${words[CURRENT]}*} }
        _files() { }
        words=("$@"); CURRENT=$#; _streamllm
        """
        done = subprocess.run(
            ["zsh", "-f", "-c", f"compdef() {{ }}\n{text}\n{call}", "zsh", "streamllm", *words],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

    text = script(capsys, "zsh")
    assert offers("ch") == ["chat"]
    assert offers("serve", "--max-num-s") == ["--max-num-seqs"]
    assert offers("serve", "m", "--scheduling-policy", "") == ["fcfs", "priority"]
