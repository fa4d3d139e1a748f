"""Grammars over real tokenizers: what masks allow, and what is refused."""

import asyncio
import itertools
import re
import threading
import time

import numpy as np
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.json_schemas import ENFORCED, REFUSED

from streamllm.engine import grammar_trial, structured
from streamllm.engine.structured import GrammarCompiler, GrammarMasks, GrammarState
from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import BeamSearchParams, SamplingParams
from streamllm.structured_outputs import StructuredOutputsParams
from streamllm.text.tokenizer import Tokenizer


class Row:
    """What the masks see of a sequence."""

    def __init__(self, grammar: GrammarState | None, finished: bool = False) -> None:
        self.grammar = grammar
        self.finished = finished
        self.request = self


def no_failure(request, error):
    pytest.fail(error)


class Grammars:
    """A compiler with an event loop of its own."""

    def __init__(self, tokenizer, eos_token_ids):
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._loop = asyncio.new_event_loop()
        self.compiler = GrammarCompiler(tokenizer, eos_token_ids, tokenizer.vocab_size)

    def compile(self, **constraint):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
        return self._loop.run_until_complete(self.compiler.compile(params))

    def refusal(self, **constraint) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            self.compile(**constraint)
        assert caught.value.param == "structured_outputs" and caught.value.status == 400
        return caught.value.message

    def allowed(self, *states: GrammarState) -> set[int]:
        """What the first of the states allows, all of them being filled at once."""
        masks = GrammarMasks(len(states), self.vocab_size).fill([Row(state) for state in states], no_failure)
        return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())

    def accepts(self, text: str, **constraint) -> bool:
        """Whether the whole text, spelt in bytes, satisfies the constraint."""
        state = GrammarState(self.compile(**constraint))
        tokens = self.tokenizer.encode(text)
        for position, token_id in enumerate(tokens):
            if token_id not in self.allowed(state):
                return False
            if state.accept(token_id):
                return position == len(tokens) - 1
        return bool(self.allowed(state) & set(self.tokenizer.eos_token_ids))

    def close(self):
        self.compiler.close()
        self._loop.close()


@pytest.fixture(scope="module")
def grammars():
    grammars = Grammars(ByteTokenizer(), [EOS])
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def real(default_model_path):
    tokenizer = Tokenizer.from_gguf(default_model_path)
    grammars = Grammars(tokenizer, [0, *tokenizer.eos_token_ids])
    yield grammars
    grammars.close()


# -- masks -------------------------------------------------------------------------------------------------


def test_every_bit_of_a_mask_is_right(real):
    """Against the language written out: a token may follow where some text goes on with it."""
    language = {
        head + middle + tail
        for head in ("a", "the ", "é")
        for middle in map("".join, itertools.product("01x", repeat=3))
        for tail in ("", "!", "\n😀")
    }
    regex = "(a|the |é)[01x]{3}(!|\n😀)?"
    assert all(re.fullmatch(regex, text) for text in language)
    prefixes = {text.encode()[:end] for text in language for end in range(len(text.encode()) + 1)}
    spelling = {i: real.tokenizer.token_bytes(i) for i in range(real.vocab_size)}
    grammar = real.compile(regex=regex)
    for text in ("the 01x\n😀", "éx00", "a111!"):
        state, written = GrammarState(grammar), b""
        for token_id in real.tokenizer.encode(text):
            expected = {
                i for i, data in spelling.items()
                if data and not real.tokenizer.is_special(i) and written + data in prefixes
            }  # fmt: skip
            if written.decode("utf-8", "replace") in language:
                expected |= {0, *real.tokenizer.eos_token_ids}
            assert real.allowed(state) == expected
            written += spelling[token_id]
            stopped = state.accept(token_id)
            assert stopped == (written.decode("utf-8", "replace") in language and written[-1:] in b"!\x80")


def test_each_eos_token_may_end_a_complete_text_and_no_other(real):
    state = GrammarState(real.compile(regex="ab?"))
    assert not real.allowed(state) & {0, 2}
    state.accept(real.tokenizer.encode("a")[0])
    assert real.allowed(state) == {0, 2, real.tokenizer.encode("b")[0]}


def test_sequences_of_one_grammar_do_not_disturb_each_other(grammars):
    grammar = grammars.compile(regex="(ab|cd)e")
    one, other = GrammarState(grammar), GrammarState(grammar)
    assert grammars.allowed(one, other) == grammars.allowed(other, one) == {ord("a"), ord("c")}
    one.accept(ord("a"))
    other.accept(ord("c"))
    assert (grammars.allowed(one, other), grammars.allowed(other, one)) == ({ord("b")}, {ord("d")})


