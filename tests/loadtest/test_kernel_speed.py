from __future__ import annotations

import json
import sys

import kernel_cases
import kernel_peers
import kernel_speed
import numpy as np
import pytest
from kernel_cases import SHAPES, CaseMaker

from streamllm import _native
from streamllm.ops.cpu_plan import CpuOps


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few copies of everything: what is measured does not matter here."""
    monkeypatch.setattr(kernel_cases, "last_level_cache", lambda: 1024)
    monkeypatch.setitem(SHAPES, "head", (512, kernel_cases.HIDDEN))
    monkeypatch.setattr(kernel_cases, "VOCAB", 512)
    monkeypatch.setattr(kernel_cases, "EXPERTS", (64, 32, 8, 2))


@pytest.fixture
def peaks() -> kernel_speed.Peaks:
    return kernel_speed.Peaks(memory=10e9, cache=100e9, float32=200e9, int8=400e9)


def all_cases(formats: tuple[str, ...]) -> list[kernel_cases.Case]:
    groups = kernel_cases.cases_by_group(CaseMaker(2), formats)
    return [case for sources in groups.values() for source in sources for case in source()]


def test_every_kernel_runs_at_every_size():
    cases = all_cases(("float32", "bfloat16", "q4_0", "q4_1", "q8_0", "q6_k"))
    for case in cases:
        case.run()
        assert case.work.bytes > 0 and case.work.operations > 0 and case.repeats >= 1
    assert len({case.work for case in cases}) == len(cases)
    kinds = {case.work.kernel for case in cases}
    assert {
        "attention, decode",
        "attention, prefill",
        "linear q4_1",
        "linear bfloat16",
        "experts q8_0",
    } <= kinds
    assert {"rms_norm", "rotary_and_cache", "gate_and_mul", "sample"} <= kinds


def test_work_is_counted_as_it_is():
    works = [case.work for case in all_cases(("q4_1", "float32"))]
    found = {(work.kernel, work.shape, work.rows): work for work in works}
    down = found["linear q4_1", "down [576, 1536]", 8]
    assert (down.bytes, down.operations) == (576 * 1536 // 32 * 20, 2 * 8 * 576 * 1536)
    assert found["linear float32", "down [576, 1536]", 8].bytes == 576 * 1536 * 4
    experts = found["experts q4_1", "2 of 8 [32, 64]", 1]
    assert (experts.bytes, experts.operations) == (2 * 3 * 64 * 32 // 32 * 20, 2 * 2 * 3 * 64 * 32)
    decode = found["attention, decode", "context 192, float16", 8]
    assert decode.bytes == 8 * 192 * 2 * 3 * 64 * 2 and decode.operations == 8 * 192 * 9 * 64 * 4
    prefill = found["attention, prefill", "context 192, float16", 192]
    assert prefill.operations == 192 * 193 / 2 * 9 * 64 * 4


@pytest.mark.parametrize("stored_as", _native.weight_formats())
def test_weights_are_finite_whatever_the_format(stored_as):
    ops = CpuOps(threads=1, max_tokens=4, max_outputs=4)
    k = next(k for k in (96, 256) if kernel_cases.fits(stored_as, k))
    stored = kernel_cases.stored_weight(stored_as, 64, k)
    x = np.ones((4, k), np.float32)
    out = ops.linear(kernel_cases.PlanBuffer(False, k, k, x.ctypes.data), ops.matrix(64, k, [stored]))
    plan = ops.compile(keep=[out])
    plan.native.run(4, 4, 0)
    values = plan.read(out, 4)
    assert np.isfinite(values).all() and np.ptp(values) > 0


def test_the_floor_is_the_larger_of_the_two_times(peaks):
    slow_to_read = kernel_cases.Work("k", "s", 1, 1e6, 1e6, "memory", "float32")
    assert peaks.floor(slow_to_read) == pytest.approx(1e6 / 10e9)
    slow_to_compute = kernel_cases.Work("k", "s", 1, 1e6, 1e9, "cache", "int8")
    assert peaks.floor(slow_to_compute) == pytest.approx(1e9 / 400e9)


def test_enough_copies_to_outgrow_the_cache(monkeypatch):
    monkeypatch.setattr(kernel_cases, "last_level_cache", lambda: 32 * 2**20)
    assert kernel_cases.copies_for(3 * 2**20) == 43
    assert kernel_cases.copies_for(2**30) == 1
    assert kernel_cases.copies_for(1) == kernel_cases.MOST_OPS


@pytest.mark.slow
@pytest.mark.parametrize("name", _native.instruction_sets())
def test_peaks_of_every_instruction_set(name):
    before = _native.instruction_set()
    _native.set_instruction_set(name)
    try:
        peaks = kernel_speed.Peaks()
        peaks.measure(1, 0.002)
        # Wide enough for any CPU; a loop that the compiler took away would be far above.
        assert 1e8 < peaks.memory < 1e12 and 1e8 < peaks.cache < 4e12
        assert 1e8 < peaks.float32 < 2e12 and 1e8 < peaks.int8 < 2e13
        again = kernel_speed.Peaks(memory=1e15)
        again.measure(1, 0.002)
        assert again.memory == 1e15
    finally:
        _native.set_instruction_set(before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 1024, 0.1), "num_threads"), ((1, 0, 0.1), "bytes_per_thread"), ((1, 1024, 0.0), "seconds")],
)
def test_impossible_measurements_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        _native.measure_read_bandwidth(*arguments)


def test_the_shortest_call_counts():
    calls = iter([9.0, 0.004, 0.002, 0.003])
    clock = [0.0]

    def run() -> None:
        clock[0] += next(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_speed.time, "perf_counter", lambda: clock[0])
        assert kernel_speed.shortest(run, 2, 0.008) == pytest.approx(0.001)


def test_peers_compute_the_same_products():
    torch = kernel_peers.torch_with(1)
    runs = list(kernel_peers.peer_runs(torch, "out", (1, 8)))
    assert [(library, rows) for library, rows, _, _ in runs] == [
        (library, rows) for library in ("MKL", "oneDNN", "FBGEMM") for rows in (1, 8)
    ]
    for _, _, repeats, run in runs:
        run()
        assert repeats == 1


@pytest.mark.slow
def test_the_whole_run(monkeypatch, capsys, tmp_path):
    target = tmp_path / "kernels.json"
    arguments = ["--threads", "1", "--formats", "q8_0", "float32", "--rounds", "1", "--seconds", "0.0001"]
    monkeypatch.setattr(sys, "argv", ["kernel_speed.py", *arguments, "--peers", "--json", str(target)])
    kernel_speed.main()
    table = capsys.readouterr().out
    result = json.loads(target.read_text())
    assert result["instruction_set"] == _native.instruction_set() and result["threads"] == 1
    rows = {(row["kernel"], row["shape"], row["rows"]): row for row in result["kernels"]}
    assert set(rows["linear float32", "out [576, 576]", 8]["times_faster_than"]) == {"MKL", "oneDNN"}
    assert set(rows["linear q8_0", "out [576, 576]", 8]["times_faster_than"]) == {"FBGEMM"}
    assert rows["rms_norm", "[576]", 8]["times_faster_than"] == {}
    assert len(table.splitlines()) == 4 + len(rows)
    for row in rows.values():
        assert row["seconds"] > 0 and row["share_of_floor"] > 0
    assert " x FBGEMM" in table and "GB/s" in table
