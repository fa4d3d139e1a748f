"""Loads from late reports and from what is known at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamllm.deploy.load_ledger import LoadLedger


def test_what_was_sent_counts_until_it_has_ended() -> None:
    ledger = LoadLedger()
    ledger.sent("a", 100, 1.0)
    ledger.sent("a", 50, 1.0)
    assert ledger.load("a") == 150
    ledger.ended("a", 100, 2.0)
    assert ledger.load("a") == 50
    assert ledger.load("b") == 0


def test_a_report_tells_what_others_have_sent() -> None:
    ledger = LoadLedger()
    ledger.sent("a", 100, 1.0)
    assert ledger.reported("a", 130, 2.0)
    assert ledger.load("a") == 130
    ledger.ended("a", 100, 3.0)
    assert ledger.load("a") == 30


def test_a_late_report_does_not_undo_what_happened_since() -> None:
    ledger = LoadLedger()
    ledger.sent("a", 100, 1.0)
    ledger.ended("a", 100, 5.0)
    ledger.sent("a", 70, 6.0)
    assert ledger.reported("a", 100, 4.0)  # made when the first ran
    assert ledger.load("a") == 70


def test_a_report_counts_once_and_never_an_older_one() -> None:
    ledger = LoadLedger()
    assert ledger.reported("a", 10, 5.0)
    assert not ledger.reported("a", 99, 5.0)
    assert not ledger.reported("a", 99, 4.0)
    assert ledger.load("a") == 10


def test_a_replica_that_is_gone_is_forgotten() -> None:
    ledger = LoadLedger()
    ledger.sent("a", 100, 1.0)
    ledger.forget("a")
    ledger.ended("a", 100, 2.0)
    assert ledger.load("a") == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.1, 3)), min_size=1, max_size=40), st.data())
def test_without_others_the_load_is_what_is_under_way(
    steps: list[tuple[int, float]], data: st.DataObject
) -> None:
    ledger, now, running = LoadLedger(), 100.0, []
    timeline = [(0.0, 0)]
    for cost, pause in steps:
        now += pause
        if running and data.draw(st.booleans()):
            ledger.ended("a", running.pop(0), now)
        else:
            ledger.sent("a", cost, now)
            running.append(cost)
        timeline.append((now, sum(running)))
        # A report of what was there at any earlier moment says nothing new.
        asked = data.draw(st.floats(max(100.0, now - 20), now))
        ledger.reported("a", [load for time, load in timeline if time <= asked][-1], asked)
        assert ledger.load("a") == sum(running)
