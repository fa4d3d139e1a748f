from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.deploy.holder_memory import HolderMemory

chains = st.lists(st.integers(0, 12), max_size=6, unique=True)
additions = st.lists(st.tuples(chains, st.integers(0, 3)), max_size=40)


@settings(deadline=None)
@given(additions, chains, st.integers(2, 60))
def test_it_is_the_last_additions_by_generation(calls, asked, capacity):
    """Against a plain list of pairs, cut where a generation begins."""
    memory = HolderMemory(capacity)
    generations: list[list[tuple[int, int]]] = [[], []]
    for hashes, holder in calls:
        memory.add(hashes, holder)
        for prefix in hashes:
            if (prefix, holder) not in generations[-1]:
                generations[-1].append((prefix, holder))
            if len(generations[-1]) >= capacity // 2:
                generations.append([])
    kept = generations[-2:]
    assert memory.num_entries == sum(map(len, kept)) <= capacity

    expected: list[tuple[int, tuple[int, ...]]] = []
    for length in range(len(asked), 0, -1):
        for generation in reversed(kept):
            holders = tuple(holder for prefix, holder in generation if prefix == asked[length - 1])
            if holders and (not expected or expected[-1][1] != holders):
                expected.append((length, holders))
    assert list(memory.holders(asked)) == expected


def test_only_longer_prefixes():
    memory = HolderMemory(100)
    memory.add([1, 2, 3], 0)
    memory.add([1, 2], 5)
    assert list(memory.holders([1, 2, 3, 4])) == [(3, (0,)), (2, (0, 5))]
    assert list(memory.holders([1, 2, 3, 4], longer_than=2)) == [(3, (0,))]


def test_what_is_used_stays():
    memory = HolderMemory(1000)
    for other in range(100_000):
        memory.add([10**6 + other], 1)
        if other % 300 == 0:
            memory.add([1, 2, 3], 0)
        assert memory.num_entries <= 1000
    assert list(memory.holders([1, 2, 3])) == [(3, (0,))]
    assert not list(memory.holders([10**6]))
