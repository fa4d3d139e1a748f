from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.deploy.prompt_prefix import BOUNDARIES, CHUNK_BYTES, MAX_HASHES, prefix_hashes

SYSTEM = {"role": "system", "content": "Answer as a pirate would. " * 40}
QUESTION = {"role": "user", "content": "Where is the treasure? " * 30}
ANSWER = {"role": "assistant", "content": "Below the palm. " * 60}

texts = st.text(max_size=3000)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}), max_size=5
)


def common_beginning(a, b):
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def body(**fields):
    return json.dumps(fields).encode()


@settings(deadline=None, max_examples=50)
@given(messages, messages)
def test_the_next_turn_extends_the_chain(first, more):
    before = prefix_hashes(body(messages=first))
    assert prefix_hashes(body(messages=first + more))[: len(before)] == before


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 8000), texts, texts)
def test_chains_agree_exactly_as_far_as_the_texts_do(num_common, a, b):
    a, b = ("é" * num_common + text for text in (a, b))
    common = common_beginning(a.encode(), b.encode())
    chains = [prefix_hashes(body(prompt=text)) for text in (a, b)]
    for chain, text in zip(chains, (a, b), strict=True):
        assert len(chain) == sum(end <= len(text.encode()) for end in BOUNDARIES)
    assert common_beginning(*chains) == chains[0][: sum(end <= len(common) for end in BOUNDARIES)]


@pytest.mark.parametrize(
    "other",
    [
        {"content": SYSTEM["content"], "role": "system"},
        {"role": "system", "content": [{"type": "text", "text": SYSTEM["content"]}], "name": None},
        {"role": "system", "content": [{"type": "text", "text": text} for text in (SYSTEM["content"], "")]},
    ],
)
def test_the_same_message_written_otherwise(other):
    assert prefix_hashes(body(messages=[SYSTEM])) == prefix_hashes({"messages": [other]}) != []


def test_the_routes_agree_about_a_system_prompt():
    chat = prefix_hashes(body(messages=[SYSTEM, QUESTION]), "/v1/chat/completions")
    assert len(chat) > 4
    messages = body(system=SYSTEM["content"], messages=[QUESTION])
    assert prefix_hashes(messages, "/v1/messages") == chat
    responses = body(instructions=SYSTEM["content"], input=QUESTION["content"])
    assert prefix_hashes(responses, "/v1/responses") == chat


@pytest.mark.parametrize(
    "fields", [{"model": "adapter"}, {"cache_salt": "mine"}, {"tools": [{"type": "function"}]}]
)
def test_what_changes_the_cache_changes_every_hash(fields):
    plain = prefix_hashes(body(messages=[SYSTEM, QUESTION]))
    other = prefix_hashes(body(messages=[SYSTEM, QUESTION], **fields))
    assert plain and other and not set(plain) & set(other)


def test_tool_calls_and_pictures_count():
    def chain(message):
        return prefix_hashes(body(messages=[message, SYSTEM]))

    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    chains = [chain(message) for message in (call, picture, {"role": "assistant", "content": None})]
    assert len({tuple(chain) for chain in chains}) == 3


def test_token_ids_are_counted_four_bytes_each():
    ids = list(range(1000))
    chain = prefix_hashes(body(prompt=ids))
    assert len(chain) == sum(end <= 4000 for end in BOUNDARIES)
    assert prefix_hashes(body(prompt=[ids, [1, 2, 3]])) == chain
    assert prefix_hashes(body(prompt=ids[: CHUNK_BYTES // 4 - 1])) == []


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b"[]",
        b"\xff" * 400,
        b'{"messages": ' + b"[" * 100_000,
        body(messages=7),
        body(messages=["a" * 400]),
        body(messages={"role": "x" * 400}),
        body(prompt=[-1] * 400),
        body(prompt=[2**40] * 400),
        body(prompt=[0.5] * 400),
        body(prompt={"a": "b" * 400}),
        body(model="m" * 400),
        body(prompt="\ud800" * 400),
        body(input="a" * 400, previous_response_id="resp_1"),
    ],
)
def test_what_is_no_completion_has_none(wrong):
    assert prefix_hashes(wrong) == []


def test_other_paths_have_none():
    assert prefix_hashes(body(input="a" * 400), "/v1/embeddings") == []
    assert prefix_hashes(body(input="a" * 400), "/v1/responses") != []


@settings(deadline=None, max_examples=50)
@given(st.recursive(st.none() | st.integers() | texts, lambda c: st.lists(c) | st.dictionaries(texts, c)))
def test_any_field_values_are_survived(value):
    for field in ("messages", "prompt", "input", "tools", "system", "model"):
        prefix_hashes({"messages": [QUESTION], field: value})
        prefix_hashes(body(**{"messages": [QUESTION], field: [value]}))


def test_a_long_context_needs_few_hashes():
    chain = prefix_hashes(body(prompt="word " * 100_000))
    assert 50 < len(chain) <= MAX_HASHES
    assert len(prefix_hashes(body(prompt="word " * 1_000_000))) == MAX_HASHES
    gaps = itertools.pairwise(BOUNDARIES)
    assert all(end - start <= max(CHUNK_BYTES, start / 8) for start, end in gaps)


def test_every_process_finds_the_same():
    program = (
        "import sys; from streamllm.deploy.prompt_prefix import prefix_hashes;"
        "print(prefix_hashes(sys.stdin.buffer.read()))"
    )
    request = body(messages=[SYSTEM, QUESTION, ANSWER])
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    result = subprocess.run(
        [sys.executable, "-c", program], input=request, capture_output=True, env=environment
    )
    assert json.loads(result.stdout) == prefix_hashes(request)
