"""A thousand replicas and the real routers between them, in simulated time, without a model or a network.

    python loadtest/cluster.py [--replicas 1000] [--rate 100000] [--seconds 10] [--json FILE]

- One run of the whole cluster: hit rate against one engine with all its memory, load spread, latencies.
- The router's own cost, in real time on one core: decisions a second, bytes an entry, the longest addition,
  and the hashes of a chat's body.
- At a tenth of the size and the same load a replica: other policies, several routers, older reports, less of
  the router's memory, and growing rates.

Traffic: conversations of several turns behind system prompts of Zipf's popularity
(``cluster_model.Cluster``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_model import Cluster, Outcome, Simulation, Traffic, new_router

from streamllm.deploy.hash_ring import mixed
from streamllm.deploy.holder_memory import HolderMemory
from streamllm.deploy.prompt_prefix import prefix_hashes

COMPARED = 10
"""Variants are run at this fraction of the cluster's size."""

GROWTH = (0.5, 1.0, 1.25, 1.5, 2.0)
"""Rates, of the cluster's."""

Variant = tuple[str, Cluster, str]
"""A name, a cluster and a policy."""


def variants(cluster: Cluster) -> dict[str, list[Variant]]:
    """The comparisons, by heading."""
    one = replace(cluster, routers=1)
    sticky = replace(cluster, sticky=True)
    return {
        "policies, one router": [
            ("prefix", one, "prefix"),
            ("least loaded of two", one, "least loaded"),
            ("random", one, "random"),
        ],
        f"{cluster.routers} routers that know nothing of each other": [
            ("any router for a turn", cluster, "prefix"),
            ("one router a conversation", sticky, "prefix"),
            ("decisions told with reports", replace(cluster, gossip=True), "prefix"),
        ],
        "age of reports, one router a conversation": [
            (f"{seconds:g} s", replace(sticky, report_seconds=seconds), "prefix")
            for seconds in (0.05, 1.0, 4.0)
        ],
        "entries a replica in one router": [
            (f"{each:,}", replace(one, capacity=each * cluster.replicas), "prefix")
            for each in (100, 400, 1600)
        ],
        "growth, one router a conversation": [
            (f"{factor:g} x {cluster.rate:,.0f}/s", replace(sticky, rate=factor * cluster.rate), "prefix")
            for factor in GROWTH
        ],
    }


# -- a run ---------------------------------------------------------------------------------------------------


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def summary(cluster: Cluster, outcome: Outcome) -> dict[str, float]:
    """A run's figures: shares, milliseconds, and loads in parts of what a replica can do."""
    loads = [work / outcome.seconds / cluster.prefill_rate for work in outcome.work]
    stats = [router.stats for router in outcome.routers]
    decisions = sum(s.num_decisions for s in stats)
    return {
        "requests": len(outcome.first_token_seconds),
        "seconds": outcome.seconds,
        "hit_rate": outcome.cached_tokens / outcome.prompt_tokens,
        "ideal_hit_rate": outcome.ideal_tokens / outcome.prompt_tokens,
        "load_mean": statistics.fmean(loads),
        "load_p99": quantile(loads, 0.99),
        "load_max": max(loads),
        "ttft_p50_ms": 1e3 * quantile(outcome.first_token_seconds, 0.5),
        "ttft_p99_ms": 1e3 * quantile(outcome.first_token_seconds, 0.99),
        "backlog_p50_ms": 1e3 * quantile(outcome.backlogs, 0.5),
        "backlog_p99_ms": 1e3 * quantile(outcome.backlogs, 0.99),
        "backlog_max_ms": 1e3 * quantile(outcome.backlogs, 1.0),
        "spilled": sum(s.num_spills for s in stats) / max(1, decisions),
        "entries": max(router.num_entries for router in outcome.routers),
    }


def run(cluster: Cluster, policy: str, seconds: float, *, ideal: bool = False) -> dict[str, float]:
    """One simulation of ``seconds``, whose first half is not counted."""
    simulation = Simulation(cluster, policy, ideal=ideal)
    return summary(cluster, simulation.run(int(seconds * cluster.rate)))


# -- the router's own cost -----------------------------------------------------------------------------------


def recorded_chains(cluster: Cluster, count: int) -> list[list[int]]:
    """The chains of so many requests, answered at once."""
    traffic = Traffic(cluster, seed=1)
    chains = []
    for _ in range(count):
        conversation = traffic.next_turn()
        chains.append(list(conversation.hashes))
        traffic.answered(conversation, traffic.now, traffic.output_length())
    return chains


