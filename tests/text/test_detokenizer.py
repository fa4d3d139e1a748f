from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from sample_texts import PLAIN_TEXTS

from streamllm.text.detokenizer import IncrementalDetokenizer


def pieces_of(tokenizer, token_ids, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@given(data=st.data())
def test_pieces_join_to_the_whole_decode(byte_level_tokenizer, byte_fallback_tokenizer, data) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        # A little beyond the vocabulary too: padded models can sample such ids.
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
        whole = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=False)) == whole
        kept = [i for i in ids if not tokenizer.is_special(i)]
        whole = b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", "replace")
        assert "".join(pieces_of(tokenizer, ids)) == whole


@given(byte_values=st.lists(st.integers(0, 255), max_size=30))
@example(byte_values=[0xED, 0xA0])
@example(byte_values=[0xED, 0xC2])
def test_arbitrary_bytes_one_by_one(byte_fallback_tokenizer, byte_values: list[int]) -> None:
    ids = [3 + byte for byte in byte_values]
    pieces = pieces_of(byte_fallback_tokenizer, ids)
    assert "".join(pieces) == bytes(byte_values).decode("utf-8", "replace")
    for count in range(len(byte_values)):
        # Only a beginning of a character that can still be completed is kept back; Python's decoder counts
        # that of a surrogate, which is no character (two replacements), among them.
        emitted = "".join(pieces[: count + 1])
        so_far = bytes(byte_values[: count + 1])
        kept_back = 2 if so_far[-2:-1] == b"\xed" and 0xA0 <= so_far[-1] <= 0xBF else 1
        assert so_far.decode("utf-8", "replace") in (emitted, emitted + "\ufffd" * kept_back)
        if so_far.decode("utf-8", "ignore").encode() == so_far:
            assert emitted.encode() == so_far


def test_no_character_is_cut(byte_level_tokenizer, byte_fallback_tokenizer) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        for text in PLAIN_TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            pieces = pieces_of(tokenizer, ids, skip_special_tokens=False)
            assert not any("\ufffd" in piece for piece in pieces)
            # What a tokenizer puts in front of a text stays: generated text continues a prompt.
            assert "".join(pieces) in (text, " " + text)


def test_ending_inside_a_character_leaves_one_replacement(byte_level_tokenizer) -> None:
    ids = byte_level_tokenizer.encode("ok \U0001f9ff")
    cut = next(n for n in range(len(ids)) if b"".join(map(byte_level_tokenizer.token_bytes, ids[:n]))[3:])
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer)
    assert "".join(map(detokenizer.push, ids[:cut])) == "ok "
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens(byte_level_tokenizer) -> None:
    ids = byte_level_tokenizer.encode("<|im_start|><|im_start|>hi<think> you<|im_end|>")
    assert "".join(pieces_of(byte_level_tokenizer, ids)) == "hi<think> you"
    for spaces in (True, False):
        pieces = pieces_of(
            byte_level_tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert "".join(pieces) == "<|im_start|><|im_start|>hi<think> you<|im_end|>"
    kept = frozenset([byte_level_tokenizer.token_id("<|im_end|>")])
    assert (
        "".join(pieces_of(byte_level_tokenizer, ids, kept_special_tokens=kept)) == "hi<think> you<|im_end|>"
    )
