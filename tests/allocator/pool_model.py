"""PoolModel: what a block pool is, in dicts and sets, written from the laws and not from the code.

It never chooses a free block; it is told which ids the pool handed out and says whether they were
allowed. Which cached block goes next is no choice, so that it predicts exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from allocator.facts import publish_states
from allocator.ids import BlockState
from allocator.pool import BlockPool


class PoolModel:
    """One tier's blocks. All attributes are the model's own; tests read them freely."""

    def __init__(self, num_blocks: int, slab_size: int, policy: str) -> None:
        self.num_blocks, self.slab_size, self.policy = num_blocks, slab_size, policy
        self.refs: dict[int, int] = {}
        self.key: dict[int, bytes] = {}
        self.block: dict[bytes, int] = {}
        self.flags: dict[int, int] = {}
        self.reserved: set[int] = set()
        self.released: dict[int, int] = {}  # cached block -> number of the release
        self.inserted: dict[int, int] = {}  # keyed block -> number of the insertion
        self.uses: dict[int, int] = {}
        self.clock = 0
        self.num_evicted = 0

    # -- what is so ------------------------------------------------------------------------------

    def ref(self, block: int) -> int:
        return self.refs.get(block, 0)

    def is_cached(self, block: int) -> bool:
        return not self.ref(block) and block in self.key

    def is_free(self, block: int) -> bool:
        return not self.ref(block) and block not in self.key and block not in self.reserved

    def is_held(self, block: int) -> bool:
        return self.ref(block) > 0

    def all(self, test: object) -> list[int]:
        return [b for b in range(self.num_blocks) if test(b)]  # type: ignore[operator]

    def loose_free(self) -> set[int]:
        """Free blocks that may be handed out."""
        return {b for b in self.all(self.is_free) if not self.flags.get(b)}

    def order(self) -> list[int]:
        """Evictable blocks, next victim first."""
        rank = {
            "lru": lambda b: (self.released[b],),
            "fifo": lambda b: (self.inserted[b], self.released[b]),
            "lfu": lambda b: (self.uses[b], self.released[b]),
        }[self.policy]
        return sorted((b for b in self.all(self.is_cached) if not self.flags.get(b)), key=rank)

    def allocatable(self) -> int:
        return len(self.loose_free()) + len(self.order())

    def runs(self, wanted: Iterable[int]) -> list[tuple[int, int]]:
        """(start, length) of the runs of consecutive ids within slabs, ascending."""
        runs: list[list[int]] = []
        for b in sorted(wanted):
            if runs and runs[-1][0] + runs[-1][1] == b and b % self.slab_size:
                runs[-1][1] += 1
            else:
                runs.append([b, 1])
        return [(start, length) for start, length in runs]

    def match(self, keys: Sequence[bytes]) -> list[int]:
        found = []
        for key in keys:
            if key not in self.block:
                break
            found.append(self.block[key])
        return found

    # -- what happens ----------------------------------------------------------------------------

    def forget(self, block: int) -> None:
        del self.block[self.key.pop(block)]
        for about in (self.released, self.inserted, self.uses):
            about.pop(block, None)

    def evict(self, n: int) -> list[int]:
        victims = self.order()[:n]
        for block in victims:
            self.forget(block)
        self.num_evicted += len(victims)
        return victims

    def take(self, ids: Iterable[int]) -> None:
        """The pool handed these out: free ones first, then exactly the next victims."""
        ids = [int(b) for b in ids]
        assert len(set(ids)) == len(ids)
        self.make_free(len(ids))
        assert set(ids) <= self.loose_free(), "a block was handed out that is not free"
        for block in ids:
            self.refs[block] = 1

    def make_free(self, n: int) -> None:
        """Evict what allocating ``n`` blocks has to evict."""
        self.evict(max(0, n - len(self.loose_free())))

    def share(self, ids: Iterable[int]) -> None:
        for block in map(int, ids):
            assert self.is_held(block) or self.is_cached(block)
            self.refs[block] = self.ref(block) + 1
            self.released.pop(block, None)
            if block in self.key:
                self.uses[block] += 1

    def release(self, ids: Iterable[int]) -> int:
        gone = 0
        for block in map(int, ids):
            assert self.is_held(block)
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                gone += 1
                if block in self.key:
                    self.released[block] = self.clock
                    self.clock += 1
        return gone

    def insert(self, ids: Iterable[int], keys: Iterable[bytes]) -> int:
        done = 0
        for block, key in zip(map(int, ids), keys, strict=True):
            if key not in self.block and block not in self.key:
                self.block[key], self.key[block] = block, key
                self.inserted[block], self.uses[block] = self.clock, 0
                self.clock += 1
                done += 1
        return done

    def move(self, sources: Iterable[int], destinations: Iterable[int]) -> None:
        for source, destination in zip(map(int, sources), map(int, destinations), strict=True):
            self.reserved.discard(destination)
            assert self.is_free(destination)
            assert not self.is_free(source)
            for about in (self.refs, self.released, self.inserted, self.uses):
                if source in about:
                    about[destination] = about.pop(source)
            if source in self.key:
                self.key[destination] = self.key.pop(source)
                self.block[self.key[destination]] = destination

    # -- the comparison --------------------------------------------------------------------------

    def compare(self, pool: BlockPool) -> None:
        """Assert that the pool is in every respect what the model is."""
        n = self.num_blocks
        assert pool.num_blocks == n
        assert [pool.ref_count(b) for b in range(n)] == [self.ref(b) for b in range(n)]
        assert pool.facts.ref_counts().tolist() == [self.ref(b) for b in range(n)]
        published = np.empty(n, np.uint8)
        publish_states(pool.facts.state, published)
        assert published.tolist() == [self.state(b) for b in range(n)]
        assert pool.facts.flags.tolist() == [self.flags.get(b, 0) for b in range(n)]
        assert {b: k for b in range(n) if (k := pool.cache.key_of(b)) is not None} == self.key
        assert dict(pool.cache.items()) == self.key
        assert all(pool.cache.block_of(key) == block for key, block in self.block.items())
        assert sorted(pool.free_ids().tolist()) == sorted(self.loose_free())
        assert pool.eviction_order().tolist() == self.order()
        numbers = (pool.num_free, pool.num_cached, pool.num_active, pool.num_reserved, pool.num_allocatable)
        tests = (self.is_free, self.is_cached, self.is_held, self.reserved.__contains__)
        assert numbers == (*(len(self.all(test)) for test in tests), self.allocatable())
        assert pool.num_evicted == self.num_evicted
        assert pool.count_shared(np.arange(n)) == sum(self.ref(b) >= 2 for b in range(n))

    def state(self, block: int) -> BlockState:
        if block in self.reserved:
            return BlockState.RESERVED
        if self.ref(block):
            return BlockState.ACTIVE
        return BlockState.CACHED if block in self.key else BlockState.FREE
