"""``/engine/events``: what it tells is so, it costs nothing without a reader, and readers are bounded."""

from __future__ import annotations

import contextlib
import random
import threading

import httpx
import pytest
from following import Follower
from serving import run_server, text_script
from test_errors import check_error

from streamllm.engine.block_watch import HELD_BY_MORE, KNOWN
from streamllm.server.page import feed as feed_module
from streamllm.server.page.feed import MAX_WAITING_FRAMES, MAX_WATCHERS, _Watcher


@contextlib.contextmanager
def follow(server):
    with httpx.stream("GET", server.url + "/engine/events", timeout=10) as response:
        assert response.status_code == 200
        yield Follower(response)


def until(follower, condition):
    for _ in range(300):
        if condition():
            return
        follower.step()
    raise AssertionError("it was never told")


def true_states(engine):
    pool = engine._pool
    return [
        min(count, HELD_BY_MORE) | KNOWN * (key is not None)
        for count, key in zip(pool.reference_counts, pool.keys, strict=True)
    ]


def feed_of(server):
    return server.server.config.app.state.feed


def test_one_after_the_other(server):
    with follow(server) as follower:
        assert follower.step() == "snapshot"
        assert len(follower.states) == server.stats().num_blocks
        until(follower, lambda: follower.overviews)
        overview = follower.overviews[0]
        assert overview["num_requests"] == 0 and overview["requests"] == []
        assert overview["stats"]["num_running"] == 0 and overview["ttft"] is None


def test_what_is_told_after_random_traffic_is_the_pool(monkeypatch):
    """Forks, preemptions, prefix hits and aborts in a small pool, watched by two readers, one of whom comes
    later."""
    monkeypatch.setattr(feed_module, "INTERVAL", 0.005)
    random.seed(3)
    settings = {"num_blocks": 34}
    with run_server(step_seconds=0.001, engine_settings=settings) as server, follow(server) as first:
        assert first.step() == "snapshot"
        threads = [threading.Thread(target=ask, args=(server, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            first.step()
        with follow(server) as second:
            while any(thread.is_alive() for thread in threads):
                for follower in (first, second):
                    follower.step()
            server.wait_idle()
            for follower in (first, second):
                seen = len(follower.overviews)
                until(follower, lambda f=follower, n=seen: len(f.overviews) > n + 2 and not f.tables)
                assert follower.states == true_states(server.engine)
                assert follower.num_snapshots == 1
            overview = first.overviews[-1]
        assert overview["stats"]["num_preemptions"] == server.stats().num_preemptions > 0
        assert overview["stats"]["prefix_cache_hits"] > 0
        assert any(each["ttft"] for each in first.overviews)
        states = {each["state"] for overview in first.overviews for each in overview["requests"]}
        assert "decoding" in states


def ask(server, seed):
    chosen = random.Random(seed)
    for _ in range(4):
        body = {
            "prompt": "a common beginning " * 3 + "x" * chosen.randrange(200),
            "max_tokens": chosen.randrange(1, 160),
            "n": chosen.randrange(1, 5),
            "temperature": 1,
        }
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=chosen.choice([0.05, 10]))


def test_owners_and_sharing_while_four_choices_run():
    with run_server(step_seconds=0.02) as server, follow(server) as follower:
        follower.step()
        body = {"prompt": "p" * 70, "max_tokens": 2000, "n": 4, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            response.iter_lines()
            until(follower, lambda: len(follower.names) == 4 and follower.overviews)
            shared = [block for block, state in enumerate(follower.states) if state & 3 == HELD_BY_MORE]
            assert len(shared) >= 4  # the prompt's full blocks, for all four
            owners = follower.owners()
            assert all(len(owners[block]) == 4 for block in shared[:3])
            assert {choice for _, choice in follower.names.values()} == {0, 1, 2, 3}
            assert len({request for request, _ in follower.names.values()}) == 1
            until(follower, lambda: follower.overviews[-1]["requests"])
            (row,) = follower.overviews[-1]["requests"]
            assert row["num_sequences"] == 4 and row["num_prompt_tokens"] == 70
            # All but the last choice to write into the prompt's partly filled block took a copy of it.
            assert len(follower.copies) == 3 and len({source for source, _ in follower.copies}) == 1
            assert all(len(owners[block]) == 1 for _, block in follower.copies)
            assert follower.overviews[-1]["sharing"] > 0.3
        until(follower, lambda: not follower.names and not any(state & 3 for state in follower.states))


def test_states_of_requests():
    with run_server(step_seconds=0.05, max_num_seqs=1) as server, follow(server) as follower:
        body = {"prompt": "p" * 1500, "max_tokens": 2000, "stream": True}
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body))
            seen = set()

            def all_seen():
                for overview in follower.overviews:
                    seen.update(each["state"] for each in overview["requests"])
                return seen >= {"queued", "prefill", "decoding"}

            until(follower, all_seen)


# -- who may look, and what it costs -----------------------------------------------------------------------


def test_nobody_looks_while_nobody_watches():
    with run_server() as server:
        feed = feed_of(server)
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 20})
        assert feed.num_looks == 0 and feed._task is None and feed._watch is None
        with follow(server) as follower:
            until(follower, lambda: follower.overviews)
        server.wait_for(lambda: feed._task is None)
        looks = feed.num_looks
        assert looks > 0
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 50})
        assert feed.num_looks == looks and feed._watch is None and not feed._watchers


