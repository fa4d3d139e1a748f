"""``streamllm chat`` and ``complete``: against a real server, and with an engine in this process."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server.serving import TEXT, make_engine, run_server, text_script

from streamllm.cli.client import Answer, Piece, _lines
from streamllm.cli.display import show, split_blocks
from streamllm.cli.main import main

ANSWER = "Ja \u2028 # řeka\n"


@pytest.fixture(scope="module")
def server():
    with run_server(script=text_script(ANSWER, ends=True)) as running:
        yield running


def lines_in(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_one_question_answered_as_plain_text(server, capsys):
    assert main(["chat", "--url", server.url, "--quick", "hi"]) == 0
    assert capsys.readouterr() == (ANSWER + "\n", "")
    server.wait_idle()


def test_a_question_may_begin_with_a_dash(server, capsys):
    assert main(["chat", "--url", server.url, "--quick", "- really?"]) == 0
    assert main(["chat", "--url", server.url, "--quick=--why"]) == 0
    assert capsys.readouterr().out == 2 * (ANSWER + "\n")


@pytest.mark.parametrize("spelling", ["{}/v1", "{}/", "{}/v1/"])
def test_spellings_of_a_url(server, capsys, spelling):
    assert main(["complete", "--url", spelling.format(server.url), "--quick", "hi"]) == 0
    assert main(["complete", "--url", server.url.removeprefix("http://"), "--quick", "hi"]) == 0
    assert capsys.readouterr().out == 2 * (ANSWER + "\n")


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_stats_go_to_standard_error(server, capsys, command):
    arguments = [command, "fake-model", "--url", server.url, "--quick", "hi", "--stats", "--max-tokens", "4"]
    assert main(arguments) == 0
    out, error = capsys.readouterr()
    assert out.startswith("Ja ") and "#" not in out
    assert (
        error.startswith("TTFT ")
        and " ms, 4 tokens, " in error
        and error.endswith(" tok/s, ended by length\n")
    )


def test_a_conversation_remembers_until_it_is_reset(server, capsys, monkeypatch):
    asked = []
    from streamllm.cli.client import ApiClient

    original = ApiClient.ask
    monkeypatch.setattr(
        ApiClient, "ask", lambda self, path, body: asked.append(body) or original(self, path, body)
    )
    lines_in(monkeypatch, "one", "two", "/nonsense", "/reset", "three", "/exit", "never")
    assert main(["chat", "--url", server.url, "--system", "Be brief.", "--temperature", "0"]) == 0
    out, error = capsys.readouterr()
    assert out == 3 * (ANSWER + "\n")
    assert "/nonsense is no command" in error
    system = {"role": "system", "content": "Be brief."}
    assert [len(body["messages"]) for body in asked] == [2, 4, 2]
    assert asked[1]["messages"] == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "two"},
    ]
    assert asked[2]["messages"] == [system, {"role": "user", "content": "three"}]
    assert all(body["temperature"] == 0 for body in asked)


def test_an_engine_in_this_process_answers_the_same(capsys, monkeypatch):
    seen = []

    def from_config(config):
        seen.append(config)
        return make_engine(script=text_script(ANSWER, ends=True))[0]

    monkeypatch.setattr("streamllm.engine.async_engine.AsyncEngine.from_config", from_config)
    assert main(["chat", "some/model", "--max-model-len", "8K", "--quick", "hi"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    assert (seen[0].model, seen[0].max_model_len) == ("some/model", 8192)
    lines_in(monkeypatch, "a", "b")
    assert main(["complete"]) == 0
    assert capsys.readouterr().out == 2 * (ANSWER + "\n")


def test_a_key_from_flag_or_environment(capsys, monkeypatch):
    monkeypatch.delenv("STREAMLLM_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with run_server(script=text_script("ok", ends=True), api_key=("sk-ключ",)) as running:
        chat = ["chat", "--url", running.url, "--quick", "hi"]
        assert main(chat) == 1
        assert "--api-key" in capsys.readouterr().err
        assert main([*chat, "--api-key", "sk-ключ"]) == 0
        monkeypatch.setenv("STREAMLLM_API_KEY", "sk-ключ")
        assert main(chat) == 0


def test_a_url_that_does_not_answer_is_one_line_and_exit_code_1():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-m", "streamllm.cli.main", "chat", "--url", url, "--quick", "hi"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and f"{url} does not answer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", "URL", "other-model"], 1, "no model 'other-model'; it serves fake-model"),
        (["--url", "URL", "--max-tokens", "0"], 1, "max_tokens"),
        (["--url", "URL", "--threads", "2"], 2, "--threads is the engine's"),
        (["--url", "ftp://x"], 2, "--url must be like http://host:port"),
        (["--url", "http://:x"], 2, "--url"),
        (["--api-key", "x"], 2, "name it with --url"),
        (["--url"], 2, "--url"),
        (["/no/such/model"], 1, "/no/such/model"),
        (["--chat-template", "/no/such/file"], 2, "--chat-template"),
    ],
)
def test_what_cannot_be_done_is_one_line(server, capsys, arguments, code, words):
    arguments = [server.url if argument == "URL" else argument for argument in arguments]
    assert main(["chat", "--quick", "hi", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error and error.startswith("streamllm: error: ") and error.count("\n") == 1


def test_an_answer_that_breaks_off_says_so(server, capsys, monkeypatch):
    with run_server(script=text_script(TEXT), step_seconds=0.01) as running:
        from streamllm.cli import client

        original = client._lines

        def kill_after(chunks):
            for number, line in enumerate(original(chunks)):
                if number == 20:
                    running.server._state.engine.fail("a test")
                yield line

        monkeypatch.setattr(client, "_lines", kill_after)
        assert main(["chat", "--url", running.url, "--quick", "hi", "--max-tokens", "2000"]) == 1
    out, error = capsys.readouterr()
    assert out.startswith(TEXT[:5]) and out.endswith("\n")
    assert "broke off" in error and error.count("\n") == 1


def test_reasoning_stays_out_of_pipes_and_of_the_conversation(capsys):
    def events():
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield {"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]}
        yield {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"completion_tokens": 2}}

    answer = Answer(events())
    show(answer, markdown=True)
    assert capsys.readouterr().out == "yes\n"
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("yes", "stop", 2)
    assert list(Answer(events())) == [Piece("hm", is_thought=True), Piece("yes")]


def test_stream_lines_end_at_line_feeds_only():
    assert list(_lines(iter([b"a\xe2\x80", b"\xa8b\n\ncd", b"e\n"]))) == [
        "a\u2028b".encode(),
        b"",
        b"cde",
        b"",
    ]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\n\ntw", "one\n\n"),
        ("one\n\n", ""),
        ("- item\n\n  goes on", ""),
        ("```py\na\n\nb", ""),
        ("```py\na\n\nb\n```\n\nc", "```py\na\n\nb\n```\n\n"),
        ("a\n\n~~~\n```\n\nb", "a\n\n"),
        ("", ""),
    ],
)
def test_where_markdown_is_cut(text, finished):
    assert split_blocks(text) == (finished, text[len(finished) :])


class Terminal:
    """The command on a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "streamllm.cli.main", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            # Where the tests run in the background, Ctrl-C is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def wait_for(self, words: str, timeout: float = 30.0) -> str:
        """What was shown up to ``words``, since the last call."""
        deadline = time.monotonic() + timeout
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-500:]
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
        shown, _, self.text = self.text.partition(words)
        return shown

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for_prompt(self) -> None:
        """Until the prompt is shown and a key is waited for: Python notices an interrupt in between with the
        next key only."""
        self.wait_for("> ")
        status = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + 30
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_terminal_gets_markdown_and_two_interrupts_leave():
    text = "Some **bold** words \x1b[31m.\n\n" + "- item\n" * 10
    with run_server(script=text_script(text), step_seconds=0.005) as running:
        terminal = Terminal("chat", "--url", running.url, "--stats")
        try:
            terminal.wait_for("> ")
            terminal.type("hi\n")
            shown = terminal.wait_for(" • ")
            assert "bold" in shown and "**bold**" not in shown
            assert "\x1b[31m" not in shown and "\\x1b[31m" in shown
            terminal.interrupt()
            terminal.wait_for("TTFT ")
            terminal.wait_for("stopped")
            terminal.wait_for_prompt()
            running.wait_idle()
            terminal.interrupt()
            assert terminal.process.wait(10) == 130
        finally:
            terminal.close()
