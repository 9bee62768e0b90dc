"""Eviction orders: exact order, and no growth under hits without evictions."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.eviction import LruOrder, RankedOrder
from allocator.ids import BlockFlag
from allocator.pool import BlockPool


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def cached_pool(policy: str, n: int = 6) -> BlockPool:
    """Blocks 0 to n-1 got their keys in ascending order and were released in descending order."""
    pool = BlockPool(n, eviction=policy)
    ids = [int(b) for b in pool.allocate(n)]
    pool.insert_keys(ids, [key(b) for b in ids])
    pool.release(ids[::-1])
    return pool


def hit(pool: BlockPool, *blocks: int) -> None:
    pool.share(list(blocks))
    pool.release(list(blocks))


@pytest.mark.parametrize(
    ("policy", "fresh", "after_hits"),
    [
        ("lru", [5, 4, 3, 2, 1, 0], [4, 3, 1, 0, 5, 2]),
        ("fifo", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("lfu", [5, 4, 3, 2, 1, 0], [4, 3, 1, 0, 5, 2]),
    ],
)
def test_orders_by_hand(policy, fresh, after_hits):
    pool = cached_pool(policy)
    assert pool.eviction_order().tolist() == fresh
    hit(pool, 5)
    hit(pool, 2)
    assert pool.eviction_order().tolist() == after_hits
    assert [pool.eviction_order(n).tolist() for n in range(8)] == [after_hits[:n] for n in range(8)]
    assert [int(b) for _ in range(6) for b in pool.allocate(1)] == after_hits
    assert pool.num_evicted == 6


def test_lfu_counts_uses_since_insertion():
    pool = cached_pool("lfu", 3)
    hit(pool, 0)
    hit(pool, 0)
    hit(pool, 1)
    assert pool.eviction_order().tolist() == [2, 1, 0]
    pool.evict_exactly(np.array([0]))
    (block,) = pool.allocate(1)
    assert block == 0
    pool.insert_keys([0], [key(9)])
    pool.release([0])
    assert pool.eviction_order().tolist() == [2, 0, 1]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_pinned_blocks_keep_their_place_and_are_passed_over(policy):
    pool = cached_pool(policy)
    order = pool.eviction_order().tolist()
    pinned = np.array([order[0], order[2]])
    pool.set_flag(pinned, BlockFlag.PINNED)
    assert [pool.eviction_order(n).tolist() for n in (1, 2, 9)] == [
        order[1:2],
        [order[1], order[3]],
        pool.eviction_order().tolist(),
    ]
    assert pool.evict(2) == 2
    pool.clear_flag(pinned, BlockFlag.PINNED)
    assert pool.eviction_order().tolist() == [order[0], order[2], order[4], order[5]]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_a_block_that_moves_keeps_its_place(policy):
    pool = cached_pool(policy)
    order = pool.eviction_order().tolist()
    gone, moved = order[0], order[3]
    pool.evict(1)
    pool.reserve_exactly(np.array([gone]))
    pool.commit_moves(np.array([moved]), np.array([gone]))
    expected = [gone if b == moved else b for b in order[1:]]
    assert pool.eviction_order().tolist() == expected
    # What it is ranked by has moved with it: a hit changes its place as it would have before.
    hit(pool, gone)
    if policy != "fifo":
        expected = [*(b for b in expected if b != gone), gone]
    assert pool.eviction_order().tolist() == expected


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_records_stay_bounded_under_hits_without_evictions(policy):
    pool = cached_pool(policy, 50)
    entries = 0
    for i in range(2000):
        hit(pool, *(int(b) for b in {i % 50, (i * 7) % 50, (i * 11 + 3) % 50}))
        entries = max(entries, num_entries(pool))
    assert entries <= 2 * 50 + 64 + 3
    assert len(pool.eviction_order()) == 50


def num_entries(pool: BlockPool) -> int:
    order = pool._order
    if isinstance(order, LruOrder):
        assert order._entries == sum(len(ids) for _, ids in order._records)
        assert len(order._records) <= order._entries
        return order._entries
    assert isinstance(order, RankedOrder)
    return len(order._heap)
