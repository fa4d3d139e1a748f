from __future__ import annotations

import argparse

import pytest
import structured

from streamllm.text.tokenizer import Tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49152, 60000])
def test_every_constraint_is_measured_against_the_free_step(vocab_size, default_model_path, monkeypatch):
    names = ["any JSON object", "a choice of 1,000"]
    monkeypatch.setattr(structured, "CONSTRAINTS", {name: structured.CONSTRAINTS[name] for name in names})
    monkeypatch.setattr(structured, "EXTREMES", {})
    options = argparse.Namespace(model=str(default_model_path), batch=2, prompt=16, steps=3, threads=1)
    rows = structured.measure(options, vocab_size)
    assert [row["kind"] for row in rows] == ["no constraint", *names]
    assert all(row["step_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(0 < row["mask_us"] <= row["mask_us_p95"] for row in rows[1:])


def test_further_tokens_are_pairs_of_known_ones(default_model_path):
    tokenizer = Tokenizer.from_gguf(default_model_path)
    larger = structured.PairedVocabulary(tokenizer, 50000)
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    data = larger.token_bytes(49999)
    assert any(data[:end] in known and data[end:] in known for end in range(len(data) + 1))
    assert larger.token_bytes(100) == tokenizer.token_bytes(100)
