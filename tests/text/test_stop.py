from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamllm.text.stop import StopStrings


def stream(stops: list[str], pieces: list[str], **options) -> tuple[list[str], str | None]:
    """What is sent for each piece, the end of generation included, and the stop string found."""
    matcher = StopStrings(stops, **options)
    sent = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.finish()], None


def first_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Start, end and stop string of the match that ends first, the longest of those: by trying all."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), end, stop
    return None


few_letters = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


@given(pieces=st.lists(few_letters, max_size=8), stops=stop_lists, include=st.booleans())
def test_sent_text_is_the_text_up_to_the_first_match(pieces, stops, include: bool) -> None:
    text = "".join(pieces)
    sent, stop = stream(stops, pieces, include_in_output=include)
    match = first_match(text, stops)
    if match is None:
        assert ("".join(sent), stop) == (text, None)
    else:
        assert ("".join(sent), stop) == (text[: match[1] if include else match[0]], match[2])


@given(pieces=st.lists(few_letters, max_size=8), stops=stop_lists)
def test_only_a_true_prefix_of_a_stop_string_is_kept_back(pieces, stops) -> None:
    matcher = StopStrings(stops)
    text = sent = ""
    for piece in pieces:
        text += piece
        emitted, stop = matcher.push(piece)
        sent += emitted
        if stop is not None:
            break
        prefixes = [stop[:n] for stop in stops for n in range(1, len(stop))]
        longest = max((prefix for prefix in prefixes if text.endswith(prefix)), key=len, default="")
        assert text == sent + longest


@pytest.mark.parametrize("cut", range(1, 16))
def test_no_part_of_a_stop_string_leaks(cut: int) -> None:
    text = "ABCDEFGHIJ tail"
    sent, stop = stream(["DEFGHIJ"], [text[:cut], text[cut:]])
    assert ("".join(sent), stop) == ("ABC", "DEFGHIJ")
    sent, stop = stream(["DEFGHIJ"], list(text), include_in_output=True)
    assert ("".join(sent), stop) == ("ABCDEFGHIJ", "DEFGHIJ")


def test_a_stop_string_that_never_begins_delays_nothing() -> None:
    pieces = ["hello", " world", "...", " 😀"]
    sent, stop = stream(["ZZZZZZZZZZZZZZZZ"], pieces)
    assert (sent, stop) == ([*pieces, ""], None)


def test_text_kept_back_is_released_at_the_end() -> None:
    assert stream(["STOP"], ["abc ST", "O"]) == (["abc ", "", "STO"], None)
    assert stream(["STOP"], ["abc ST", "ART"]) == (["abc ", "START", ""], None)


def test_the_stop_string_that_ends_first_counts_then_the_longest() -> None:
    assert stream(["cde", "bc"], ["abcdef"]) == (["a"], "bc")
    assert stream(["c", "abc", "bc"], ["xabc"]) == (["x"], "abc")
    assert stream(["abcd", "bc"], ["x", "a", "b", "c", "d"]) == (["x", "", "", "a"], "bc")


def test_min_tokens_lets_stop_strings_pass() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("a STOP b ST", armed=False) == ("a STOP b ST", None)
    assert matcher.push("OP c S", armed=True) == ("OP c ", None)
    assert matcher.push("TOP d") == ("", "STOP")
    matcher = StopStrings(["STOP"])
    assert matcher.push("ST") == ("", None)
    assert matcher.push("OP", armed=False) == ("STOP", None)


def test_without_stop_strings_everything_passes() -> None:
    assert stream([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_long_repetitive_stop_strings_stay_cheap() -> None:
    import time

    stops = ["a" * length + "b" for length in range(3900, 4096)]
    start = time.perf_counter()
    sent, stop = stream(stops, ["aaaa"] * 1100)
    assert "".join(sent) == "a" * 4400 and stop is None
    assert time.perf_counter() - start < 10, "comparing all prefixes anew for each token would take minutes"
