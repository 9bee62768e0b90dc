"""Reuse distances: hits predicted from one run against real runs at other pool sizes, to the block."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_traces import TRACES, as_requests, traces

from allocator.commands import Cancel, Compact, EvictCached, Fork, Preempt, SwapIn, SwapOut
from allocator.config import EngineConfig
from allocator.content import KeyedContent, OpaqueContent, Request
from allocator.engine import Engine
from allocator.reuse import ReuseDistances, ReuseSummary
from kvtop.workloads.chat import chat_requests
from kvtop.workloads.trace import open_trace


def run(requests, num_blocks: int, size: int, **settings) -> Engine:
    config = EngineConfig(
        **{"num_blocks": num_blocks, "block_size": size, "geometry": "none", "serial": True, **settings}
    )
    engine = Engine(config, requests)
    while engine.advance(1 << 40):
        pass
    assert engine.done
    return engine


def predicted(engine: Engine) -> ReuseDistances:
    reuse = engine.measures.reuse
    assert reuse is not None
    return reuse


def hits_of(requests, num_blocks: int, size: int, **settings) -> int:
    return run(requests, num_blocks, size, reuse_distances=False, **settings).counters.hit_blocks


@given(traces(st.sampled_from([1, 2, 5, 16])), st.integers(1, 30))
@settings(max_examples=100)
def test_one_run_predicts_every_capacity_to_the_block(trace, num_blocks):
    size, rows = trace
    needs = [-(-(prompt + output) // size) for prompt, output, _ in rows]
    reuse = predicted(run(as_requests(rows, size), num_blocks, size))
    assert reuse.is_exact
    served = [n for n in needs if n <= num_blocks]
    refused = [n for n in needs if n > num_blocks]
    assert reuse.floor == max(served, default=0)
    assert reuse.ceiling == (min(refused) - 1 if refused else None)
    assert reuse.query_blocks == sum(r[0] // size for r, n in zip(rows, needs, strict=True) if n <= num_blocks)
    for capacity in (*range(1, 16), 18, 21, 25, 30, 40, 60):
        known = reuse.floor <= capacity and (reuse.ceiling is None or capacity <= reuse.ceiling)
        expected = hits_of(as_requests(rows, size), capacity, size) if known else None
        assert reuse.hits(capacity) == expected, capacity


@pytest.mark.parametrize("seed", range(4))
def test_real_tokens_are_predicted_too(seed):
    requests = list(itertools.islice(chat_requests(seed, block_size=8, num_blocks=512), 80))
    reuse = predicted(run(requests, 600, 8))
    assert reuse.is_exact
    for capacity in (reuse.floor, 350, 400, 600, 1200, 5000):
        if capacity >= reuse.floor:
            assert reuse.hits(capacity) == hits_of(requests, capacity, 8), capacity


@pytest.mark.parametrize(
    ("name", "size", "num_blocks", "count", "others"),
    [
        ("mooncake_conversation", 512, 1000, 3000, (248, 500, 2000, 7000, 40_000)),
        ("mooncake_synthetic", 512, 1000, 1500, (300, 700, 3000, 9000, 20_000)),
        ("weka_agentic_24", 64, 3000, 400, (2700, 4000, 6000, 10_000, 30_000)),
    ],
)
def test_public_traces_are_predicted_to_the_block(name, size, num_blocks, count, others):
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/traces")
    requests = list(itertools.islice(open_trace(path).file_order, count))
    reuse = predicted(run(requests, num_blocks, size))
    assert reuse.is_exact
    for capacity in (num_blocks, *others):
        if reuse.hits(capacity) is not None:
            assert reuse.hits(capacity) == hits_of(requests, capacity, size), capacity
    assert sum(reuse.hits(capacity) is not None for capacity in others) >= 3


def chain(*ids: int, rest: int = 0, output: int = 0) -> Request:
    prompt = 4 * len(ids) + rest
    return Request(KeyedContent(prompt + output, np.array(ids, np.int64), 4, nonce=hash(ids) % 999), prompt)


def test_by_hand():
    # Between the two requests for 1 2 lies one of three blocks, two of them private: the second 1 needs
    # those three, and itself; the second 2 is the last block of a prompt that ends on a boundary, so it is never hit.
    reuse = predicted(run([chain(1, 2), chain(9, rest=1, output=6), chain(1, 2)], 8, 4))
    assert [reuse.hits(n) for n in range(6)] == [None, None, None, 0, 1, 1]
    assert reuse.floor == 3


def test_a_request_refused_bounds_what_can_be_predicted():
    engine = run([chain(1, 2), chain(3, output=40), chain(1, 2, 3)], 8, 4)
    reuse = predicted(engine)
    assert engine.counters.refused == 1
    assert (reuse.floor, reuse.ceiling) == (3, 10)
    assert reuse.hits(8) == 2
    assert reuse.hits(11) is None
    summary = reuse.summary(8)
    assert [(p.capacity, p.hit_blocks) for p in summary.predictions] == [
        (2, None),
        (4, 2),
        (8, 2),
        (16, None),
        (32, None),
    ]


@given(traces(st.just(2)), st.integers(1, 12))
@settings(max_examples=60)
def test_a_stack_cut_short_predicts_less_but_nothing_false(trace, remembered):
    size, rows = trace
    engine = Engine(
        EngineConfig(num_blocks=100, block_size=size, geometry="none", serial=True), as_requests(rows, size)
    )
    reuse = engine.measures.reuse = ReuseDistances(100, is_exact=True, remembered=remembered)
    engine.advance(1 << 40)
    assert len(reuse._owner) <= remembered
    for capacity in range(reuse.floor, 80):
        hits = reuse.hits(capacity)
        assert hits is None or hits == hits_of(as_requests(rows, size), capacity, size)
    assert reuse.ceiling is None or reuse.ceiling >= remembered - 2 * max(len(row[2]) for row in rows)


@pytest.mark.parametrize(("pool", "remembered"), [(16, 1 << 15), (1 << 13, 1 << 16)])
def test_what_a_long_run_remembers_is_bounded_by_its_pool(pool, remembered):
    reuse = ReuseDistances(pool, is_exact=False)
    sizes = []
    for seq_id in range(remembered * 3 // 2 // 512):
        keys = [(seq_id << 16 | i).to_bytes(16, "big") for i in range(512)]
        reuse.start(seq_id, keys, 512, hittable=512, taken=512, held=512)
        reuse.release(seq_id, 512, shared=0, taken=512, held=512)
        sizes.append(len(reuse._owner))
    assert max(sizes) == sizes[-1] == remembered


def test_times_are_numbered_anew():
    rng = np.random.default_rng(7)
    requests = [chain(int(i), output=int(rng.integers(0, 30))) for i in rng.zipf(1.3, 2500) % 300]
    reuse = predicted(run(requests, 50, 4))
    assert len(reuse._segments) < 2500
    for capacity in (10, 30, 100, 250):
        assert reuse.hits(capacity) == hits_of(requests, capacity, 4)


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [({}, True), ({"serial": False}, False), ({"eviction": "fifo"}, False), ({"eviction": "lfu"}, False)],
)
def test_exact_is_said_only_where_it_is(settings, is_exact):
    assert predicted(run([chain(1, 2), chain(1, 3)], 8, 4, **settings)).is_exact is is_exact


def test_an_operator_who_evicts_makes_it_an_estimate():
    engine = run([chain(1, 2)], 8, 4)
    assert engine.apply(EvictCached(None)).ok
    assert not predicted(engine).is_exact


def test_keys_that_do_not_name_all_before_them_are_told():
    requests = [chain(1, 2, 3), chain(7, 2, 3), chain(1, 2, 3), chain(2, 1), chain(3, 7)] * 3
    reuse = predicted(run(requests, 8, 4))
    assert not reuse.is_exact
    assert reuse.hits(8) is not None


def test_nothing_is_followed_where_there_is_nothing_to_follow():
    for off in ("reuse_distances", "prefix_cache"):
        engine = run([chain(1, 2)], 8, 4, **{off: False})
        assert engine.measures.reuse is None
        assert engine.snapshot(phase="done", speed=None, steps_per_s=None).reuse is None


def test_a_running_engine_may_show_predictions_a_little_old():
    reuse = ReuseDistances(10, is_exact=True)
    reuse.query(1000, 5)
    first = reuse.summary(10, is_final=False)
    reuse.query(5, 5)
    assert reuse.summary(10, is_final=False) is first
    assert reuse.summary(10).query_blocks == 1005
    reuse.query(50, 5)
    assert reuse.summary(10, is_final=False).query_blocks == 1055
    assert isinstance(first, ReuseSummary)
    assert hash(first)


# -- several sequences at once -------------------------------------------------------------------------


def concurrent(num_blocks: int, **settings) -> Engine:
    """Two hundred chats whose demand does not depend on the pool."""
    requests = itertools.islice(chat_requests(3, block_size=16, num_blocks=1024), 200)
    return run(requests, num_blocks, 16, serial=False, num_swap_blocks=num_blocks // 2, **settings)


def test_the_run_itself_is_met_closely_and_other_sizes_roughly():
    engine = concurrent(1024)
    reuse = predicted(engine)
    queries = engine.counters.query_blocks
    assert reuse.query_blocks == queries
    assert not reuse.is_exact

    def error(num_blocks: int) -> float:
        hits = reuse.hits(num_blocks)
        assert hits is not None
        return (hits - concurrent(num_blocks, reuse_distances=False).counters.hit_blocks) / queries

    assert abs(error(1024)) < 0.01
    assert abs(error(2048)) < 0.02
    assert abs(error(4096)) < 0.02
    assert abs(error(512)) < 0.10


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_preemption_forks_and_cancels_leave_nothing_held(preempt):
    requests = list(itertools.islice(chat_requests(5, block_size=16, num_blocks=96), 60))
    requests = [dataclasses.replace(r, arrival_s=r.arrival_s / 4) for r in requests]
    config = EngineConfig(num_blocks=160, geometry="none", num_swap_blocks=100, preempt=preempt)
    engine = Engine(config, requests)
    rng = np.random.default_rng(1)
    while engine.advance(int(rng.integers(1, 40))):
        for sequence in engine.unfinished()[:1]:
            kind = (Cancel, Fork, Preempt, SwapOut, SwapIn)[int(rng.integers(0, 5))]
            engine.apply(kind(sequence.seq_id))
        engine.apply(Compact("pack-low"))
        for sequence in engine.unfinished():
            if sequence.held:
                engine.apply(SwapIn(sequence.seq_id))
    reuse = predicted(engine)
    assert reuse._running == {}
    assert engine.manager.device.num_active == 0
    assert all(segment.slot >= 0 for segment in reuse._owner.values())
    assert (
        reuse._from(0)
        == reuse._total
        == sum((s.stop - s.first if s else 0) + holes for s, holes in zip(reuse._segments, reuse._holes, strict=True))
    )
    assert set(reuse._owner) <= {k for s in reuse._segments if s for k in s.keys[s.first : s.stop]}


def test_what_was_not_computed_of_a_prompt_is_not_found():
    reuse = ReuseDistances(16, is_exact=False)
    reuse.query(6, 6)
    reuse.start(0, [1, 2, 3, 4, 5, 6], 6, hittable=6, taken=2, held=2)  # in chunks: the first has two blocks
    reuse.release(0, 2, shared=0, taken=2, held=2)
    reuse.query(6, 6)
    reuse.start(1, [1, 2, 3, 4, 5, 6], 6, hittable=6, taken=6, held=6)
    assert reuse.hits(16) == 2
    reuse.release(1, 6, shared=0, taken=6, held=6)
    reuse.query(6, 6)
    reuse.start(2, [1, 2, 3, 4, 5, 6], 6, hittable=6, taken=6, held=6)
    assert reuse.hits(16) == 2 + 6


def test_a_request_in_one_run_makes_it_an_estimate():
    engine = Engine(EngineConfig(num_blocks=8, block_size=4, geometry="none", serial=True, num_swap_blocks=0))
    engine.submit(Request(OpaqueContent(8, 0), 4))
    engine.advance(100)
    assert predicted(engine).is_exact
    engine.submit(Request(OpaqueContent(8, 1), 4, contiguous=True))
    engine.advance(100)
    assert not predicted(engine).is_exact