@pytest.mark.parametrize("number", [1, 2])
def test_a_token_that_is_not_allowed_fails_its_sequence_alone(grammars, number):
    grammar = grammars.compile(regex="ab")
    broken, sound = (Row(GrammarState(grammar)) for _ in range(2))
    rows, failures = [broken, sound][:number], []
    masks = GrammarMasks(2, 257)
    masks.fill(rows, no_failure)
    assert not broken.grammar.accept(ord("x"))
    filled = masks.fill(rows, lambda *failure: failures.append(failure))
    assert [request for request, _ in failures] == [broken] and "grammar failed" in failures[0][1]
    assert list(filled) == [1][: number - 1]
    assert grammars.compile(regex="ab") is not grammar  # which may have grown beyond its limits


def test_only_constrained_rows_that_still_run_get_a_mask(grammars):
    grammar = grammars.compile(choice=["b"])
    free, ended = Row(None), Row(GrammarState(grammar), finished=True)
    masks = GrammarMasks(8, 257)
    assert masks.fill([free, ended], no_failure) is None
    filled = masks.fill([free, Row(GrammarState(grammar)), ended, Row(GrammarState(grammar))], no_failure)
    expected = [0, 0, 0, 1 << ord("b") % 32, *[0] * 5]
    assert {index: row.tolist() for index, row in filled.items()} == {1: expected, 3: expected}


def test_a_mask_that_takes_too_long_fails_its_sequence(grammars, monkeypatch):
    rows = [Row(GrammarState(grammars.compile(regex="a"))) for _ in range(2)]
    masks, failures = GrammarMasks(2, 257), []
    monkeypatch.setattr(structured, "SLOW_STEP_SECONDS", 0.0)
    assert len(masks.fill(rows, no_failure)) == 2
    monkeypatch.setattr(structured, "SLOW_MASK_SECONDS", 0.0)
    assert masks.fill(rows, lambda _, error: failures.append(error)) == {}
    assert len(failures) == 2 and "too complex" in failures[0]


CHOICES = ["yes", "yes!", 'a"b\\c\n\x01/é', "."]


# -- notations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"regex": "^a/b[0-9]+$"}, ["a/b1", "a/b42"], ["a/b", "xa/b1", "a/b1x"]),
        ({"choice": CHOICES}, CHOICES, ["no", "ye"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}', '{ "é" :\n{}}'], ["[]", "1", '{"a"}', "{} "]),
        ({"json": {"type": "integer"}, "disable_any_whitespace": True}, ["12", "-3"], ["1.5", '"1"', " 1"]),
        ({"json": {"type": "array"}}, ["[1,2]", "[ 1,\n 2 ]"], ["[1" + " " * 21 + "]"]),
        (
            {"json": {"type": "array"}, "whitespace_pattern": " "},
            ["[1, 2]", "[1,2]"],
            ["[1,  2]", "[1,\n2]"],
        ),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]", "[]"], ["[1, 2]"]),
        ({"grammar": 'start: "a" x* \nx: "b" | "(" x ")"'}, ["a", "ab", "a(b)((b))"], ["b", "a(b"]),
        ({"grammar": 'root ::= "a" x*\nx ::= "b" | "(" x ")"'}, ["a", "ab", "a(b)((b))"], ["b", "a(b"]),
        ({"grammar": 'root  ::= item ("," item)*\nitem ::= [a-c]{2,3}'}, ["ab", "abc,cc"], ["a", "ab,"]),
        (
            {"structural_tag": {
                "triggers": ["<f="],
                "structures": [
                    {"begin": "<f=a>", "schema": {"enum": [1, 2]}, "end": "</f>"},
                    {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
                ],
            }},
            ["plain < text", "x <f=a>1</f> y <f=b>true</f>", ""],
            ["<f=c>", "<f=a>3</f>", "<f=a>true</f>", "x <f="],
        ),
    ],
)  # fmt: skip
def test_texts_that_satisfy_a_constraint_and_texts_that_do_not(grammars, constraint, right, wrong):
    assert [text for text in right if not grammars.accepts(text, **constraint)] == []
    assert [text for text in wrong if grammars.accepts(text, **constraint)] == []


def test_a_constraint_that_ends_at_once_gives_the_empty_text(grammars):
    assert grammars.accepts("", regex="") and not grammars.accepts("a", regex="")


