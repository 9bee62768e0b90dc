"""AutoCompaction: each trigger, hysteresis, cool-down, slices by a budget; and what its runs do to an engine."""

from __future__ import annotations

import numpy as np
import pytest
from fake_storage import ListStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.auto_compaction import (
    COOL_DOWN_STEPS,
    LATELY_STEPS,
    LOOK_EVERY_STEPS,
    STOP_SHARE,
    AutoCompaction,
    Fragmentation,
    Slice,
)
from allocator.commands import Cancel, Compact, SetAutoCompaction
from allocator.compaction import PoolShape, plan_pack_low
from allocator.config import EngineConfig
from allocator.content import Request, TokenContent
from allocator.engine import Engine
from allocator.facts import CACHED, FREE, SOLE
from allocator.snapshot import MAX_COMPACTIONS

PACK = Slice("pack-low", None, keep_cached=True)


def now(ratio: float, *, largest: int = 10, allocatable: int = 100, waiting: int = 0) -> Fragmentation:
    return Fragmentation(ratio, largest, allocatable, waiting)


# -- the policy alone --------------------------------------------------------------------------------


def test_a_run_starts_above_the_threshold_and_goes_on_to_half_of_it():
    auto = AutoCompaction()
    assert auto.next_look == LOOK_EVERY_STEPS
    assert auto.decide(40, now(0.5), 0.5) == (None, None)
    assert auto.next_look == 80
    assert auto.decide(80, now(0.51), 0.5) == (PACK, None)
    assert auto.next_look == 81
    auto.moved(8, 12, 0, 800, 0.5)
    assert auto.decide(81, now(0.4), 0.5) == (PACK, None)  # below the threshold, but not by enough
    auto.moved(8, 4, 0, 800, 0.25)
    wanted, record = auto.decide(82, now(0.5 * STOP_SHARE), 0.5)
    assert wanted is None
    assert record is not None
    assert (record.trigger, record.goal, record.run_blocks) == ("threshold", "pack-low", None)
    assert (record.started_step, record.ended_step, record.planned_blocks) == (80, 82, 20)
    assert (record.moved_blocks, record.moved_bytes, record.seconds) == (16, 1600, 0.75)
    assert (record.ratio_before, record.ratio_after) == (0.51, 0.25)


def test_after_a_run_it_cools_down():
    auto = AutoCompaction()
    auto.decide(40, now(0.9), 0.5)
    auto.moved(5, 0, 0, 50, 0.1)
    assert auto.end(40, now(0.6)).ratio_after == 0.6
    started = next(s for s in range(41, 2000, LOOK_EVERY_STEPS) if auto.decide(s, now(0.9), 0.5)[0])
    assert COOL_DOWN_STEPS <= started - 40 < COOL_DOWN_STEPS + LOOK_EVERY_STEPS


def test_a_run_that_moved_nothing_leaves_no_record_and_is_tried_again_at_the_next_look():
    auto = AutoCompaction()
    assert auto.decide(40, now(0.9), 0.5) == (PACK, None)
    assert auto.end(40, now(0.9)) is None
    assert auto.trigger is None
    assert auto.next_look == 40 + LOOK_EVERY_STEPS
    assert auto.decide(80, now(0.9), 0.5) == (PACK, None)
    assert auto.end(80, now(0.9)) is None
    # A contiguous need that could not be met cools down: nothing tells that it could be met soon.
    assert auto.decide(120, now(0.1, waiting=20), 0.5)[0] is not None
    assert auto.end(120, now(0.1)) is None
    assert auto.decide(160, now(0.1, waiting=20), 0.5) == (None, None)


def test_a_contiguous_request_that_waits_goes_before_a_threshold_run_and_may_evict():
    auto = AutoCompaction()
    auto.decide(40, now(0.9), 0.5)
    auto.moved(5, 9, 0, 50, 0.1)
    wanted, record = auto.decide(41, now(0.8, largest=10, waiting=20), 0.5)
    assert wanted == Slice("longest-run", 20, keep_cached=False)
    assert record.trigger == "threshold"
    auto.moved(3, 0, 1, 30, 0.1)
    assert auto.trigger == "contiguous"
    wanted, record = auto.decide(42, now(0.5, largest=20, waiting=20), 0.5)
    assert (wanted, record.trigger, record.run_blocks, record.evicted_blocks) == (None, "contiguous", 20, 1)
    # It had what it wanted, so the next one need not wait.
    assert auto.decide(43, now(0.5, largest=10, waiting=20), 0.5)[0] is not None


