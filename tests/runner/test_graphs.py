"""Ladders of graphs, padding, the pieces between attention, and results that do not depend on any of it."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import ReplayRecorder
from helpers.drive import generate, run_step
from helpers.random_runner import CONFIG, make_runner, new_sequence, step_of

from streamllm.ops.gpu.gpu_ops import AttentionCall
from streamllm.runner import graphs
from streamllm.runner.graphs import ForwardGraphs, ladder
from streamllm.runner.messages import OutputRow, ScheduledBatch, ScheduledRow

PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9], list(range(60, 20, -1))]


def graphs_of(runner) -> ForwardGraphs:
    return runner._backend._graphs[False]


def test_ladders_are_dense_where_padding_would_cost():
    assert ladder(1) == [1]
    assert ladder(5) == [1, 2, 4, 5]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(256)[-3:] == [240, 248, 256]
    assert ladder(512)[-3:] == [480, 496, 512] and len(ladder(512)) == 3 + 31 + 17
    for largest in (1, 3, 100, 300, 4096):
        steps = ladder(largest)
        assert steps == sorted(set(steps)) and steps[-1] == largest
        assert all(b - a <= max(8, a // 8) for a, b in itertools.pairwise(steps))


def test_a_step_runs_as_the_next_larger_size():
    made = ForwardGraphs(ReplayRecorder(), max_sequences=20, max_tokens=600)
    assert made.decode_sizes == [1, 2, 4, 8, 16, 20]
    assert [made.padded(n, only_decodes=True) for n in (1, 3, 5, 20)] == [1, 4, 8, 20]
    assert [made.padded(n, only_decodes=False) for n in (1, 3, 257, 512)] == [1, 4, 272, 512]
    assert made.padded(513, only_decodes=False) is None
    assert made.num_graphs == 6 + len(made.mixed_sizes)


def test_a_decode_step_is_one_piece_and_a_mixed_one_is_cut_at_attention():
    runner = make_runner(backend="gpu-graphs")
    made = graphs_of(runner)
    for size in made.decode_sizes:
        assert len(made.graph(size, only_decodes=True).pieces) == 1
    for size in made.mixed_sizes:
        graph = made.graph(size, only_decodes=False)
        calls = [isinstance(piece, AttentionCall) for piece in graph.pieces]
        assert calls == [False, True] * CONFIG.num_layers + [False]
        assert len(graph.hidden) == size
        for call in graph.pieces[1::2]:
            assert call.q.shape == call.out.shape == (size, CONFIG.num_heads * CONFIG.head_dim)


def replays_in(runner, batch: ScheduledBatch) -> int:
    recorder = runner._backend._recorder
    before = recorder.num_replays
    run_step(runner, batch)
    return recorder.num_replays - before


def test_which_steps_are_replayed():
    runner = make_runner(backend="gpu-graphs", max_num_batched_tokens=1024, num_blocks=80, max_model_len=1024)
    sequences = [new_sequence(0, [1] * 600, list(range(40))), new_sequence(1, [2] * 5, [40])]
    assert replays_in(runner, step_of(*sequences)) == 0  # more than the ladder has
    decodes = [ScheduledRow(0, 600, 1, [3], []), ScheduledRow(1, 5, 1, [3], [])]
    outputs = [OutputRow(0, 0), OutputRow(1, 1)]
    assert replays_in(runner, ScheduledBatch(1, rows=decodes, output_rows=outputs)) == 1
    newcomer = new_sequence(2, [4] * 20, [50, 51])
    mixed = [
        ScheduledRow(0, 601, 1, [3], []),
        ScheduledRow(1, 6, 1, [3], []),
        ScheduledRow(2, 0, 20, [], []),
    ]
    batch = ScheduledBatch(2, new_sequences=[newcomer], rows=mixed, output_rows=[*outputs, OutputRow(2, 2)])
    assert replays_in(runner, batch) == CONFIG.num_layers + 1


@pytest.mark.parametrize("windows", [(None, None), (20, None)])
@pytest.mark.parametrize("max_num_seqs", [pytest.param(4, marks=pytest.mark.slow), 7])
def test_graphs_change_nothing(windows, max_num_seqs):
    config = replace(CONFIG, layer_windows=windows)
    settings = {"num_blocks": 64, "max_num_seqs": max_num_seqs, "config": config}
    eager, captured = (make_runner(backend=backend, **settings) for backend in ("gpu", "gpu-graphs"))
    for budget in (3, 21, 64):
        for one, two in zip(
            generate(eager, PROMPTS, budget=budget, max_tokens=8),
            generate(captured, PROMPTS, budget=budget, max_tokens=8),
            strict=True,
        ):
            assert one.output == two.output
            np.testing.assert_allclose(one.logits, two.logits, atol=1e-5)
    assert captured._backend._recorder.num_replays > 100


def test_padding_writes_nothing_into_the_cache():
    """A decode of 3 sequences runs as 4: blocks of nobody stay as they are, also block 0."""
    runner = make_runner(backend="gpu-graphs")
    planes = runner._backend._device_inputs._kv_cache.planes
    assert not planes.any()  # nor did capturing write
    sequences = [new_sequence(slot, [1, 2, 3 + slot], [5 + slot]) for slot in range(3)]
    run_step(runner, step_of(*sequences))
    rows = [ScheduledRow(slot, 3, 1, [9], []) for slot in range(3)]
    run_step(runner, ScheduledBatch(1, rows=rows, output_rows=[OutputRow(slot, slot) for slot in range(3)]))
    written = planes.unflatten(-1, (16, -1)).abs().amax(dim=(0, 1, 3, 5)) > 0
    assert written.nonzero().tolist() == [[block, offset] for block in (5, 6, 7) for offset in range(4)]


def test_stale_memory_in_padding_reaches_no_row():
    runner = make_runner(backend="gpu-graphs")
    expected = generate(runner, PROMPTS[:3], max_tokens=5)
    made = graphs_of(runner)
    for (_, _), graph in made._graphs.items():
        graph.hidden.fill_(float("nan"))
        for piece in graph.pieces:
            if isinstance(piece, AttentionCall):
                piece.out.fill_(float("nan"))
    for one, two in zip(expected, generate(runner, PROMPTS[:3], max_tokens=5), strict=True):
        assert one.output == two.output and np.isfinite(two.logits).all()


def test_capturing_leaves_the_operations_and_the_collector_as_they_were():
    runner = make_runner(backend="gpu-graphs")
    ops = runner._backend.ops
    assert ops.split is None and gc.isenabled()
    calls = []
    ops.launch(lambda: calls.append(1))
    assert calls == [1]


def test_a_failed_capture_leaves_them_too(monkeypatch):
    class Broken(ReplayRecorder):
        def end(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    runner = make_runner(backend="gpu")
    backend = runner._backend
    with pytest.raises(RuntimeError, match="not permitted"):
        backend._capture_graphs(Broken())
    assert backend.ops.split is None and gc.isenabled()


class FakeGraph:
    """Stands for ``torch.cuda.CUDAGraph``: the order of calls is what is looked at."""

    log: list[tuple] = []

    def capture_begin(self, pool, capture_error_mode):
        FakeGraph.log.append(("begin", pool, capture_error_mode))

    def capture_end(self):
        FakeGraph.log.append(("end",))

    def replay(self):
        FakeGraph.log.append(("replay", self))


def test_cuda_graphs_share_a_pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    FakeGraph.log.clear()
    recorder = graphs.CudaGraphRecorder()
    launched = []
    replays = []
    for number in range(2):
        recorder.begin()
        recorder.launch(lambda number=number: launched.append(number))
        replays.append(recorder.end())
    for replay in (replays[1], replays[0], replays[1]):
        replay()
    assert launched == [0, 1]
    begin = ("begin", (0, 7), "thread_local")
    assert FakeGraph.log[:4] == [begin, ("end",), begin, ("end",)]
    graphs_replayed = [entry[1] for entry in FakeGraph.log[4:]]
    assert graphs_replayed[0] is graphs_replayed[2] is not graphs_replayed[1]


def test_memory_of_a_graph_is_kept_by_nobody():
    recorder = graphs.CudaGraphRecorder.__new__(graphs.CudaGraphRecorder)
    owner = torch.arange(24.0).view(4, 6)
    view = owner[1:3, :3]
    shared = recorder.share(view)
    assert shared.data_ptr() == view.data_ptr() and shared.stride() == view.stride()
    assert shared.tolist() == view.tolist()
    shared[0, 0] = -1
    assert owner[1, 0] == -1
    assert shared.untyped_storage().data_ptr() == view.data_ptr()
