from __future__ import annotations

import json
import random
from pathlib import Path

import memory
import numpy as np
import pytest
from beams import Recording, load_recordings
from contiguous import (
    RESERVATIONS,
    ContiguousMemory,
    reserve_exactly,
    reserve_maximum,
    reserve_power_of_two,
    run_contiguous,
)
from figures import Window
from paged import BLOCK_SIZE, Decoding, run_paged

from streamllm.bench.traces import MAX_LENGTH, TRACES, Lengths
from streamllm.engine.beam_search import BeamSearch
from streamllm.sampling_params import BeamSearchParams

ALWAYS = Window(warm_up=0)


# -- lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_lengths_have_the_papers_means_and_fit_the_model(name):
    trace = TRACES[name]
    lengths = trace.sample(50_000, seed=4)
    prompts, outputs = np.array([(each.prompt, each.output) for each in lengths]).T
    assert (prompts.mean(), outputs.mean()) == pytest.approx(trace.paper_means, rel=0.02)
    assert prompts.min() >= 1 and outputs.min() >= 1
    assert (prompts + outputs).max() <= MAX_LENGTH
    assert trace.sample(50, seed=4) != trace.sample(50, seed=5)


# -- recorded beams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", memory.WIDTHS)
def test_a_replayed_search_decides_as_the_model_did(width):
    for recording in load_recordings()[width]:
        num_recorded = len(recording.parents)
        length = 3 * num_recorded
        params = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
        search = BeamSearch(params, frozenset(), length)
        num_beams = 1
        for step in range(length - 1):
            continuations = search.advance([recording.candidates(step, beam) for beam in range(num_beams)])
            decided = [(c.parent, c.token_id) for c in continuations]
            assert decided == recording.decisions(step)
            if step < num_recorded:
                assert [token for _, token in decided] == recording.tokens[step]
            num_beams = len(decided)
        assert not search.advance([recording.candidates(length - 1, beam) for beam in range(width)])


@pytest.mark.parametrize("width", memory.WIDTHS)
def test_recordings_are_searches(width):
    for recording in load_recordings()[width]:
        assert len(recording.parents) == len(recording.tokens) >= 64
        assert recording.parents[0] == [0] * width
        for parents, tokens in zip(recording.parents, recording.tokens, strict=True):
            assert len(set(zip(parents, tokens, strict=True))) == width
        dropped = sum(len(set(parents)) < width for parents in recording.parents[1:])
        assert dropped > len(recording.parents) / 5


@pytest.mark.slow
def test_a_new_recording_of_the_default_model(tmp_path):
    from record_beams import PROMPTS, record

    path = tmp_path / "beams.json"
    record(path, widths=(2, 4), max_tokens=12, prompts=PROMPTS[:1])
    for width, (recording,) in load_recordings(path).items():
        known = load_recordings()[width][0]
        assert recording.parents == known.parents[:11]
        assert recording.tokens == known.tokens[:11]


# -- contiguous memory -------------------------------------------------------------------------------------


def test_pieces_never_overlap_and_holes_merge():
    rng = random.Random(0)
    memory_ = ContiguousMemory(200)
    pieces: list[tuple[int, int]] = []
    refused = 0
    for _ in range(3_000):
        if pieces and rng.random() < 0.45:
            memory_.release(*pieces.pop(rng.randrange(len(pieces))))
            continue
        count = rng.randint(1, 60)
        start = memory_.reserve(count)
        taken = {slot for first, length in pieces for slot in range(first, first + length)}
        if start is None:
            refused += 1
            free = "".join("." if slot in taken else "f" for slot in range(200))
            assert max(map(len, free.split("."))) < count
        else:
            assert taken.isdisjoint(range(start, start + count)) and start + count <= 200
            pieces.append((start, count))
    assert refused > 100
    for piece in pieces:
        memory_.release(*piece)
    assert memory_.reserve(200) == 0


def test_reservations():
    lengths = Lengths(prompt=100, output=25)
    assert reserve_maximum(lengths) == 2048
    assert reserve_power_of_two(lengths) == 132
    assert reserve_power_of_two(Lengths(100, 32)) == 132
    assert reserve_power_of_two(Lengths(1000, 1040)) == 2048
    assert reserve_exactly(lengths) == 125


def test_contiguous_figures_by_hand():
    # Two of three fit at a time, each for 4 steps; while the third waits they hold 6, 7, 8, 9 of 10 slots.
    figures = run_contiguous([Lengths(6, 4)] * 3, 1, reserve_exactly, 20, ALWAYS)
    assert figures.requests == 2
    assert figures.waste == pytest.approx(1 - (6 + 7 + 8 + 9) / 40)
    assert figures.used == pytest.approx(2 * 7.5 / 20)
    assert figures.num_steps == 8


def test_contiguous_copies_share_nothing_and_are_admitted_together():
    figures = run_contiguous([Lengths(6, 4)] * 3, 2, reserve_exactly, 39, ALWAYS)
    assert (figures.requests, figures.sequences, figures.sharing) == (1, 2, 0)
    assert figures.num_steps == 12


