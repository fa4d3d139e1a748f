from __future__ import annotations

from dataclasses import replace

import cluster
import pytest
from cluster_model import Cluster, Conversation, PrefixCache, Replica, Simulation, Traffic, chain

from streamllm.deploy.prompt_prefix import BOUNDARIES

SMALL = Cluster(replicas=10, rate=1000, prefixes=5000, routers=4, cache_tokens=200_000, capacity=40_000)


@pytest.fixture(scope="module")
def outcomes():
    """Hit rates of ten replicas at the same traffic."""
    one = replace(SMALL, routers=1)
    return {
        "prefix": cluster.run(one, "prefix", 8, ideal=True),
        "random": cluster.run(one, "random", 8),
        "any router": cluster.run(SMALL, "prefix", 8),
        "own router": cluster.run(replace(SMALL, sticky=True), "prefix", 8),
    }


def test_the_router_comes_near_one_engine_and_leaves_chance_behind(outcomes):
    prefix, random = outcomes["prefix"], outcomes["random"]
    assert 0.9 * prefix["ideal_hit_rate"] < prefix["hit_rate"] <= prefix["ideal_hit_rate"] + 1e-9
    assert prefix["hit_rate"] > 1.5 * random["hit_rate"]
    assert prefix["load_max"] < 1.5 * prefix["load_mean"]
    assert prefix["ttft_p99_ms"] < random["ttft_p99_ms"]


def test_routers_without_a_word_between_them_agree_mostly(outcomes):
    assert outcomes["own router"]["hit_rate"] > 0.95 * outcomes["prefix"]["hit_rate"]
    assert outcomes["any router"]["hit_rate"] > 0.75 * outcomes["prefix"]["hit_rate"]
    assert outcomes["any router"]["hit_rate"] > 1.4 * outcomes["random"]["hit_rate"]


def test_eight_long_shared_prefixes_on_two_replicas():
    """A cache that holds half of the prefixes."""
    shared = Cluster(
        replicas=2,
        rate=40,
        prefixes=8,
        zipf=0.0,
        prefix_tokens=8000,
        turns=1,
        routers=1,
        cache_tokens=38_000,
        capacity=10_000,
    )
    prefix = cluster.run(shared, "prefix", 60, ideal=True)
    random = cluster.run(shared, "random", 60)
    assert prefix["hit_rate"] > 0.9 * prefix["ideal_hit_rate"]
    assert prefix["hit_rate"] > 1.5 * random["hit_rate"]


def test_gossip_tells_the_others():
    simulation = Simulation(replace(SMALL, gossip=True), "prefix")
    simulation.run(2000)
    entries = [router.num_entries for router in simulation._routers]
    alone = Simulation(SMALL, "prefix")
    alone.run(2000)
    assert min(entries) > 2 * max(router.num_entries for router in alone._routers)


def test_traffic_is_what_it_says():
    traffic = Traffic(SMALL, seed=3)
    turns: dict[int, int] = {}
    last = 0.0
    for _ in range(8000):
        conversation = traffic.next_turn()
        assert traffic.now >= last
        last = traffic.now
        before = turns.get(conversation.key, 0)
        turns[conversation.key] = before + 1
        assert len(conversation.hashes) == sum(end <= 4 * conversation.num_tokens for end in BOUNDARIES)
        traffic.answered(conversation, traffic.now, traffic.output_length())
    # Conversations of the last seconds have turns to come.
    assert 2.5 < 8000 / len(turns) < 5.5


def test_a_replica_works_for_what_is_not_cached_and_in_order():
    spec = replace(SMALL, prefill_rate=1000, decode_cost=2)
    replica = Replica(spec)
    conversation = Conversation(1, 1, 640, list(chain(1, 0, 640)))
    assert replica.serve(0.0, conversation, 100) == (0, pytest.approx(0.64), pytest.approx(0.84))
    replica.cache.add(conversation.hashes)
    cached, first, end = replica.serve(0.5, conversation, 0)
    assert cached == BOUNDARIES[len(conversation.hashes) - 1] // 4 > 500
    assert first == end == pytest.approx(0.84 + (640 - cached) / 1000)
    assert replica.backlog(10) == 0


def test_a_cache_drops_tails_of_the_least_recent():
    cache = PrefixCache(capacity=64 * 8)
    first, second = list(chain(1, 0, 256)), list(chain(2, 0, 256))
    cache.add(first)
    cache.add(second)
    cache.add(first)
    cache.add(list(chain(3, 0, 128)))
    assert (cache.num_cached(first), cache.num_cached(second)) == (256, 128)


@pytest.mark.slow
def test_report(capsys, tmp_path):
    path = tmp_path / "figures.json"
    small = ["--replicas", "20", "--rate", "1000", "--routers", "2", "--seconds", "2", "--decisions", "500"]
    assert cluster.main([*small, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "20 replicas, 1,000 requests a second, 2 routers" in printed
    assert "2 replicas, the same load each" in printed
    assert "one router a conversation" in printed and "growth" in printed
    assert '"decision_us"' in path.read_text()


@pytest.mark.parametrize("wrong", [["--replicas", "5"], ["--rate", "-1"], ["--seconds", "0"]])
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit):
        cluster.parse_args(wrong)
    assert "at least" in capsys.readouterr().err