def test_a_contiguous_need_that_no_compaction_can_meet_starts_none():
    auto = AutoCompaction()
    assert auto.decide(40, now(0.1, largest=10, allocatable=19, waiting=20), 0.5) == (None, None)
    assert auto.decide(80, now(0.1, largest=20, waiting=20), 0.5) == (None, None)


def test_a_failed_contiguous_request_is_looked_at_after_its_step_unless_one_was_tried_lately():
    auto = AutoCompaction()
    auto.saw_contiguous(7, 20, failed=True)
    assert auto.next_look == 8
    assert auto.decide(8, now(0.1, waiting=20), 0.5)[0] is not None
    auto.end(8, now(0.1))
    auto.saw_contiguous(9, 20, failed=True)
    assert auto.next_look == 8 + LOOK_EVERY_STEPS


def test_the_largest_contiguous_request_seen_lately_is_a_risk():
    auto = AutoCompaction()
    auto.saw_contiguous(0, 30)
    auto.saw_contiguous(10, 20)
    assert auto.decide(40, now(0.1, largest=30), 0.5) == (None, None)
    assert auto.decide(80, now(0.1, largest=25), 0.5)[0] == Slice("longest-run", 30, keep_cached=False)
    auto.moved(1, 0, 0, 1, 0.0)
    auto.decide(81, now(0.1, largest=30), 0.5)
    assert auto.decide(LATELY_STEPS, now(0.1, largest=25), 0.5) == (None, None)
    auto.saw_contiguous(LATELY_STEPS, 5)  # a smaller one counts when the larger is long past
    assert auto.decide(LATELY_STEPS + 1, now(0.1, largest=4), 0.5)[0].run_blocks == 5


# -- plans that keep cached blocks -------------------------------------------------------------------


@settings(max_examples=200)
@given(
    states=st.lists(st.sampled_from([FREE, CACHED, SOLE]), min_size=1, max_size=30),
    pinned=st.sets(st.integers(0, 29), max_size=3),
    budget=st.integers(1, 12) | st.none(),
)
def test_packing_low_without_evictions(states, pinned, budget):
    state = np.array(states, np.uint8)
    flags = np.zeros(len(state), np.uint8)
    flags[[b for b in pinned if b < len(state)]] = 2
    cached_before = int(np.count_nonzero(state == CACHED))
    for _ in range(200):
        shape = PoolShape(state, flags, np.flatnonzero((state == CACHED) & (flags == 0)), len(state))
        plan = plan_pack_low(shape, budget, keep_cached=True)
        assert plan.evicted_blocks == 0
        assert budget is None or plan.moved_blocks <= budget
        if not plan.stages:
            break
        for stage in plan.stages:
            assert np.all(state[stage.destinations] == FREE)
            state[stage.destinations], state[stage.sources] = state[stage.sources], FREE
    else:
        raise AssertionError("slices without end")
    assert int(np.count_nonzero(state == CACHED)) == cached_before
    movable = state[flags == 0]
    held = int(np.count_nonzero(movable == SOLE))
    if budget != 1 and np.any(movable == FREE):
        assert np.all(movable[:held] == SOLE)


# -- in an engine ------------------------------------------------------------------------------------


def request(prompt: int, output: int, seed: int, at: float = 0.0) -> Request:
    return Request(
        TokenContent(np.random.default_rng(seed).integers(0, 1 << 30, prompt + output).astype(np.int32)), prompt, at
    )


def holed(budget: int = 256, **changes) -> Engine:
    """Thirty sequences of two blocks, every other one gone again: 30 held blocks, 34 free ones in short runs."""
    config = EngineConfig(**{
        "num_blocks": 64, "num_swap_blocks": 0, "stamp": True, "compact": "auto", "compact_threshold_ratio": 0.5,
        "compact_budget": budget, "prefix_cache": False, "block_size": 64, **changes,
    })  # fmt: skip
    e = Engine(config, [request(70, 50, i) for i in range(30)], storage=ListStorage(config.block_size))
    e.advance(1)
    for seq_id in range(0, 30, 2):
        assert e.apply(Cancel(seq_id)).ok
    return e


