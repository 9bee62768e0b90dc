"""SharedPool: reservations lose nothing, strand nothing, and hand no block to two threads."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from allocator.errors import InvariantViolation, NotHeld, OutOfBlocks
from allocator.facts import FREE, RESERVED, SOLE
from allocator.locks import CountedLock, checked_order
from allocator.pool import BlockPool
from allocator.reservation import SLAB, SharedPool


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Make threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(works: list[Callable[[], None]]) -> None:
    """Run functions in threads that start on a barrier; raise the first error of any."""
    barrier, errors = threading.Barrier(len(works)), []

    def run(work: Callable[[], None]) -> None:
        barrier.wait(timeout=20)
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def assert_whole(shared: SharedPool) -> None:
    """Check that every block is free, listed once, and reserved by nobody."""
    shared.reclaim_all()
    pool = shared.pool
    assert shared.num_reserved == 0
    assert sorted(pool.free_ids().tolist()) == list(range(pool.num_blocks))
    assert (pool.facts.state == FREE).all()


def test_small_batches_are_reserved_and_large_ones_are_not() -> None:
    shared = SharedPool(BlockPool(2000))
    few, many = shared.allocate(3), shared.allocate(100)
    assert len(few) == 3
    assert len(many) == 100
    assert shared.num_reserved == SLAB - 3
    assert shared.pool.num_active == 103
    assert shared.pool.num_free + shared.pool.num_active + shared.pool.num_reserved == 2000
    assert np.count_nonzero(shared.pool.facts.state == RESERVED) == SLAB - 3
    assert (shared.pool.facts.state[few] == SOLE).all()


def test_an_allocation_never_fails_while_blocks_are_reserved() -> None:
    shared = SharedPool(BlockPool(64))
    run_together([lambda: shared.release(shared.allocate(1)) for _ in range(3)])
    held = shared.allocate(1)
    assert shared.num_reserved > 0
    rest = shared.allocate(63)
    assert sorted([*held, *rest]) == list(range(64))
    assert shared.steals == 1
    with pytest.raises(OutOfBlocks):
        shared.allocate(1)
    with pytest.raises(OutOfBlocks):
        shared.allocate(40)


def test_reserving_evicts_nothing() -> None:
    pool = BlockPool(8)
    ids = pool.allocate(8)
    pool.insert_keys(list(ids), [bytes([i + 1]) * 16 for i in range(8)])
    pool.release(ids)
    shared = SharedPool(pool)
    assert len(shared.allocate(2)) == 2
    assert (pool.num_cached, pool.num_evicted, shared.num_reserved) == (6, 2, 0)


def test_at_most_half_of_the_free_blocks_are_reserved_at_once() -> None:
    shared = SharedPool(BlockPool(20))
    shared.allocate(1)
    assert (shared.pool.num_free_listed, shared.num_reserved) == (10, 9)


def test_a_reservation_stays_bounded_whatever_is_released_into_it() -> None:
    shared = SharedPool(BlockPool(4000))
    for batch in [shared.allocate(7) for _ in range(300)]:
        shared.release(batch)
        assert shared.num_reserved <= 2 * SLAB


def test_a_thread_that_ends_gives_its_reservation_back() -> None:
    shared = SharedPool(BlockPool(1000))
    run_together([lambda: shared.release(shared.allocate(2))])
    assert shared.num_reserved == 0
    assert shared.pool.num_free == 1000
    assert (shared.pool.num_allocated, shared.pool.num_freed) == (2, 2)


def test_idle_reservations_come_back() -> None:
    shared = SharedPool(BlockPool(1000))
    shared.release(shared.allocate(1))
    assert shared.reclaim_idle() == 0
    assert shared.num_reserved == SLAB
    assert shared.reclaim_idle() == SLAB
    assert shared.num_reserved == 0


@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_double_free_changes_nothing(n: int) -> None:
    shared = SharedPool(BlockPool(500))
    ids = shared.allocate(n)
    other = shared.allocate(2)
    shared.release(ids)
    before = bytes(shared.pool.facts.state_bytes)
    for wrong in (ids, [*other, int(ids[0])], [int(other[0]), int(other[0])], [500], [-1]):
        with pytest.raises(NotHeld):
            shared.release(wrong)
        assert bytes(shared.pool.facts.state_bytes) == before


def test_a_pinned_block_is_not_handed_out_even_from_a_reservation() -> None:
    shared = SharedPool(BlockPool(300))
    first = shared.allocate(1)[0]
    shared.release([first])
    shared.pin(np.array([first]))
    taken = shared.allocate(299)
    assert first not in taken
    with pytest.raises(OutOfBlocks):
        shared.allocate(1)
    shared.unpin(np.array([first]))
    assert shared.allocate(1) == [first]


def test_shared_blocks_keep_their_count_through_either_way_back() -> None:
    shared = SharedPool(BlockPool(100))
    ids = shared.allocate(4)
    shared.share(ids)
    shared.release(ids)
    assert [shared.pool.ref_count(b) for b in ids] == [1, 1, 1, 1]
    shared.release(ids)
    assert_whole(shared)


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("num_blocks", [24, 4000])
def test_no_block_is_ever_held_twice(reserve: bool, num_blocks: int, fast_switching: None) -> None:
    shared = SharedPool(BlockPool(num_blocks), reserve=reserve)
    owner = [0] * num_blocks
    # Each slot of ``owner`` is written and read back by whoever was given the block: a second
    # holder would overwrite it.

    def client(number: int) -> Callable[[], None]:
        rng = random.Random(number)

        def work() -> None:
            held: list[list[int]] = []
            for turn in range(1500):
                mark = number * 10_000 + turn
                if held and (len(held) > 5 or rng.random() < 0.4):
                    ids = held.pop(rng.randrange(len(held)))
                    marks = {owner[b] for b in ids}
                    assert len(marks) == 1
                    assert marks.pop() // 10_000 == number
                    shared.release(ids)
                    continue
                try:
                    ids = [int(b) for b in shared.allocate(rng.choice((1, 1, 2, 5, 7, 8, 20)))]
                except OutOfBlocks:
                    continue
                for block in ids:
                    owner[block] = mark
                held.append(ids)
                if turn % 97 == 0:
                    shared.reclaim_idle()
            for ids in held:
                shared.release(ids)

        return work

    with checked_order():
        run_together([client(number) for number in range(1, 5)])
    assert_whole(shared)


def test_pinning_while_threads_release(fast_switching: None) -> None:
    shared = SharedPool(BlockPool(600))
    pinned = np.arange(0, 600, 7)
    done = threading.Event()

    def client() -> None:
        while not done.is_set():
            ids = shared.allocate(3)
            shared.release(ids)

    def operator() -> None:
        for _ in range(150):
            shared.pin(pinned)
            with shared.lock:
                held_then = Counter(int(b) for b in pinned if shared.pool.facts.state_bytes[int(b)] == SOLE)
            assert len(held_then) <= 9  # three clients, three blocks each: what they had before the pin
            shared.unpin(pinned)
        done.set()

    run_together([client, client, client, operator])
    assert_whole(shared)


def test_locks_taken_backwards_are_found() -> None:
    with checked_order(), CountedLock("allocator"), pytest.raises(InvariantViolation, match="sequence lock taken"):
        CountedLock("sequence").__enter__()


def test_the_highest_lock_held_decides_which_may_follow() -> None:
    with checked_order(), CountedLock("sequence"), CountedLock("allocator"), pytest.raises(InvariantViolation):
        CountedLock("reservation").__enter__()


def test_a_wait_is_counted_once_with_its_time() -> None:
    lock = CountedLock("allocator")
    lock.try_acquire = lambda *_: False  # as while another thread holds it
    with lock:
        pass
    assert (lock.acquisitions, lock.contended) == (1, 1)
    assert lock.wait_s == lock.longest_wait_s > 0


def test_waits_are_counted() -> None:
    lock = CountedLock("allocator")
    inside, go = threading.Event(), threading.Event()

    def holder() -> None:
        with lock:
            inside.set()
            go.wait(timeout=20)

    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    inside.wait(timeout=20)
    waiter = threading.Thread(target=lambda: lock.__enter__() and lock.__exit__(None, None, None), daemon=True)
    waiter.start()
    while not waiter.is_alive():
        pass
    go.set()
    thread.join(timeout=20)
    waiter.join(timeout=20)
    assert lock.acquisitions == 2