def test_a_request_that_never_fits_is_an_error():
    with pytest.raises(ValueError, match="3 sequences of 10 slots never fit"):
        run_contiguous([Lengths(6, 4)], 3, reserve_exactly, 29, ALWAYS)


# -- the paged engine --------------------------------------------------------------------------------------


def test_paged_figures_by_hand():
    # Each needs 2 blocks from its first step to its last, and holds 20 to 23 tokens.
    requests = [Lengths(20, 4)] * 3
    figures = run_paged(requests, Decoding("sample", 1), [], 5 * BLOCK_SIZE, ALWAYS, seed=0)
    assert (figures.requests, figures.num_preemptions, figures.recomputed) == (2, 0, 0)
    assert figures.waste == pytest.approx(1 - 20 / 32)  # looked at in the first of four steps
    assert figures.used == pytest.approx(2 * 20 / 80)
    assert figures.num_steps == 8


def test_samples_share_their_prompt():
    # Of 3 blocks a sequence of 48 to 63 tokens, prompt included, the two full ones of the prompt are shared.
    requests = [Lengths(32, 16)] * 40
    for width in (2, 4):
        figures = run_paged(requests, Decoding("sample", width), [], 60 * BLOCK_SIZE, Window(10), seed=0)
        assert figures.sharing == pytest.approx(2 / 3 * (1 - 1 / width), rel=0.1)


def test_beams_share_what_their_recording_makes_them_share():
    requests = [Lengths(16, 60)] * 12
    apart = Recording(2, [[0, 0]] + [[0, 1]] * 80, [[7, 8]] + [[7, 8]] * 80)
    together = Recording(2, [[0, 0]] * 81, [[7, 8]] * 81)
    saved = {
        name: run_paged(
            requests, Decoding("beam", 2), [recording], 20 * BLOCK_SIZE, Window(2), seed=0
        ).sharing
        for name, recording in {"apart": apart, "together": together}.items()
    }
    # Apart they share the prompt's block alone, of at most 5; together all but the last.
    assert 0.1 <= saved["apart"] < 0.3
    assert 0.3 < saved["together"] < 0.5


def test_preemptions_cost_recomputation_and_nothing_is_lost():
    requests = [Lengths(16, 100)] * 8
    figures = run_paged(requests, Decoding("sample", 1), [], 24 * BLOCK_SIZE, Window(0), seed=0)
    assert figures.num_preemptions > 0
    assert 0 < figures.recomputed < 0.9


# -- the whole ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_runs() -> list[memory.Run]:
    decodings = (Decoding("sample", 1), Decoding("sample", 4), Decoding("beam", 4))
    return list(memory.measure(memory.PAPER_SLOTS, scale=0.3, seed=0, decodings=decodings))


@pytest.mark.slow
def test_the_papers_order_of_allocators(small_runs):
    assert len(small_runs) == 6
    for run in small_runs:
        figures = [run.figures[name] for name in memory.ALLOCATORS]
        waste = [each.waste for each in figures]
        at_once = [each.requests for each in figures]
        assert waste == sorted(waste)
        assert at_once == sorted(at_once, reverse=True)
    assert small_runs[0].figures[memory.PAGED].waste < memory.PAPER_WASTE


@pytest.mark.slow
def test_table_json_and_picture(small_runs, tmp_path):
    table = memory.render(small_runs, memory.PAPER_SLOTS)
    assert table.count("beam 4") == 2 and "44-66%" in table
    result = json.loads(json.dumps(memory.as_json(small_runs, {"seed": 0})))
    assert set(result["runs"][0]["figures"]) == {"paged", *RESERVATIONS}
    memory.plot(tmp_path / "memory.png", small_runs)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_shortfalls_are_named(small_runs, monkeypatch):
    monkeypatch.setattr(memory, "PAPER_WASTE", 0.001)
    monkeypatch.setitem(memory.PAPER_SHARE_SAVED, ("alpaca", "beam"), (0.9, 0.95))
    found = memory.shortfalls(small_runs)
    assert "ShareGPT-like, one sample: waste" in found[0]
    assert "Alpaca-like, beam 4: sharing saves" in found[-1]


def test_a_pool_too_small_for_a_workload_is_refused(capsys):
    with pytest.raises(SystemExit):
        memory.parse_args(["--slots", "12287"])
    assert "--slots must be at least 12288" in capsys.readouterr().err


@pytest.mark.slow
def test_command_reaches_the_papers_numbers(tmp_path: Path, capsys):
    files = {name: tmp_path / f"memory.{name}" for name in ("json", "png")}
    arguments = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert memory.main([*arguments, "--check"]) == 0
    assert "ShareGPT-like" in capsys.readouterr().out
    assert len(json.loads(files["json"].read_text())["runs"]) == 14
    assert files["png"].exists()
