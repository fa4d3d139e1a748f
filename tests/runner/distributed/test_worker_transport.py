"""The connections of workers: who gets in, order and size of messages, errors that cross."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from multiprocessing import AuthenticationError

import numpy as np
import pytest

from streamllm.errors import InvalidRequestError, ModelLoadError, QueueFullError
from streamllm.ops.lora import LoraAdapter, LoraUpdate
from streamllm.runner.distributed.fingerprint import difference, fingerprint
from streamllm.runner.distributed.messages import AdapterReference, Failure, SentAdapter, Submit
from streamllm.runner.distributed.transport import (
    FrameChannel,
    Listener,
    connect,
    interface_of,
    packed,
    receive_blocking,
    send_blocking,
)
from streamllm.runner.messages import (
    NewSequence,
    OutputRow,
    PromptLogprobChunk,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
)
from streamllm.runner.token_rules import TokenRules
from streamllm.sampling_params import SamplingParams
from streamllm.sources.model_files import ModelFiles


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_who_knows_the_key_gets_in(host):
    with Listener(host, b"right") as listener:
        found = []
        thread = threading.Thread(target=lambda: found.append(connect(listener.address, b"right")))
        thread.start()
        server = listener.accept(10)
        thread.join()
        with server, found[0] as client:
            send_blocking(client, packed({"a": 1}))
            assert receive_blocking(server) == {"a": 1}
            client.close()
            with pytest.raises(EOFError):
                receive_blocking(server)


def test_a_machine_that_is_gone_is_noticed_on_both_sides():
    with Listener("127.0.0.1", b"key") as listener:
        found = []
        thread = threading.Thread(target=lambda: found.append(connect(listener.address, b"key")))
        thread.start()
        server = listener.accept(10)
        thread.join()
        with server, found[0] as client:
            for side in (server, client):
                idle, unacknowledged = (
                    side.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
                )
                assert 0 < idle < 30 and 0 < unacknowledged <= 30_000
                assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_strangers_do_not_get_in_and_keep_nobody_out(monkeypatch):
    monkeypatch.setattr("streamllm.runner.distributed.transport.HANDSHAKE_SECONDS", 1)
    with Listener("127.0.0.1", b"right") as listener:
        silent = socket.create_connection(listener.address)
        assert listener.accept(5) is None  # after a second
        wrong = []

        def try_wrong_key() -> None:
            try:
                connect(listener.address, b"wrong")
            except (AuthenticationError, EOFError, OSError) as error:
                wrong.append(error)

        thread = threading.Thread(target=try_wrong_key)
        thread.start()
        assert listener.accept(5) is None
        thread.join()
        assert wrong
        thread = threading.Thread(target=connect, args=(listener.address, b"right"))
        thread.start()
        server = listener.accept(5)
        thread.join()
        assert server is not None
        server.close()
        silent.close()


async def test_messages_keep_their_order_whatever_their_size():
    left, right = socket.socketpair()
    received: list[bytes] = []
    done = asyncio.Event()
    sizes = [0, 1, 10, 1 << 16, 5 << 20, 3, 1 << 20, 7]

    def take(message: bytes) -> None:
        received.append(message)
        if len(received) == len(sizes):
            done.set()

    ends: list[str] = []
    sender = FrameChannel(left, received.append, lambda: ends.append("sender"))
    reader = FrameChannel(right, take, lambda: ends.append("reader"))
    for index, size in enumerate(sizes):
        sender.send(packed(bytes([index]) * size))  # returns although nobody has read yet
    await asyncio.wait_for(done.wait(), 10)
    assert received == [bytes([index]) * size for index, size in enumerate(sizes)]
    sender.close()
    await asyncio.sleep(0.05)
    assert ends == ["reader"]
    reader.send(packed("nobody"))  # harmless


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("top_k is wrong", param="top_k", code="bad", status=422),
        QueueFullError("full"),
        ModelLoadError("no model"),
        ValueError("the batch has 9 tokens"),
    ],
)
def test_errors_arrive_as_they_are(error):
    copy = pickle.loads(pickle.dumps(Failure.of(error))).unpacked("worker 1")
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
    assert "worker 1" in str(copy.__cause__)


def test_an_error_that_cannot_be_sent_keeps_its_text():
    class Local(Exception):
        def __init__(self, number: int, *, text: str) -> None:
            super().__init__(f"{text} {number}")

    copy = pickle.loads(pickle.dumps(Failure.of(Local(3, text="bad")))).unpacked("worker 0")
    assert type(copy) is RuntimeError and str(copy) == "bad 3"


def test_a_step_arrives_as_it_is():
    rules = TokenRules(bias_ids=np.array([3], np.int32), held_back_ids=np.array([2], np.int32), min_tokens=4)
    sequence = NewSequence(1, 7, [1, 2], 0, [[4]], SamplingParams(top_k=3, n=2), 2, 2**63, 1, 2, rules)
    batch = ScheduledBatch(
        3, [sequence], [ScheduledRow(1, 0, 2, [], [(0, 0, [4])])], [OutputRow(0, 7)], finished_slots=[5]
    )
    copy = pickle.loads(packed(Submit(batch))).batch
    assert pickle.loads(packed(Submit(ScheduledBatch(4)))).batch == ScheduledBatch(4)
    own, theirs = batch.new_sequences.pop(), copy.new_sequences.pop()
    assert copy == batch
    assert theirs.params == own.params and theirs.seed == own.seed and theirs.rules.min_tokens == 4
    assert theirs.rules.early_bans.tolist() == [2] and theirs.rules.bias_ids.dtype == np.int32
    output = StepOutput(
        [[5], []],
        [None, None],
        [None, InvalidRequestError("no token", param="bad_words")],
        [PromptLogprobChunk(1, *(np.zeros(1, np.float32) for _ in range(2)), *(np.zeros((1, 0)),) * 2), "no"],
    )
    copy = pickle.loads(packed(output))
    assert copy.token_ids == output.token_ids and copy.errors[1].param == "bad_words"
    assert copy.prompt_logprobs[0].first == 1 and copy.prompt_logprobs[1] == "no"


def test_what_stands_for_an_adapter_travels_as_a_reference():
    update = LoraUpdate(0, np.zeros((2, 8), np.float32), np.zeros((4, 2), np.float32))
    adapter = LoraAdapter("a", b"digest", 2, {"q": (update,)})
    sent = SentAdapter.of(adapter)
    assert (sent.num_bytes, sent.updates) == (adapter.num_bytes, {})
    assert pickle.loads(packed([sent])) == [AdapterReference(b"digest")]


def test_fingerprints_name_what_differs(tmp_path):
    def model(name: str, config: str, weights: int) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(b"x" * weights)
        return fingerprint(ModelFiles(name, name, "folder", folder))

    ours = model("a", "{}", 10)
    assert difference(ours, model("b", "{}", 10)) is None
    assert difference(ours, model("c", '{"x": 1}', 10)) == "config.json has other contents"
    assert difference(ours, model("d", "{}", 12)) == "model.safetensors has 12 bytes instead of 10"
    assert difference(ours, {**ours, "more.bin": "1"}) == "more.bin is there, and not on the engine's"
    assert difference({**ours, "more.bin": "1"}, ours) == "more.bin is missing"


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
