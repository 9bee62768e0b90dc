"""Contiguous sequences: one run for all of their tokens, kept through compaction and swap; waiting and refusal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.commands import Compact, Fork, Pin, Preempt, Resize, SwapIn, SwapOut, Unpin
from allocator.config import EngineConfig
from allocator.content import Request, TokenContent
from allocator.engine import Engine
from allocator.errors import InvariantViolation, NoContiguousRun, OutOfBlocks, Refused
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.storage import NoStorage


def request(prompt: int, output: int, *, seed: int = 0, at: float = 0.0, run: bool = False) -> Request:
    stream = np.random.default_rng(seed).integers(0, 1 << 30, prompt + output).astype(np.int32)
    return Request(TokenContent(stream), prompt, at, contiguous=run)


def engine(requests: Iterable[Request], **settings: object) -> Engine:
    settings = {
        "num_blocks": 32,
        "num_swap_blocks": 32,
        "stamp": True,
        "device": "cpu",
        "watermark_ratio": 0,
        **settings,
    }
    return Engine(EngineConfig(**settings), requests)


def run(e: Engine) -> Engine:
    for _ in range(5000):
        if not e.advance(1):
            return e
        e.check()
    raise AssertionError(f"not over: step {e.step}, {e.stuck_reason}")


def combed(**settings: object) -> Engine:
    """Every second of sixteen pairs of blocks is free; then a request for a run of five blocks comes."""
    teeth = [request(17, 4 if i % 2 else 15, seed=i) for i in range(16)]
    return engine([*teeth, request(40, 40, seed=99, at=0.2, run=True)], **settings)


def table(e: Engine, seq_id: int) -> list[int]:
    ids = e.table(seq_id)
    assert ids is not None
    return ids.tolist()


def test_it_gets_all_its_blocks_at_once_in_one_run_and_leaves_nothing_to_be_found():
    e = engine([request(20, 60, run=True), request(20, 4, at=1.0)])
    e.advance(1)
    e.check()
    assert table(e, 0) == list(range(5))
    e.advance(39)
    assert e.counters.hit_blocks == 0
    run(e)
    assert e.counters.finished == 2
    assert e.manager.device.num_cached == 1  # the other request's prompt


def test_it_waits_with_a_reason_while_enough_blocks_are_free_but_no_run():
    e = combed(compact="off")
    e.advance(9)
    waiting = e.scheduler.waiting[0]
    assert waiting.reason == "contiguous: a run of 5 blocks needed, the longest has 2 (of 16 allocatable)"
    run(e)
    c = e.counters
    assert (c.failures_contiguous, c.contiguous_needed_blocks, c.contiguous_longest_blocks) == (1, 5, 2)
    assert (c.contiguous_allocatable_blocks, c.contiguous_admitted, c.contiguous_waited_steps) == (16, 1, 8)
    assert (c.preemptions_swap, c.preemptions_recompute, c.finished) == (0, 0, 17)


def test_compaction_cures_it_by_hand_and_by_itself():
    e = combed(compact="manual")
    e.advance(9)
    assert e.apply(Compact("longest-run", 5)).ok
    e.advance(1)
    e.check()
    assert len(table(e, 16)) == 5
    run(e)

    e = combed(compact="auto", compact_threshold_ratio=1.0)
    e.advance(9)
    e.check()
    assert len(table(e, 16)) == 5
    c = e.counters
    assert (c.failures_contiguous, c.compactions_contiguous, c.contiguous_waited_steps) == (0, 1, 0)
    assert c.compaction_moved_blocks == 2
    run(e)


def test_its_run_stays_a_run_while_others_are_moved():
    e = combed(compact="manual")
    e.advance(9)
    assert e.apply(Compact("longest-run", 5)).ok
    e.advance(1)
    before = table(e, 16)
    for goal in ("pack-low", "longest-run", "by-sequence"):
        e.apply(Compact(goal))
        e.check()
    assert table(e, 16) == before
    above = e.apply(Resize(before[-1]))
    assert not above.ok
    assert "contiguous" in above.message
    assert "one run of its own" in (e.plan(Fork(16)).refusal or "")
    e.check()


def test_it_comes_back_from_swap_in_one_run_or_not_at_all():
    e = engine([request(40, 100, run=True), *(request(17, 60, seed=i, at=0.1) for i in range(1, 7))])
    e.advance(8)
    assert e.apply(SwapOut(0)).ok
    e.check()
    assert e.apply(SwapIn(0)).ok
    e.check()
    assert np.diff(table(e, 0)).tolist() == [1] * 8

    assert e.apply(SwapOut(0)).ok
    allocatable = np.flatnonzero(e.manager.device.facts.state == 0).tolist()
    assert e.apply(Pin(tuple(b for b in allocatable if b % 5 == 0))).ok
    assert not e.apply(SwapIn(0)).ok
    e.check()
    assert e.apply(Unpin(tuple(b for b in allocatable if b % 5 == 0))).ok
    assert e.apply(SwapIn(0)).ok
    run(e)
    assert e.counters.finished == 7


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_one_needs_its_run_again(mode):
    e = engine([request(40, 100, run=True)])
    e.advance(30)
    assert e.apply(Preempt(0, mode)).ok
    e.advance(10)
    e.check()
    assert len(table(e, 0)) == 9
    run(e)
    assert e.counters.finished == 1


def test_pinned_blocks_that_leave_no_run_end_in_a_refusal_and_not_in_a_hang():
    e = engine([request(17, 30), request(200, 50, seed=1, at=0.1, run=True)])
    assert e.apply(Pin((10, 20))).ok
    run(e)
    assert e.done
    assert (e.counters.refused, e.counters.finished) == (1, 1)
    reasons = [v.text for v in e.events_from(0) if v.kind == "refuse"]
    assert reasons == ["sequence 1: needs a run of 16 blocks, pinned blocks or slab ends leave 11"]


def test_a_run_longer_than_a_slab_is_refused():
    e = run(engine([request(200, 50, run=True), request(100, 28, run=True)], slab_blocks=8))
    assert (e.counters.refused, e.counters.finished) == (1, 1)


def test_cached_blocks_give_way_to_a_run():
    e = run(engine([*(request(100, 12, seed=i, at=i) for i in range(9)), request(400, 90, seed=99, at=99, run=True)]))
    assert (e.counters.finished, e.counters.failures_contiguous) == (10, 0)
    assert e.counters.evictions > 0


def test_a_run_keeps_the_watermark_and_changes_nothing_where_there_is_none():
    manager = BlockManager(EngineConfig(num_blocks=16, num_swap_blocks=0, geometry="none"), NoStorage())
    with pytest.raises(OutOfBlocks):
        manager.admit((), 20, run_blocks=14, keep=3)
    rows = [manager.admit((), 48).row for _ in range(5)]
    for row in rows[::2]:
        manager.free(row)
    with pytest.raises(NoContiguousRun):
        manager.admit((), 20, run_blocks=5)
    check_manager(manager)
    assert manager.device.num_allocatable == 10
    assert manager.admit((), 20, run_blocks=4).row is not None
    check_manager(manager)


def test_a_stage_planned_before_a_run_was_given_does_not_tear_it():
    manager = BlockManager(EngineConfig(num_blocks=16, num_swap_blocks=0, geometry="none"), NoStorage())
    rows = [manager.admit((), 64).row for _ in range(3)]
    manager.free(rows[0])
    plan = manager.plan_compaction("pack-low", None, None)
    assert set(plan.stages[0].sources.tolist()) == {8, 9, 10, 11}
    manager.free(rows[2])
    row = manager.admit((), 20, run_blocks=8).row
    assert manager.tables.table(row).tolist() == [*range(8, 16)]
    with pytest.raises(Refused, match="out of date"):
        manager.move(plan)
    check_manager(manager)


def test_the_laws_see_a_run_that_was_torn():
    manager = BlockManager(EngineConfig(num_blocks=16, num_swap_blocks=0, geometry="none"), NoStorage())
    row = manager.admit((), 20, run_blocks=4).row
    manager.tables.table(row)[[1, 2]] = manager.tables.table(row)[[2, 1]]
    with pytest.raises(InvariantViolation, match="not consecutive"):
        check_manager(manager)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), compact=st.sampled_from(["off", "auto"]), preempt=st.sampled_from(["swap", "recompute"])
)
def test_any_mixture_gets_to_its_end(seed, compact, preempt):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.2, 40))
    mixed = [
        request(int(rng.integers(1, 120)), int(rng.integers(0, 80)), seed=i, at=float(at[i]), run=rng.random() < 0.4)
        for i in range(40)
    ]
    books = {"geometry": "none", "stamp": False, "num_swap_blocks": 10}
    e = run(engine(mixed, compact=compact, preempt=preempt, compact_threshold_ratio=0.3, **books))
    assert e.done
    assert e.counters.finished == 40