def test_all_watchers_share_one_look(monkeypatch):
    made = []
    with run_server() as server:
        feed, watch = feed_of(server), server.engine.watch
        monkeypatch.setattr(server.engine, "watch", lambda: made.append(1) or watch())
        with contextlib.ExitStack() as stack:
            followers = [stack.enter_context(follow(server)) for _ in range(MAX_WATCHERS)]
            for follower in followers:
                until(follower, lambda f=follower: len(f.overviews) > 1)
            assert len(feed._watchers) == MAX_WATCHERS and len(made) == 1
            refused = httpx.get(server.url + "/engine/events")
            check_error(refused, 429)
            assert refused.headers["retry-after"] == "5"
        server.wait_for(lambda: not feed._watchers)
        with follow(server) as follower:
            assert follower.step() == "snapshot"


def test_a_look_that_takes_long_comes_less_often(monkeypatch):
    """The share of the loop's time is bounded whatever a look costs."""
    clock = [0.0]
    slept = []

    class Watch:
        def look(self):
            clock[0] += 0.03
            return []

        def overview(self):
            raise AssertionError("not due")

    async def sleep(seconds):
        slept.append(seconds)
        feed._watchers.clear()

    feed = feed_module.EngineFeed(None, lambda: True)
    feed._watchers.add(_Watcher())
    monkeypatch.setattr(feed_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(feed_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(Watch, "overview", lambda self: {})
    with contextlib.closing(feed._run(Watch())) as run, contextlib.suppress(StopIteration):
        run.send(None)
    assert slept == [pytest.approx(0.03 / feed_module.MAX_SHARE)]


def test_a_slow_reader_gets_a_snapshot_instead_of_what_it_missed():
    watcher = _Watcher()
    watcher.behind = False
    for number in range(MAX_WAITING_FRAMES):
        watcher.push(b"%d" % number)
    assert len(watcher.frames) == MAX_WAITING_FRAMES and not watcher.behind
    watcher.push(b"one too many")
    assert watcher.behind and len(watcher.frames) <= 1


def test_a_watcher_is_no_load_and_does_not_hold_up_the_end():
    with run_server(script=text_script("x"), shutdown_timeout=30.0) as server, follow(server) as follower:
        until(follower, lambda: follower.overviews)
        assert httpx.get(server.url + "/load").json()["server_load"] == 0
        server.server.should_exit = True
        until(follower, lambda: follower.ended)
        server.join(5)
