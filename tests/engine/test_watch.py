"""What a watcher of the engine is told, against the scheduler and its tables, step by step."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from driver import Driver
from scheduler import random_tokens

from streamllm.engine.beam_search import BeamSearch
from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import NO_BLOCK, BlockTables
from streamllm.engine.events import EventLog
from streamllm.engine.live_requests import live_requests
from streamllm.engine.stats import MemoryFigures, memory_figures
from streamllm.engine.step import Limits
from streamllm.engine.watch import MAX_REQUESTS, EngineWatch, _Latency
from streamllm.runner.messages import TokenLogprobs
from streamllm.sampling_params import BeamSearchParams

SIZE = 16


def make_driver(num_blocks=80, max_num_seqs=8, answer=random_tokens):
    return Driver(
        num_blocks=num_blocks,
        block_size=SIZE,
        limits=Limits(max_num_seqs, 64),
        answer=answer,
        max_model_len=num_blocks * SIZE,
    )


def make_watch(driver):
    def stats():
        return SimpleNamespace(memory=memory_figures(driver.pool, driver.scheduler.sequences()))

    return EngineWatch(driver.pool, driver.live.values, stats, driver.scheduler.events)


def add_random(driver, chosen):
    common = list(range(40))
    prompt = common[: chosen.randrange(41)] + [chosen.randrange(1000) for _ in range(chosen.randint(1, 60))]
    request = driver.add(prompt, chosen.randint(1, 90), n=chosen.randint(1, 4))
    request.stream = SimpleNamespace(lora_request=None)
    return request


def figures_block_by_block(pool, sequences):
    filled, logical = {}, 0
    for sequence in sequences:
        for table in sequence.blocks.tables:
            for index in range(table.num_dropped, len(table.block_ids)):
                tokens = min(max(sequence.num_computed_tokens - index * SIZE, 0), SIZE)
                block = table.block_ids[index]
                assert filled.setdefault(block, tokens) == tokens
                logical += 1
    return MemoryFigures(
        num_blocks=pool.num_blocks,
        used_blocks=pool.num_used,
        shared_blocks=sum(pool.reference_count(block) > 1 for block in filled),
        cached_blocks=pool.num_cached,
        logical_blocks=logical,
        allocated_slots=pool.num_used * SIZE,
        used_slots=sum(filled.values()),
    )


class Told:
    """What the news add up to."""

    def __init__(self):
        self.tables, self.names, self.copies = {}, {}, []

    def take(self, news):
        for sequence in news.gone:
            del self.names[sequence]
            self.tables = {key: table for key, table in self.tables.items() if key[0] != sequence}
        for sequence, request, choice in news.sequences:
            assert sequence not in self.names
            self.names[sequence] = (request, choice)
        for sequence, group, first, blocks in news.tables:
            table = self.tables.setdefault((sequence, group), [])
            assert first <= len(table)
            table[first:] = blocks
        self.copies += news.copies


@pytest.mark.parametrize("seed", range(4))
def test_tables_and_figures_through_random_traffic(seed):
    chosen = random.Random(seed)
    driver = make_driver(num_blocks=30)
    watch, told = make_watch(driver), Told()
    for _ in range(400):
        if chosen.random() < 0.15 and len(driver.live) < 12:
            add_random(driver, chosen)
        if chosen.random() < 0.05 and driver.live:
            request = driver.live.pop(chosen.choice(list(driver.live)))
            for sequence in request.sequences:
                driver.scheduler.finish(sequence, "abort")
        driver.step()
        sequences = list(driver.scheduler.sequences())
        assert memory_figures(driver.pool, sequences) == figures_block_by_block(driver.pool, sequences)
        if chosen.random() < 0.4:
            told.take(watch.look())
            held = {
                (sequence.sequence_id, group): table.block_ids
                for request in driver.live.values()
                for sequence in request.sequences
                for group, table in enumerate(sequence.blocks.tables)
                if table.block_ids
            }
            assert told.tables == held
            late = Told()
            late.take(watch.snapshot())
            assert (late.tables, late.names) == (told.tables, told.names)
            assert not watch.look()
        for row in live_requests(driver.live.values(), 1.0):
            sequences = [each for each in driver.live[row.request_id].sequences if not each.finished]
            blocks = {block for each in sequences for table in each.blocks.tables for block in table.held}
            assert row.num_blocks == len(blocks)
            assert 0 <= row.num_computed_tokens <= row.num_prompt_tokens
            assert (row.state in ("queued", "preempted")) == all(each.slot < 0 for each in sequences)
    assert driver.scheduler.num_preemptions > 0 and driver.pool.num_copies > 0
    told.take(watch.look())
    assert len(told.copies) == driver.pool.num_copies


def candidates(batch):
    """Likely tokens for every beam."""
    output = random_tokens(batch)
    for index, row in enumerate(batch.output_rows):
        ids = [(row.sequence_id * 31 + batch.step * 7 + rank) % 500 for rank in range(8)]
        values = [-0.1 - 0.3 * rank for rank in range(8)]
        output.logprobs[index] = [TokenLogprobs(values[0], 1, ids, values)]
    return output


def test_beams_that_fork_and_are_dropped():
    driver = make_driver(num_blocks=200, answer=candidates)
    watch, told = make_watch(driver), Told()
    search = BeamSearch(BeamSearchParams(beam_width=4, max_tokens=40), frozenset(), 40)
    driver.add(list(range(37)), 40, beams=search).stream = SimpleNamespace(lora_request=None)
    most = 0
    while driver.step():
        sequences = list(driver.scheduler.sequences())
        assert memory_figures(driver.pool, sequences) == figures_block_by_block(driver.pool, sequences)
        told.take(watch.look())
        assert {key[0] for key in told.tables} == {each.sequence_id for each in sequences}
        most = max(most, len(told.names))
    assert most == 4 and told.copies and not told.tables


def test_a_look_after_nothing_tells_nothing():
    driver = make_driver()
    watch = make_watch(driver)
    assert not watch.look()
    overview = watch.overview()
    assert (overview.requests, overview.num_requests, overview.waste) == ([], 0, 0.0)


def test_a_window_leaves_its_mark():
    """Blocks that left a group's window are -1 in its table, and nobody's."""
    pool = BlockPool(20, SIZE)
    tables = BlockTables(pool, (None, 32))
    request = SimpleNamespace(request_id="r", sequences=[])
    request.sequences = [SimpleNamespace(sequence_id=1, choice_index=0, request=request, blocks=tables)]
    watch, told = EngineWatch(pool, lambda: [request], None, EventLog()), Told()
    for length in (16, 64, 160):
        tables.drop_outside_window(length - 16)
        tables.grow(length, length - 16)
        told.take(watch.look())
        assert told.tables == {(1, group): table.block_ids for group, table in enumerate(tables.tables)}
    assert NO_BLOCK in told.tables[1, 1] and NO_BLOCK not in told.tables[1, 0]


def test_no_more_requests_are_shown_than_fit():
    driver = make_driver()
    for number in range(MAX_REQUESTS + 5):
        driver.add([number], 1).stream = SimpleNamespace(lora_request=None)
    overview = make_watch(driver).overview()
    assert (len(overview.requests), overview.num_requests) == (MAX_REQUESTS, MAX_REQUESTS + 5)
    assert overview.requests[0].request_id == "1"


def test_latencies():
    events = EventLog()
    latency = _Latency(events)
    assert latency.first_tokens() is None
    queued = events.record("queued", "a")
    events.record("queued", "b")
    first = events.record("first_token", "a")
    events.record("finished", "b", detail="abort")
    assert latency.first_tokens() == pytest.approx(first - queued)
    assert latency.first_tokens() is None

    def request(last, *lengths):
        sequences = [SimpleNamespace(num_output_tokens=length) for length in lengths]
        metrics = SimpleNamespace(last_token_time=last)
        return SimpleNamespace(request_id="a", metrics=metrics, sequences=sequences)

    assert latency.between_tokens([request(None, 0)]) is None
    assert latency.between_tokens([request(10.0, 5, 5)]) is None
    assert latency.between_tokens([request(11.0, 15, 15)]) == pytest.approx(0.1)
    assert latency.between_tokens([]) is None