@pytest.mark.parametrize("name", ENFORCED)
def test_supported_schemas_compile(grammars, name):
    assert grammars.compile(json=ENFORCED[name]) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_a_keyword_that_is_not_enforced_is_refused_by_name(grammars, name):
    schema, keyword = REFUSED[name]
    assert re.search(keyword, grammars.refusal(json=schema))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": {"$ref": "#"}}, "no text satisfies it"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"type": "string", "pattern": "(?<=x)y"}}, "look-behind"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"regex": r"\bword"}, "lookaround"),
        ({"regex": "["}, "unclosed character class"),
        ({"grammar": "start: start"}, "no text satisfies it"),
        ({"grammar": 'start: a\na: "x"\na: "y"'}, "duplicate rule"),
        ({"grammar": 'root ::= a\na ::= "x"\na ::= "y"'}, "a stands twice"),
        ({"grammar": 'root ::= a\nroot ::= "b"'}, "root stands twice"),
        ({"grammar": 'rules ::= "a"'}, "neither Lark"),
        ({"grammar": "hello"}, "neither Lark"),
        ({"grammar": 'root ::= [!--]'}, "not supported"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "temperature is not supported"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'}, "uniqueItems"),
        ({"grammar": '%import other.WORD\nstart: WORD'}, "other.WORD"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_enforced_say_why(grammars, constraint, reason):
    message = grammars.refusal(**constraint)
    assert reason in message and "\n" not in message and len(message) < 400


# -- compiling beside others -------------------------------------------------------------------------------

CHAIN = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(10_000)) + '\nr10000: "x"'
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(10, 25)]}


def test_constraints_that_crash_or_never_end_are_refused_and_others_go_on(grammars, monkeypatch):
    monkeypatch.setattr(grammar_trial, "COMPILE_SECONDS", 2.0)
    assert "too deep a recursion" in grammars.refusal(grammar=CHAIN)
    began = time.monotonic()
    assert "2 seconds" in grammars.refusal(json=ENDLESS)
    assert time.monotonic() - began < 4
    assert grammars.accepts("a", regex="a")


def test_a_thread_keeps_running_while_a_constraint_is_compiled(grammars):
    gaps, done = [0.0], threading.Event()

    def watch():
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    grammars.compile(
        json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
    )
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    assert max(gaps) < max(0.05, took / 4)


async def test_equal_constraints_are_compiled_once_and_kept():
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab")) for _ in range(3)]
    first, second = await asyncio.gather(*map(compiler.compile, params[:2]))
    assert first is second is await compiler.compile(params[2])
    for index in range(structured.MAX_CACHED):
        await compiler.compile(SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"a{index}")))
    assert await compiler.compile(params[0]) is not first
    compiler.close()


async def test_too_many_constraints_at_once_are_turned_away(monkeypatch):
    monkeypatch.setattr(structured, "MAX_WAITING", 2)
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)

    def compile(regex):
        return compiler.compile(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))

    results = await asyncio.gather(*map(compile, "abc"), return_exceptions=True)
    refused = [r for r in results if isinstance(r, InvalidRequestError)]
    assert [r.status for r in refused] == [503]
    assert await compile("c") is not None
    compiler.close()


async def test_a_request_that_gives_up_does_not_take_the_grammar_from_another():
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab"))
    leaver, stayer = (asyncio.ensure_future(compiler.compile(params)) for _ in range(2))
    await asyncio.sleep(0.01)
    leaver.cancel()
    assert await stayer is not None
    compiler.close()


async def test_constraints_that_nobody_waits_for_any_more_leave_the_queue(monkeypatch):
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)

    def compile(**constraint):
        return compiler.compile(SamplingParams(structured_outputs=StructuredOutputsParams(**constraint)))

    await compile(regex="a")  # the process has started
    monkeypatch.setattr(structured, "WAIT_SECONDS", 0.3)
    endless = [compile(json={**ENDLESS, "title": str(index)}) for index in range(6)]
    results = await asyncio.gather(*endless, return_exceptions=True)
    assert [result.status for result in results] == [503] * 6
    monkeypatch.undo()
    began = time.monotonic()
    assert await compile(regex="b") is not None
    assert time.monotonic() - began < 4  # behind two that run, not behind six
    compiler.close()


async def test_requests_without_a_constraint_start_nothing():
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)
    assert await compiler.compile(SamplingParams()) is None
    assert await compiler.compile(BeamSearchParams(beam_width=2)) is None
    assert compiler._pool is None
    with pytest.raises(InvalidRequestError, match="no EOS"):
        await GrammarCompiler(ByteTokenizer(), [], 257).compile(
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        )


async def test_a_process_that_cannot_start_is_an_error_of_the_server(monkeypatch):
    monkeypatch.setattr(grammar_trial.sys, "executable", "/does/not/exist")
    compiler = GrammarCompiler(ByteTokenizer(), [EOS], 257)
    with pytest.raises(InvalidRequestError) as caught:
        await compiler.compile(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert caught.value.status == 503
    compiler.close()
