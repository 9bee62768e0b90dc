"""Timings: the right bucket, the right kind, and nobody counted who did not wait."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
from fake_engine import until

from allocator.commands import Compact
from allocator.config import EngineConfig
from allocator.content import OpaqueContent, Request
from allocator.engine import Engine
from allocator.locks import CountedLock, SequenceLocks
from allocator.pool import BlockPool
from allocator.reservation import SharedPool
from allocator.timings import BOUNDS_S, Stopwatch, TimeCounts


def total(times: TimeCounts) -> int:
    return sum(times.counts)


def test_a_time_lands_in_the_first_bucket_that_takes_it():
    stopwatch = Stopwatch()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] * 1.01):
        stopwatch.add(seconds)
    stopwatch.add(0.5, times=3)
    read = stopwatch.read()
    expected = dict.fromkeys(range(len(BOUNDS_S) + 1), 0) | {0: 2, 1: 1, len(BOUNDS_S) - 1: 1, len(BOUNDS_S): 1}
    expected[BOUNDS_S.index(1.0)] = 3
    assert read.counts == tuple(expected.values())
    assert read.sum_s == BOUNDS_S[0] * 2.01 + BOUNDS_S[-1] * 2.01 + 1.5
    assert list(BOUNDS_S) == sorted(BOUNDS_S)


def test_an_engine_counts_its_steps_and_its_copies_by_kind():
    engine = Engine(EngineConfig(num_blocks=12, num_swap_blocks=12, block_size=4, geometry="tiny", device="cpu"))
    for number in range(6):
        engine.submit(Request(OpaqueContent(30, nonce=number), 6, 0.0, f"r{number}"))
    steps, started_s = 0, time.perf_counter()
    while taken := engine.advance(1000):
        steps += taken
    elapsed_s = time.perf_counter() - started_s
    timings = engine.snapshot(phase="done", speed=None, steps_per_s=None).timings
    assert 0 < timings.step.sum_s <= elapsed_s
    assert total(timings.step) == steps == engine.step
    copies = dict(timings.copies)
    assert total(copies["swap-out"]) == engine.counters.preemptions_swap > 0
    assert 0 < total(copies["swap-in"]) <= engine.counters.preemptions_swap
    assert copies["swap-out"].sum_s > 0
    assert total(copies["compaction"]) == total(copies["resize"]) == 0


def test_an_operator_s_copies_count_too():
    engine = Engine(EngineConfig(num_blocks=16, block_size=4, geometry="tiny", device="cpu"))
    manager = engine.manager
    rows = [manager.admit((), 8, tokens=None, keep=0).row for _ in range(4)]
    manager.free(rows[0])
    manager.free(rows[2])
    assert engine.apply(Compact()).moved_blocks
    timings = engine.snapshot(phase="done", speed=None, steps_per_s=None).timings
    assert [kind for kind, times in timings.copies if total(times)] == ["compaction"]
    for row in (rows[1], rows[3]):
        manager.free(row)
    engine.close()


def test_only_who_waits_for_a_lock_is_counted():
    lock = CountedLock("allocator")
    with lock, lock:
        pass
    assert total(lock.waits.read()) == 0
    thread = threading.Thread(target=lock.acquire)
    with lock:
        thread.start()
        until(lambda: _stands_in(thread) == "_wait")
    thread.join(10)
    assert total(lock.waits.read()) == lock.contended == 1
    assert lock.waits.read().sum_s == lock.wait_s > 0


def _stands_in(thread: threading.Thread) -> str | None:
    """Return the name of the function in which a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return None if frame is None else frame.f_code.co_name


def test_a_wait_for_a_sequence_is_counted():
    lock = CountedLock("allocator")
    rows = SequenceLocks(lock)
    with lock:
        rows.take([3])
    answers = iter([False, True])
    with lock:
        rows.drop([3])
        timer = threading.Timer(0.0, _notify, (lock, rows))
        timer.start()
        rows.wait_until(lambda: next(answers), "row 3")
    timer.join(10)
    assert total(rows.waits.read()) == 1


def _notify(lock: CountedLock, rows: SequenceLocks) -> None:
    with lock:
        rows.drop([])


def test_refills_of_reservations_are_the_pool_s():
    pool = BlockPool(256)
    shared = SharedPool(pool)
    taken = np.concatenate([np.asarray(shared.allocate(1)) for _ in range(64)])
    assert pool.num_refills == shared.refills > 0
    shared.release(taken.tolist())
