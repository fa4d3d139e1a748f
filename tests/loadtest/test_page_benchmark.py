from __future__ import annotations

import json

import page
import pytest


def test_what_is_looked_at_is_what_the_case_says():
    driver = page.busy_driver(12, 600)
    watch = page.watch_of(driver)
    news = watch.look()
    assert len(news.sequences) == len(news.tables) == 12
    assert sum(count for _, count, state in news.runs if state & 3) == driver.pool.num_used
    for _ in range(16):
        driver.step()
    # Each sequence has taken a block and filled another.
    news = watch.look()
    assert [len(blocks) for _, _, _, blocks in news.tables] == [1] * 12
    overview = watch.overview()
    assert [row.state for row in overview.requests] == ["decoding"] * 12
    assert overview.requests[0].num_output_tokens == 17


def test_figures_and_exit_code(monkeypatch, tmp_path, capsys):
    figures = page.measure(4, 300, num_looks=10)
    assert all(value > 0 for value in figures.values())
    assert figures["share"] == pytest.approx(figures["look_ms"] / 100 + figures["overview_ms"] / 500)
    share = {(32, 6_000): 0.02}
    monkeypatch.setattr(page, "CASES", [(32, 6_000)])
    monkeypatch.setattr(page, "measure", lambda *case: figures | {"share": share[case[:2]]})
    monkeypatch.setattr("sys.argv", ["page.py", "--check", "--json", str(tmp_path / "figures.json")])
    assert page.main() == 1
    assert "2.00%" in capsys.readouterr().out
    share[32, 6_000] = 0.005
    assert page.main() == 0
    assert json.loads((tmp_path / "figures.json").read_text())[0]["running"] == 32
