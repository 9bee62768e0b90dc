"""Eviction orders: which cached block loses its content first. Each is owned by one ``BlockPool``.

Nothing is removed when a cached block is hit: an entry counts only while the block is still
cached and bears the entry's stamp, which keeps a hit free of bookkeeping. Fenced and pinned blocks
keep their place and are passed over.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allocator.config import Eviction
from allocator.facts import CACHED, BlockFacts
from allocator.ids import IdArray


class EvictionOrder(Protocol):
    """Keeps cached blocks in the order in which they would be evicted."""

    def add(self, facts: BlockFacts, block_ids: IdArray) -> None:
        """Add blocks that have just become cached, at least one, their stamps already written. [n]"""

    def take(self, facts: BlockFacts, n: int) -> IdArray:
        """Remove and return the next ``n`` victims; fewer only when there are fewer. [0..n]"""

    def order(self, facts: BlockFacts, limit: int | None = None) -> IdArray:
        """Return the evictable blocks, next victim first: all, or the first ``limit``. Cost: O(entries) at most. [m]"""

    def rename(self, remap: IdArray) -> None:
        """Follow blocks that moved: ``remap[old]`` is the new id. [num_blocks]"""

    def forget_stale(self, facts: BlockFacts) -> None:
        """Keep current entries only, so that hits without evictions cannot make the entries grow for ever."""


class LruOrder:
    """Least recently released first: one record a release, its blocks in the order given."""

    def __init__(self) -> None:
        self._records: deque[tuple[int, IdArray]] = deque()
        self._entries = 0

    def add(self, facts: BlockFacts, block_ids: IdArray) -> None:
        if self._entries > 2 * facts.num_blocks + 64:
            self.forget_stale(facts)
        self._records.append((int(facts.stamp[block_ids[0]]), block_ids))
        self._entries += len(block_ids)

    def take(self, facts: BlockFacts, n: int) -> IdArray:
        taken: list[IdArray] = []
        skipped: list[tuple[int, IdArray]] = []
        missing = n
        while missing and self._records:
            stamp, ids = self._records[0]
            live = current = _is_current(facts, ids, stamp)
            if facts.num_flagged:
                live = current & (facts.flags[ids] == 0)
            at = live.nonzero()[0]
            cut = int(at[missing]) if len(at) > missing else len(ids)
            if cut < len(ids):
                self._records[0] = (stamp, ids[cut:])
            else:
                self._records.popleft()
            self._entries -= cut
            if live is not current:
                skipped.append((stamp, ids[:cut][(current & ~live)[:cut]]))
            if len(at):
                taken.append(ids[at[:missing]])
                missing -= len(taken[-1])
        for stamp, ids in reversed(skipped):
            if len(ids):
                self._records.appendleft((stamp, ids))
                self._entries += len(ids)
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def order(self, facts: BlockFacts, limit: int | None = None) -> IdArray:
        evictable: list[IdArray] = []
        found = 0
        for stamp, ids in self._records:
            if limit is not None and found >= limit:
                break
            evictable.append(ids[_is_current(facts, ids, stamp) & (facts.flags[ids] == 0)])
            found += len(evictable[-1])
        return np.concatenate(evictable)[:limit] if evictable else np.empty(0, np.int64)

    def rename(self, remap: IdArray) -> None:
        for i, (stamp, ids) in enumerate(self._records):
            self._records[i] = (stamp, remap[ids])

    def forget_stale(self, facts: BlockFacts) -> None:
        kept = ((stamp, ids[_is_current(facts, ids, stamp)]) for stamp, ids in self._records)
        self._records = deque(record for record in kept if len(record[1]))
        self._entries = sum(len(ids) for _, ids in self._records)


class RankedOrder:
    """Lowest rank first: insertion number for FIFO, uses since insertion for LFU; ties go to the older release."""

    def __init__(self, policy: Eviction) -> None:
        self._lfu = policy == "lfu"
        self._heap: list[tuple[int, int, int]] = []

    def add(self, facts: BlockFacts, block_ids: IdArray) -> None:
        if len(self._heap) > 2 * facts.num_blocks + 64:
            self.forget_stale(facts)
        ranks = facts.uses[block_ids] if self._lfu else facts.inserted[block_ids]
        stamps = facts.stamp[block_ids]
        for entry in zip(ranks.tolist(), stamps.tolist(), block_ids.tolist(), strict=True):
            heapq.heappush(self._heap, entry)

    def take(self, facts: BlockFacts, n: int) -> IdArray:
        taken: list[int] = []
        skipped: list[tuple[int, int, int]] = []
        while len(taken) < n and self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(facts, entry):
                continue
            if facts.flags[entry[2]]:
                skipped.append(entry)
            else:
                taken.append(entry[2])
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return np.asarray(taken, np.int64)

    def order(self, facts: BlockFacts, limit: int | None = None) -> IdArray:
        evictable = (e[2] for e in sorted(self._heap) if self._is_current(facts, e) and not facts.flags[e[2]])
        return np.asarray(list(itertools.islice(evictable, limit)), np.int64)

    def rename(self, remap: IdArray) -> None:
        # Ranks and stamps are unique together, so the ids take no part in the heap's order.
        self._heap = [(rank, stamp, int(remap[block])) for rank, stamp, block in self._heap]

    def forget_stale(self, facts: BlockFacts) -> None:
        self._heap = [entry for entry in self._heap if self._is_current(facts, entry)]
        heapq.heapify(self._heap)

    @staticmethod
    def _is_current(facts: BlockFacts, entry: tuple[int, int, int]) -> bool:
        _, stamp, block = entry
        return bool(facts.state_bytes[block] == CACHED and facts.stamp[block] == stamp)


def make_order(policy: Eviction) -> EvictionOrder:
    """Return an empty eviction order of the given policy."""
    return LruOrder() if policy == "lru" else RankedOrder(policy)


def _is_current(facts: BlockFacts, ids: IdArray, stamp: int) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (facts.state[ids] == CACHED) & (facts.stamp[ids] == stamp)
    return mask