def steps(e: Engine, count: int) -> Engine:
    while e.step < count:
        e.advance(1)
        e.check()
    return e


@pytest.mark.parametrize("budget", [1, 4, 256])
def test_a_run_is_sliced_by_its_budget_and_recorded(budget):
    e = holed(budget, compact_threshold_ratio=0.4)
    e.compactor.auto.next_look = 2
    moved = []
    for _ in range(40):
        before = e.counters.compaction_moved_blocks
        if not e.advance(1):
            break
        e.check()
        moved.append(e.counters.compaction_moved_blocks - before)
    assert max(moved) <= budget
    (record,) = e.compactor.records
    assert (record.trigger, record.goal, record.evicted_blocks) == ("threshold", "pack-low", 0)
    assert record.moved_blocks == sum(moved) == e.counters.compaction_moved_blocks > 0
    assert record.moved_bytes == record.moved_blocks * e.manager.storage.block_bytes
    assert record.ratio_before > 0.4
    assert record.ratio_after <= 0.4 * STOP_SHARE
    assert (e.counters.compactions_threshold, e.counters.compactions_manual) == (1, 0)
    snapshot = e.snapshot(phase="running", speed=None, steps_per_s=None)
    assert snapshot.compactions == (record,)
    (event,) = [v for v in e.events_from(0) if v.kind == "compact"]
    assert event.text.startswith(f"compaction (threshold, pack-low): {record.moved_blocks} blocks moved, ")


def test_an_operators_compaction_is_recorded_as_manual():
    e = holed(compact="manual")
    assert e.apply(Compact("longest-run", 30, None)).ok
    (record,) = e.compactor.records
    assert (record.trigger, record.goal, record.run_blocks) == ("manual", "longest-run", 30)
    assert record.ratio_before > record.ratio_after
    assert e.counters.compactions_manual == 1
    for _ in range(3 * MAX_COMPACTIONS):
        e.apply(Compact("pack-low"))
        e.apply(Compact("longest-run", 30))
    assert len(e.compactor.records) <= MAX_COMPACTIONS


def wants_a_run(e: Engine) -> int:
    """Submit a contiguous request of 25 blocks, more than the longest run of a holed pool; return its id."""
    content = request(20, 5 + 24 * e.config.block_size, 99).content
    seq_id = e.submit(Request(content, 20, contiguous=True))
    assert seq_id is not None
    assert e.compactor.fragmentation().largest_run < e.manager.blocks_for(content.num_tokens) == 25
    return seq_id


def test_a_run_that_one_slice_can_free_is_freed_at_once():
    e = holed(compact_threshold_ratio=1.0)
    waiting = wants_a_run(e)
    e.advance(1)
    e.check()
    (record,) = e.compactor.records
    assert (record.trigger, record.goal, record.run_blocks) == ("contiguous", "longest-run", 25)
    assert record.moved_blocks == e.counters.compaction_moved_blocks > 0
    assert e.scheduler.find(waiting).row is not None
    assert (e.counters.failures_contiguous, e.counters.compactions_contiguous) == (0, 1)


def test_a_run_that_takes_several_slices_is_waited_for():
    e = holed(2, compact_threshold_ratio=1.0)
    waiting = wants_a_run(e)
    e.advance(1)
    e.check()
    assert e.copies.count("compaction") == 1
    assert e.scheduler.find(waiting).reason_kind == "contiguous"
    assert e.scheduler.find(waiting).reason.startswith("contiguous: a run of 25 blocks needed, the longest has ")
    while e.scheduler.find(waiting).row is None:
        assert e.step < 40
        e.advance(1)
        e.check()
    assert {(r.trigger, r.run_blocks) for r in e.compactor.records} == {("contiguous", 25)}
    assert e.counters.failures_contiguous == 1


def test_taking_auto_back_ends_the_run_in_progress():
    e = holed(1, compact_threshold_ratio=0.4)
    e.compactor.auto.next_look = 2
    e.advance(1)
    assert e.compactor.auto.trigger == "threshold"
    assert e.apply(SetAutoCompaction("manual")).ok
    assert e.compactor.auto.trigger is None
    assert len(e.compactor.records) == 1
    moved = e.counters.compaction_moved_blocks
    e.advance(5)
    assert e.counters.compaction_moved_blocks == moved
