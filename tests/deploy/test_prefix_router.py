from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamllm.deploy.prefix_router import Choice, PrefixRouter


def router_of(num_replicas, **options):
    router: PrefixRouter[str] = PrefixRouter(**{"seed": 0, "load_slack": 10, "capacity": 10_000} | options)
    for number in range(num_replicas):
        router.set_load(f"r{number}", 0)
    return router


def chain(key, length=5):
    return [hash((key, index)) & (2**64 - 1) for index in range(length)]


def test_a_conversation_stays_where_it_began():
    router = router_of(10)
    first = router.choose(chain(1, 3)).replica
    for length in range(4, 20):
        assert router.choose(chain(1, length), cost=0) == Choice(first, length - 1)


def test_an_overloaded_holder_is_left_and_found_again():
    router = router_of(4)
    holder = router.choose(chain(1), cost=0).replica
    router.set_load(holder, 100)
    other = router.choose(chain(1), cost=0)
    assert other.replica != holder and other.num_matched == 0
    assert router.choose(chain(1), cost=0) == Choice(other.replica, 5)
    router.set_load(holder, 0)
    assert router.choose(chain(1), cost=0) == Choice(holder, 5)
    assert router.stats.num_spills == 2


def test_the_bound_is_ratio_times_mean_plus_slack():
    for load, stays in ((16.0, True), (16.1, False)):
        # A mean of 4 with the holder's load: 1.5 * 4 + 10.
        router = router_of(4, load_ratio=1.5)
        holder = router.choose(chain(1), cost=0).replica
        for replica in router.replicas:
            router.set_load(replica, load if replica == holder else (16 - load) / 3 if load <= 16 else 0)
        assert (router.choose(chain(1), cost=0).replica == holder) == stays


def test_the_next_best_holder_has_a_shorter_prefix():
    router = router_of(10)
    short = router.choose(chain(1, 2), cost=0).replica
    router.set_load(short, 1000)
    long = router.choose(chain(1, 5), cost=0).replica
    router.set_load(short, 0)
    router.set_load(long, 1000)
    assert router.choose(chain(1, 5), cost=0) == Choice(short, 2)


def test_unknown_prefixes_go_where_there_is_less_to_do():
    """Two clients, two replicas: each has one of its own."""
    for key in range(50):
        router = router_of(2)
        replicas = {router.choose(chain((key, client)), cost=5).replica for client in range(2)}
        assert len(replicas) == 2


def test_requests_without_prefix_are_spread_by_load():
    router = router_of(10)
    for _ in range(1000):
        assert router.choose([]).num_matched == 0
    loads = [router.load(replica) for replica in router.replicas]
    assert sum(loads) == 1000 and max(loads) <= 105 and min(loads) >= 95


def test_a_hot_prefix_spreads_and_its_conversations_stay():
    router = router_of(16, load_slack=100)
    rng = random.Random(1)
    where: dict[int, str] = {}
    moved = 0
    for number in range(20_000):
        conversation = rng.randrange(400)
        hashes = chain("system", 4) + chain(conversation, 3)
        replica = router.choose(hashes, cost=1).replica
        moved += number > 5000 and where.get(conversation, replica) != replica
        where[conversation] = replica
        for name in router.replicas:
            router.set_load(name, max(0, router.load(name) - 2 / 16))
    assert len(set(where.values())) == 16
    assert moved < 0.02 * 15_000


def test_routers_that_know_nothing_of_each_other_agree():
    routers = [router_of(50, seed=seed) for seed in range(4)]
    for key in range(200):
        assert len({router.choose(chain(key), cost=0).replica for router in routers}) == 1


def test_what_another_router_tells():
    router = router_of(10)
    router.learn(chain(1, 4), "r7")
    router.learn(chain(1, 5), "gone")
    assert router.choose(chain(1, 5)) == Choice("r7", 4)


def test_a_forgotten_replica_holds_nothing_when_it_is_back():
    router = router_of(3)
    holder = router.choose(chain(1)).replica
    router.forget(holder)
    router.forget("never seen")
    assert holder not in router.replicas
    other = router.choose(chain(1), cost=0).replica
    assert other != holder
    router.set_load(holder, 0)
    assert router.choose(chain(1), cost=0) == Choice(other, 5)


def test_a_retry_goes_elsewhere():
    router = router_of(2)
    first = router.choose(chain(1)).replica
    second = router.choose(chain(1), exclude={first}).replica
    assert second != first
    with pytest.raises(LookupError):
        router.choose(chain(1), exclude={first, second})
    with pytest.raises(LookupError):
        router_of(0).choose(chain(1))


@pytest.mark.parametrize("load", [-1, math.nan, math.inf])
def test_loads_that_make_no_sense(load):
    router = router_of(2)
    with pytest.raises(ValueError, match="r1"):
        router.set_load("r1", load)
    router.choose([])


@pytest.mark.parametrize("options", [{"capacity": 1}, {"load_ratio": 0.9}, {"load_slack": -1}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        router_of(1, **options)


@settings(deadline=None)
@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.floats(0, 50))))
def test_the_same_calls_give_the_same_decisions(seed, requests):
    first, second = (router_of(5, seed=seed) for _ in range(2))
    for key, length, cost in requests:
        assert first.choose(chain(key, length), cost) == second.choose(chain(key, length), cost)


class RouterMachine(RuleBasedStateMachine):
    """Any order of calls, against what was sent where since a replica was last new."""

    def __init__(self):
        super().__init__()
        self.router: PrefixRouter[int] = PrefixRouter(capacity=40, load_slack=5, load_ratio=1.5, seed=1)
        self.loads: dict[int, float] = {}
        self.sent: dict[int, set[int]] = {}

    @rule(replica=st.integers(0, 5), load=st.integers(0, 30))
    def report(self, replica, load):
        self.router.set_load(replica, load)
        self.loads[replica] = load
        self.sent.setdefault(replica, set())

    @rule(replica=st.integers(0, 5))
    def forget(self, replica):
        self.router.forget(replica)
        self.loads.pop(replica, None)
        self.sent.pop(replica, None)

    @precondition(lambda self: self.loads)
    @rule(key=st.integers(0, 8), length=st.integers(0, 6), cost=st.integers(0, 4), retry=st.booleans())
    def choose(self, key, length, cost, retry):
        exclude = {max(self.loads)} if retry and len(self.loads) > 1 else set()
        hashes = chain(key, length)
        limit = 1.5 * sum(self.loads.values()) / len(self.loads) + 5
        choice = self.router.choose(hashes, cost, exclude)
        assert choice.replica in self.loads and choice.replica not in exclude
        assert choice.num_matched <= length
        if choice.num_matched:
            assert self.loads[choice.replica] <= limit
            assert hashes[choice.num_matched - 1] in self.sent[choice.replica]
        self.loads[choice.replica] += cost
        self.sent[choice.replica].update(hashes)

    @invariant()
    def loads_and_memory_are_right(self):
        assert {replica: self.router.load(replica) for replica in self.router.replicas} == self.loads
        assert self.router.num_entries <= 40


RouterMachine.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestRouterMachine = RouterMachine.TestCase
