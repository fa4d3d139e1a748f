"""Random text times random stop lists: what streams is what does not stream, character for character."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from dataclasses import dataclass

from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.fake_engine import make_engine
from helpers.fake_model import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.engine.sequence_text import SequenceText
from streamllm.sampling_params import RequestOutputKind, SamplingParams

CHARACTERS = "ab \nßé漢😀\u0301"
few_characters = st.text(alphabet=CHARACTERS, max_size=30)
any_stop = st.text(alphabet=CHARACTERS + "\ufffd", min_size=1, max_size=4)


@st.composite
def scripts(draw) -> list[int]:
    """Tokens of a byte each: text, cut and damaged anywhere, with EOS in between."""
    tokens = list(draw(few_characters).encode())
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(tokens)))
        tokens[position : position + draw(st.integers(0, 1))] = draw(
            st.sampled_from([[], [EOS], [0xFF], [0xE6], [0x80]])
        )
    return tokens + list(b"ab")  # never empty


@st.composite
def stop_lists(draw, script: list[int]) -> list[str]:
    """Strings that may or may not stand in the text, among them parts of it."""
    text = ByteTokenizer().decode(script)
    starts = draw(st.lists(st.integers(0, len(text) - 1), max_size=3))
    parts = [text[start : start + draw(st.integers(1, 5))] for start in starts]
    return draw(st.permutations(parts + draw(st.lists(any_stop, max_size=2))))


@st.composite
def parameters(draw, script: list[int]) -> SamplingParams:
    max_tokens = draw(st.integers(1, len(script)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(stop_lists(script)),
        stop_token_ids=draw(st.lists(st.sampled_from(list(b"a\xe6\x80")), max_size=2)),
        ignore_eos=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )


@dataclass
class Answer:
    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: str | int | None


def first_match(text: str, stops: list[str], begin: int) -> tuple[int, str] | None:
    """End and string of the match, none of it before ``begin``, that ends first; the longest of those."""
    for end in range(begin, len(text) + 1):
        ending = [stop for stop in stops if text[begin:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def answer_to(script: list[int], params: SamplingParams) -> Answer:
    """The rules written down once more, over the whole text at each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, begin = "", None
    for count, token in enumerate(script, start=1):
        reason, stop_reason = None, None
        if count >= params.min_tokens:
            begin = len(text) if begin is None else begin
            if token == EOS and not params.ignore_eos:
                reason = "stop"
            elif token in params.stop_token_ids:
                reason, stop_reason = "stop", token
        if reason is None and count == params.max_tokens:
            reason = "length"
        silent = reason == "stop" and not (stop_reason is not None and params.include_stop_str_in_output)
        if not silent and not (token == EOS and params.skip_special_tokens):
            text += decoder.decode(ByteTokenizer().token_bytes(token))
        match = first_match(text, params.stop, begin) if begin is not None else None
        if match is None and reason is not None:
            text += decoder.decode(b"", True)
            match = first_match(text, params.stop, begin)
        if match is not None:
            end, stop = match
            end -= 0 if params.include_stop_str_in_output else len(stop)
            return Answer(text[:end], count, "stop", stop)
        if reason is not None:
            return Answer(text, count, reason, stop_reason)
    raise AssertionError("max_tokens must end it")


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_pieces_join_to_the_text_up_to_the_stop(data):
    script = data.draw(scripts())
    params = data.draw(parameters(script)).clone(stop_token_ids=[], ignore_eos=True)
    expected = answer_to(script, params)
    text = SequenceText(ByteTokenizer(), params)
    pieces, stop = [], None
    for token in script[: params.max_tokens]:
        piece, stop = text.push(token, stops_armed=text.num_tokens + 1 >= params.min_tokens)
        pieces.append(piece)
        if stop is not None:
            break
    else:
        piece, stop = text.finish()
        pieces.append(piece)
    assert ("".join(pieces), stop) == (expected.text, expected.stop_reason)
    # Held back is no more than the beginning of a stop string, or of a character.
    for count in range(1, len(pieces)):
        shown = "".join(pieces[:count])
        assert expected.text.startswith(shown)


class ScriptRunner(FakeRunner):
    """Says the tokens that stand in the prompt after its first one."""

    def draw(self, token_ids, choice_index):
        script = token_ids[1 : 1 + token_ids[0]]
        return script[(len(token_ids) - 1 - token_ids[0]) % len(script)]


async def run_all(
    script: list[int], params: SamplingParams, queue_depth: int
) -> dict[RequestOutputKind, list]:
    """The same request as a stream of each kind, all in one batch."""
    engine = make_engine(runner=ScriptRunner, queue_depth=queue_depth)
    await engine.start()
    prompt = [len(script), *script]

    async def collect(kind: RequestOutputKind) -> list:
        stream = await engine.add_request(prompt, params.clone(output_kind=kind))
        return [output.outputs[0] async for output in stream if output.outputs]

    kinds = list(RequestOutputKind)
    results = await asyncio.gather(*map(collect, kinds))
    drawn = list(engine._executor.runner.num_drawn.values())
    kept = sum(len(output.token_ids) for output in results[kinds.index(RequestOutputKind.DELTA)])
    assert all(0 <= count - kept <= 1 for count in drawn), "more than one token was wasted"
    await engine.stop()
    return dict(zip(kinds, results, strict=True))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_streams_of_every_kind_are_equal(data):
    script = data.draw(scripts())
    params = data.draw(parameters(script))
    expected = answer_to(script, params)
    outputs = asyncio.run(run_all(script, params, data.draw(st.sampled_from([1, 2]))))
    (final,) = outputs[RequestOutputKind.FINAL_ONLY]
    assert (
        Answer(final.text, len(final.token_ids), final.finish_reason, final.stop_reason),
        final.token_ids,
    ) == (expected, script[: expected.num_tokens])
    deltas, grown = outputs[RequestOutputKind.DELTA], outputs[RequestOutputKind.CUMULATIVE]
    assert "".join(delta.text for delta in deltas) == final.text
    assert [token for delta in deltas for token in delta.token_ids] == final.token_ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (final.finish_reason, final.stop_reason)
    assert grown[-1] == final
    for before, after in itertools.pairwise(grown):
        assert after.text.startswith(before.text)
