"""SharedPool under load: a million operations of eight threads that change places as often as they can."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from allocator import invariants
from allocator.block_table import BlockTables
from allocator.errors import OutOfBlocks
from allocator.locks import checked_order
from allocator.pool import BlockPool
from allocator.reservation import SharedPool

NUM_THREADS = 8
#: Calls of ``allocate`` and ``release`` by each thread.
CALLS = 140_000


@pytest.fixture(autouse=True)
def fast_switching() -> Iterator[None]:
    """Make threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_blocks", [40, 20_000])
def test_a_million_operations_hand_no_block_to_two(num_blocks: int) -> None:
    shared = SharedPool(BlockPool(num_blocks))
    # Whoever is given a block signs it, and finds its own signature when it gives it back: with a second
    # holder the later signature stands. This knows nothing of the pool's own books.
    owner = [0] * num_blocks
    operations, errors = [0] * NUM_THREADS, list[BaseException]()

    def client(number: int) -> Callable[[], None]:
        rng = random.Random(number)

        def give_back(held: tuple[int, list[int]]) -> None:
            mark, ids = held
            for block in ids:
                if owner[block] != mark:
                    raise AssertionError(f"block {block} of thread {number} was signed by {owner[block]}")
                owner[block] = 0
            shared.release(ids)

        def work() -> None:
            holding: list[tuple[int, list[int]]] = []
            for turn in range(CALLS):
                if len(holding) > 6 or (holding and rng.random() < 0.5):
                    give_back(holding.pop(rng.randrange(len(holding))))
                else:
                    n = rng.choice((1, 1, 1, 2, 3, 7, 8, 12, 70))
                    try:
                        ids = [int(block) for block in shared.allocate(n)]
                    except OutOfBlocks:
                        continue
                    mark = (number + 1) * CALLS + turn
                    for block in ids:
                        if owner[block]:
                            raise AssertionError(f"block {block} was given to thread {number} too")
                        owner[block] = mark
                    holding.append((mark, ids))
                operations[number] += 1
                if turn % 1009 == 0:
                    shared.reclaim_idle()
            while holding:
                give_back(holding.pop())

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return run

    threads = [threading.Thread(target=client(number), daemon=True) for number in range(NUM_THREADS)]
    with checked_order():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=800)
            assert not thread.is_alive()
    if errors:
        raise errors[0]
    pool = shared.pool
    if num_blocks > NUM_THREADS * 7 * 70:
        assert sum(operations) == NUM_THREADS * CALLS >= 10**6
    assert not any(owner)
    assert shared.num_reserved == 0, "every thread has ended"
    assert pool.num_allocated == pool.num_freed > 10**6
    invariants._check_pool(pool, BlockTables())
    assert np.array_equal(np.sort(pool.free_ids()), np.arange(num_blocks))


def test_a_program_that_ends_while_blocks_are_reserved_says_nothing() -> None:
    program = (
        "from allocator.pool import BlockPool; from allocator.reservation import SharedPool\n"
        "shared = SharedPool(BlockPool(1000)); shared.release(shared.allocate(1)); held = shared.allocate(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