def router_cost(cluster: Cluster, count: int) -> dict[str, float]:
    """CPU time of ``count`` decisions after as many others, with the reports that come between them."""
    chains = recorded_chains(cluster, 2 * count)
    per_report = max(1, int(cluster.rate / cluster.routers * cluster.report_seconds / cluster.replicas))

    def decide(requests: list[list[int]]) -> None:
        for number, hashes in enumerate(requests):
            router.choose(hashes, cluster.turn_work)
            if number % per_report == 0:
                router.set_load(number // per_report % cluster.replicas, 0)

    router = new_router(cluster, seed=1)
    tracemalloc.start()
    # Numbers of their own, as those of a body are.
    decide([[value ^ 0 for value in hashes] for hashes in chains[:count]])
    bytes_per_entry = tracemalloc.get_traced_memory()[0] / max(1, router.num_entries)
    tracemalloc.stop()
    begin = time.thread_time()
    decide(chains[count:])
    elapsed = time.thread_time() - begin
    return {
        "decision_us": 1e6 * elapsed / count,
        "decisions_per_second": count / elapsed,
        "hashes_per_request": statistics.fmean(map(len, chains)),
        "bytes_per_entry": bytes_per_entry,
        "generation_ms": 1e3 * generation_change(cluster.capacity),
    }


def generation_change(capacity: int) -> float:
    """CPU seconds of the longest addition to a memory of this capacity: the one that drops a generation."""
    memory = HolderMemory(capacity)
    longest = 0.0
    for number in range(capacity + 2):
        before = time.thread_time()
        memory.add((mixed(number),), number % 1000)
        longest = max(longest, time.thread_time() - before)
    return longest


def hashing_cost(num_turns: int = 5, repeats: int = 500) -> dict[str, float]:
    """Of a chat's body with a system prompt of 4 KB and turns of 600 bytes each."""
    messages = [{"role": "system", "content": "You help. " * 400}]
    for turn in range(2 * num_turns - 1):
        messages.append({"role": ("user", "assistant")[turn % 2], "content": "Tell me more. " * 43})
    body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
    begin = time.thread_time()
    for _ in range(repeats):
        prefix_hashes(body, "/v1/chat/completions")
    return {"body_bytes": len(body), "hashing_us": 1e6 * (time.thread_time() - begin) / repeats}


# -- what is said about it -----------------------------------------------------------------------------------


def measure(cluster: Cluster, seconds: float, num_decisions: int) -> dict[str, Any]:
    """All figures, ready for JSON."""
    part = replace(
        cluster,
        replicas=max(1, cluster.replicas // COMPARED),
        rate=cluster.rate / COMPARED,
        capacity=max(2, cluster.capacity // COMPARED),
    )
    rows = [
        {"group": group, "name": name, **run(variant, policy, seconds, ideal=number == 0)}
        for group, compared in variants(part).items()
        for number, (name, variant, policy) in enumerate(compared)
    ]
    router = router_cost(cluster, num_decisions) | hashing_cost()
    whole = run(replace(cluster, sticky=True), "prefix", seconds, ideal=True)
    return {
        "replicas": cluster.replicas,
        "rate": cluster.rate,
        "routers": cluster.routers,
        "whole": whole,
        "router": router,
        "compared_replicas": part.replicas,
        "rows": rows,
    }


HEADER = (
    f"{'':<30}{'hit':>7}{'ideal':>7}{'load':>7}{'p99':>6}{'max':>6}{'TTFT':>7}{'p99':>7}"
    f"{'queue':>8}{'p99':>7}{'max':>7}{'spilled':>9}"
)


def render_row(name: str, row: dict[str, Any]) -> str:
    ideal = f"{row['ideal_hit_rate']:>7.3f}" if row["ideal_hit_rate"] else f"{'':>7}"
    return (
        f"{name:<30}{row['hit_rate']:>7.3f}{ideal}{row['load_mean']:>7.2f}{row['load_p99']:>6.2f}"
        f"{row['load_max']:>6.2f}{row['ttft_p50_ms']:>7.0f}{row['ttft_p99_ms']:>7.0f}"
        f"{row['backlog_p50_ms']:>8.0f}{row['backlog_p99_ms']:>7.0f}{row['backlog_max_ms']:>7.0f}"
        f"{row['spilled']:>9.1%}"
    )


def render(result: dict[str, Any]) -> str:
    """The tables on the terminal. Times in milliseconds, loads in parts of what a replica can do."""
    router = result["router"]
    lines = [
        f"{result['replicas']:,} replicas, {result['rate']:,.0f} requests a second, {result['routers']} "
        "routers, one router a conversation",
        "",
        HEADER,
        render_row("", result["whole"]),
        "",
        "A router, on one core",
        "",
        f"a decision: {router['decision_us']:.1f} µs of CPU, {router['decisions_per_second']:,.0f} a second; "
        f"{router['hashes_per_request']:.1f} hashes a request",
        f"memory: {router['bytes_per_entry']:.0f} bytes an entry, of which the run above has "
        f"{result['whole']['entries']:,.0f} in the fullest router; the longest addition takes "
        f"{router['generation_ms']:.1f} ms",
        f"hashes of a chat's body of {router['body_bytes']:,} bytes: {router['hashing_us']:.0f} µs",
        "",
        f"{result['compared_replicas']:,} replicas, the same load each",
    ]
    group = None
    for row in result["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines += ["", group, HEADER]
        lines.append(render_row(row["name"], row))
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loadtest/cluster.py",
        description="The prefix router before simulated replicas.",
        allow_abbrev=False,
    )
    default = Cluster()
    add = parser.add_argument
    add("--replicas", type=int, default=default.replicas, help="default: %(default)s")
    add("--rate", type=float, default=default.rate, help="requests a second (default: %(default)s)")
    add("--routers", type=int, default=default.routers, help="instances (default: %(default)s)")
    add("--seconds", type=float, default=10, help="simulated, half of it warm-up (default: %(default)s)")
    add("--decisions", type=int, default=100_000, help="timed (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every number")
    args = parser.parse_args(argv)
    if args.replicas < COMPARED or args.routers < 1 or args.decisions < 1:
        parser.error(f"--replicas must be at least {COMPARED}, --routers and --decisions at least 1")
    if args.rate <= 0 or args.seconds * args.rate < 100 * COMPARED:
        parser.error(f"--rate times --seconds must be at least {100 * COMPARED} requests")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cluster = replace(Cluster(), replicas=args.replicas, rate=args.rate, routers=args.routers)
    result = measure(cluster, args.seconds, args.decisions)
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
