"""BlockPool in hand-made cases that random ones seldom meet."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.metrics import find_runs
from allocator.pool import BlockPool


@pytest.mark.parametrize("n", [2, 20])
def test_no_more_is_evicted_than_an_allocation_lacks(n: int) -> None:
    pool = BlockPool(50)
    cached = np.asarray(pool.allocate(40), np.int64)
    pool.insert_keys(cached, [bytes([i + 1]) * 16 for i in range(40)])
    pool.release(cached)
    assert (pool.num_free, pool.num_cached) == (10, 40)
    pool.allocate(10 + n)
    assert (pool.num_evicted, pool.num_cached, pool.num_active) == (n, 40 - n, 10 + n)


def test_a_compact_allocation_takes_the_longest_runs_when_none_is_long_enough() -> None:
    pool = BlockPool(12)
    pool.allocate(12)
    pool.release([0, 2, 4, 5, 6, 8, 9, 10])
    taken = np.zeros(12, bool)
    taken[pool.allocate_compact(5)] = True
    assert sorted(find_runs(taken, 12)[1].tolist()) == [2, 3]
