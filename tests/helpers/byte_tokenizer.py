"""A tokenizer of 256 single bytes and an end-of-sequence token, with Tokenizer's interface."""

from __future__ import annotations

EOS = 256


class ByteTokenizer:
    vocab_size = 257
    bos_token_id = None
    eos_token_ids = (EOS,)
    adds_bos = False
    chat_template = (
        "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    )
    special_token_strings: dict[str, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        return list(text.encode())

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)

    def token_id(self, token: str) -> int | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def contains(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def decode(self, ids, *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")
