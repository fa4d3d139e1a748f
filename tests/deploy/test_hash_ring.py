from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.deploy.hash_ring import HashRing, mixed

NUMBERS = [mixed(number) for number in range(500)]


def ring_of(names):
    ring: HashRing[str] = HashRing()
    for name in names:
        ring.add(name, name)
    return ring


def owner(ring, number):
    return ring.owners(number, 1)[0]


EXPECTED = [owner(ring_of("abcd"), number) for number in NUMBERS]


@settings(max_examples=10, deadline=None)
@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_arrival_does_not_matter(names):
    assert [owner(ring_of(names), n) for n in NUMBERS] == EXPECTED


def test_a_change_moves_only_what_it_must():
    ring = ring_of("abcd")
    before = [owner(ring, number) for number in NUMBERS]
    ring.remove("c")
    without = [owner(ring, number) for number in NUMBERS]
    assert all(new == old if old != "c" else new in "abd" for old, new in zip(before, without, strict=True))
    ring.add("c", "c")
    assert [owner(ring, number) for number in NUMBERS] == before


def test_shares_are_even():
    ring = ring_of(f"replica {number}" for number in range(20))
    shares = Counter(owner(ring, mixed(number)) for number in range(20_000))
    assert len(shares) == 20
    assert all(500 < count < 1500 for count in shares.values())


def test_the_next_owners_are_different():
    ring = ring_of("abcd")
    for number, expected in zip(NUMBERS, EXPECTED, strict=True):
        owners = ring.owners(number, 3)
        assert owners[0] == expected and len(set(owners)) == 3
    assert sorted(ring.owners(7, 9)) == ["a", "b", "c", "d"]


def test_empty_and_unknown():
    assert ring_of("").owners(1, 2) == []
    with pytest.raises(KeyError):
        ring_of("a").remove("b")
