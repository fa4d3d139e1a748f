"""Thinking before a constraint, and its budget: what the masks allow."""

import asyncio

import numpy as np
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer

from streamllm.engine.structured import GrammarCompiler, GrammarMasks, GrammarState
from streamllm.errors import InvalidRequestError
from streamllm.sampling_params import SamplingParams
from streamllm.structured_outputs import StructuredOutputsParams, Thinking


class Row:
    def __init__(self, grammar):
        self.grammar, self.finished, self.request = grammar, False, self


class Followed:
    """A grammar that is fed tokens, and says what may come next."""

    def __init__(self, compiler, loop, vocab_size, params):
        self._state = GrammarState(loop.run_until_complete(compiler.compile(params)))
        self._vocab_size = vocab_size

    def allowed(self):
        masks = GrammarMasks(1, self._vocab_size).fill([Row(self._state)], lambda request, error: None)
        return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())

    def feed(self, *token_ids):
        for token_id in token_ids:
            assert token_id in self.allowed(), token_id
            self._state.accept(token_id)
        return self


START, END = ord("<"), ord(">")


@pytest.fixture(scope="module")
def follow():
    loop, tokenizer = asyncio.new_event_loop(), ByteTokenizer()
    compiler = GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size)
    yield lambda **params: Followed(compiler, loop, tokenizer.vocab_size, SamplingParams(**params))
    compiler.close()
    loop.close()


YES = StructuredOutputsParams(choice=["yes"])


@pytest.mark.parametrize(
    "constraint",
    [
        YES,
        StructuredOutputsParams(regex="yes"),
        StructuredOutputsParams(json={"const": "yes"}),
        StructuredOutputsParams(grammar='start: "yes"'),
        StructuredOutputsParams(grammar='root ::= "yes"'),
    ],
)
def test_the_constraint_begins_behind_the_thinking(follow, constraint):
    grammar = follow(structured_outputs=constraint, thinking=Thinking.between_tokens(None, END))
    assert {ord("y"), ord("7"), END} <= grammar.allowed()
    assert EOS not in grammar.allowed()
    grammar.feed(*b"what now\n", END)
    assert grammar.allowed() <= {ord("y"), ord('"')}


def test_a_model_may_think_or_begin_its_answer_at_once(follow):
    thinking = Thinking.between_tokens(START, END)
    assert follow(structured_outputs=YES, thinking=thinking).allowed() == {START, ord("y")}
    assert follow(structured_outputs=YES, thinking=thinking).feed(*b"<hm>").allowed() == {ord("y")}
    assert follow(structured_outputs=YES, thinking=thinking).feed(*b"yes").allowed() == {EOS}


@pytest.mark.parametrize("constraint", [YES, None])
def test_a_budget_ends_the_thinking(follow, constraint):
    thinking = Thinking.between_tokens(None, END, 3)
    grammar = follow(structured_outputs=constraint, thinking=thinking)
    assert END in grammar.feed(*b"ab").allowed()
    assert grammar.feed(ord("c")).allowed() == {END}
    grammar.feed(END)
    assert grammar.allowed() == {ord("y")} if constraint else {ord("a"), EOS} <= grammar.allowed()


def test_a_budget_of_nothing_ends_it_at_once(follow):
    thinking = Thinking.between_tokens(None, END, 0)
    assert follow(thinking=thinking).allowed() == {END}
    assert follow(thinking=Thinking.between_tokens(START, END, 0)).feed(START).allowed() == {END}


def test_thinking_without_a_budget_or_constraint_needs_no_grammar():
    async def compiled():
        compiler = GrammarCompiler(ByteTokenizer(), [EOS], ByteTokenizer().vocab_size)
        return await compiler.compile(SamplingParams(thinking=Thinking.between_tokens(None, 1)))

    assert asyncio.run(compiled()) is None


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_a_budget_is_a_number_of_tokens(budget):
    with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
        Thinking.between_tokens(None, 1, budget)
