"""What a block contains, as a number: a chain of hashes over blocks of tokens.

A block's hash covers its tokens and its parent's hash, so equal hashes mean equal tokens from the start of
the sequence on. The chain's seed holds everything else that K and V depend on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
"""128 bits: two of 2^64 different blocks collide with a probability below one half."""


def chain_seed(
    *, salt: str | None = None, prompt_length: int | None = None, adapter: bytes | None = None
) -> bytes:
    """The parent of a sequence's first block.

    Args:
        salt: the client's ``cache_salt``: only requests with the same one share blocks.
        prompt_length: given where keys depend on it (dynamic rotary scaling beyond the trained length).
        adapter: the content of the request's adapter, a digest of at most 64 bytes: other weights give other
            K and V, whatever the adapter is called.
    """
    text = f"{'' if salt is None else 's' + salt}\0{'' if prompt_length is None else prompt_length}"
    # As the key, so that no salt can spell an adapter's content.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, key=adapter or b"").digest()


def restarted_seed(seed: bytes) -> bytes:
    """The parent of the first block of a sequence that has grown so long that its keys have other angles
    (:func:`streamllm.models.rope.restart_length`), made of that of a short one."""
    return next_hash(seed, ())


def block_hashes(token_ids: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """The hash of each full block of ``token_ids``, about 1 µs each; what is left over has none."""
    tokens = array("q", token_ids)
    hashes = []
    parent = seed
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes


def next_hash(parent: bytes, block_tokens: Sequence[int]) -> bytes:
    """The hash of the block that follows ``parent``."""
    return blake2b(parent + array("q", block_tokens).tobytes(), digest_size=HASH_BYTES).digest()
