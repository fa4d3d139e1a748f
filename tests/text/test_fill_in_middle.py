"""Which tokenizers know fill-in-the-middle, and what their prompts look like."""

from __future__ import annotations

import pytest
import tokenizers

from streamllm.text.fill_in_middle import SPELLINGS, middle_marks
from streamllm.text.tokenizer import Tokenizer


def byte_level(special: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, special_token_strings={}, eos_tokens=(), chat_template=None)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_marks_are_found_by_their_spelling(spelling):
    tokenizer = byte_level(spelling)
    marks = middle_marks(tokenizer)
    assert marks is not None and [tokenizer.token_text(mark) for mark in marks] == list(spelling)
    prefix, suffix = tokenizer.encode("def f(x):"), tokenizer.encode("return y")
    prompt = marks.prompt([], prefix, suffix)
    shown = tokenizer.decode(prompt, skip_special_tokens=False)
    assert shown == f"{spelling[0]}def f(x):{spelling[1]}return y{spelling[2]}"
    assert marks.prompt([7], prefix, suffix) == [7, *prompt]


def test_some_of_the_marks_are_not_enough(default_model_path):
    assert middle_marks(byte_level(SPELLINGS[0][:2])) is None
    assert middle_marks(Tokenizer.from_gguf(default_model_path)) is None
