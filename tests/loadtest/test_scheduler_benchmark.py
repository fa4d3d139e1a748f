from __future__ import annotations

import pytest
import scheduler


@pytest.mark.parametrize("situation", scheduler.SITUATIONS)
def test_situations_are_what_they_say(situation):
    driver = scheduler.decoding_driver(12, 30, situation)
    pool, engine = driver.pool, driver.scheduler
    num_waiting = 30 if situation == "batch full" else 31
    cached_before = pool.num_cached
    figures = scheduler.time_steps(driver, 40)
    assert figures["schedule"] + figures["update"] > 0
    assert (engine.num_running, engine.num_waiting, engine.num_preemptions) == (12, num_waiting, 0)
    assert all(s.num_output_tokens == 41 for s in engine.sequences() if s.slot >= 0)
    assert (cached_before >= 2048) == (situation == "pool full, prefix cached")


@pytest.mark.parametrize("cached", [False, True])
def test_a_long_prompt_is_served_whole(cached):
    figures = scheduler.time_admission(8_000, cached=cached, repeats=2)
    parts = sum(figures[name] for name in ("check", "add", "schedule", "state"))
    assert figures["total"] == pytest.approx(parts, rel=0.2)
    assert figures["later"] > 0


def test_report_and_goals():
    step = {"situation": "batch full", "running": 256, "waiting": 1000, "schedule": 0.3, "update": 0.2}
    step |= {"both": 0.5, "collection": 9.0}
    prompt = {"length": 100_000, "cached": True, "check": 1.0, "add": 1.0, "schedule": 2.0, "state": 1.0}
    prompt |= {"total": 5.0, "later": 0.4}
    result = {"steps": [step], "prompts": [prompt]}
    table = scheduler.render(result)
    assert "256   1,000     0.300   0.200   0.500   1.95 µs" in table
    assert "100,000   cached" in table
    assert scheduler.shortfalls(result) == []
    step["both"], prompt["total"] = 1.5, 11.0
    assert scheduler.shortfalls(result) == [
        "batch full: a step takes 1.50 ms",
        "a prompt of 100,000 tokens, with its prefix cached, takes 11.0 ms",
    ]
