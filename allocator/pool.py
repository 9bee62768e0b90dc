"""BlockPool: owns every state, reference count and flag of one tier, its free list, cache and eviction order.

Not locked by itself: ``BlockManager`` holds the allocator lock around every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.config import Eviction
from allocator.errors import NoContiguousRun, NotHeld, OutOfBlocks, Refused
from allocator.eviction import make_order
from allocator.facts import CACHED, FREE, HOLDERS_MASK, KEY, LAST_STEP, RESERVED, SHARED, SOLE, BlockFacts
from allocator.free_list import SCALAR_BELOW, FreeList
from allocator.ids import BlockFlag, BlockKey, IdArray, Tier
from allocator.metrics import find_runs
from allocator.prefix_cache import ROOT, PrefixCache

_RAMP: Final = np.arange(4096, dtype=np.int32)
_RAMP_BYTES: Final = _RAMP.tobytes()
# One byte a block, to compare a whole table's states with in one go.
_SOLE: Final = bytes([SOLE])
_SOLE_KEY: Final = bytes([SOLE | KEY])
_SHARED_KEY: Final = bytes([SHARED | KEY])
_CACHED: Final = bytes([CACHED])
#: For each small n, what n blocks with one holder compare with, and the ramp as array and bytes: made once, since
#: making them takes as long as using them.
_SMALL: Final = tuple((_SOLE * n, _RAMP[:n].copy(), _RAMP_BYTES[: 4 * n]) for n in range(257))
# As arrays without a dimension: numpy writes them in half the time it takes for a Python int.
_TO_FREE: Final = np.array(FREE, np.uint8)
_TO_SOLE: Final = np.array(SOLE, np.uint8)
#: Block ids as callers pass and get them: a short list below ``SCALAR_BELOW``, an int64 array above.
Ids = Sequence[int] | IdArray


class Keyed(NamedTuple):
    """What giving keys did.

    Attributes:
        num_keys: Blocks that got one.
        identity: Identity of the content up to the last of them, for the blocks that follow.
    """

    num_keys: int
    identity: int


class BlockPool:
    """A fixed set of blocks with reference counts.

    Free blocks are handed out before any cached block is evicted. A block that is fenced or pinned
    while nobody holds it is withheld: neither handed out nor evicted until the flags go.

    Args:
        num_blocks: Pool size.
        slab_size: Blocks a storage slab; runs of ids end at slab ends.
        eviction: Order in which cached blocks go.
        tier: Named in errors.
    """

    def __init__(
        self, num_blocks: int, *, slab_size: int | None = None, eviction: Eviction = "lru", tier: Tier = "device"
    ) -> None:
        self.tier: Tier = tier
        self.num_blocks = num_blocks
        self.slab_size = slab_size or max(1, num_blocks)
        self.facts = BlockFacts(num_blocks)
        self.cache = PrefixCache(num_blocks)
        self.eviction: Eviction = eviction
        self.step = 0
        self.num_cached = 0
        self._num_moving = 0
        #: Fences beyond the first of blocks that several copies use at once.
        self._more_fences: dict[int, int] = {}
        #: Blocks promised to threads, one list each; kept by ``SharedPool``.
        self.reservations: list[list[int]] = []
        self.num_evicted = 0
        self.num_allocated = 0
        self.num_freed = 0
        #: Times a thread's reservation was filled; kept by ``SharedPool``.
        self.num_refills = 0
        self._withheld_free = 0
        self._withheld_cached = 0
        self._free = FreeList(num_blocks)
        self._order = make_order(eviction)
        self._releases = 0
        self._insertions = 0

    # -- numbers -------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free blocks, withheld ones included."""
        return len(self._free) + self._withheld_free

    @property
    def num_reserved(self) -> int:
        """Blocks promised: to copies that are under way, and to threads."""
        return self._num_moving + sum(map(len, self.reservations))

    @property
    def num_free_listed(self) -> int:
        """Free blocks that can be handed out."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Blocks held by block tables."""
        return self.num_blocks - self.num_free - self.num_cached - self.num_reserved

    @property
    def num_unkeyed(self) -> int:
        """Held blocks without a key."""
        return self.num_active - len(self.cache) + self.num_cached

    @property
    def num_allocatable(self) -> int:
        """All that the next request could get: free and cached blocks that are not withheld."""
        free = self._free
        return free.top + len(free.front) + self.num_cached - self._withheld_cached

    def ref_count(self, block_id: int) -> int:
        """Return how many holders a block has."""
        holders = self.facts.state_bytes[block_id] & HOLDERS_MASK
        return int(self.facts.refs[block_id]) if holders == SHARED else holders

    def count_shared(self, block_ids: IdArray) -> int:
        """Return how many of these blocks have two holders or more."""
        return int(np.count_nonzero(self.facts.state[block_ids] & SHARED))

    def free_ids(self) -> IdArray:
        """Return the free list, next to be handed out last. [f]"""
        return self._free.ids()

    def eviction_order(self, limit: int | None = None) -> IdArray:
        """Return the evictable cached blocks, next victim first: all, or the first ``limit``. [m]"""
        return self._order.order(self.facts, limit)

    # -- taking blocks -------------------------------------------------------------------------------

    def allocate(self, n: int) -> Ids:
        """Take ``n`` blocks with one reference each: free ones first, then cached ones in eviction order.

        Returns:
            Their ids; from an untouched pool in ascending order. [n]

        Raises:
            OutOfBlocks: Fewer are allocatable; nothing is taken.
        """
        free = self._free
        if SCALAR_BELOW <= n <= free.top:
            free.top = top = free.top - n
            taken = free.stack[top : top + n][::-1].copy()
            self.facts.state[taken] = _TO_SOLE
            self.num_allocated += n
            return taken
        if n > len(free):
            if n > self.num_allocatable:
                raise OutOfBlocks(n, self.num_allocatable, self.tier)
            self._evict(n - len(free))
        self.num_allocated += n
        if n < SCALAR_BELOW:
            few = free.take_few(n) if n else []
            state = self.facts.state_bytes
            for block in few:
                state[block] = SOLE
            return few
        many = free.take_many(n)
        self.facts.state[many] = _TO_SOLE
        return many

    def allocate_contiguous(self, n: int) -> IdArray:
        """Take ``n`` blocks with consecutive ids from the shortest run that fits; the lowest such run.

        Runs of free blocks are tried first, then runs that hold cached blocks too, which are evicted.

        Raises:
            OutOfBlocks: Fewer than ``n`` are allocatable.
            NoContiguousRun: Enough are allocatable, but no run is long enough.
        """
        if n > self.num_allocatable:
            raise OutOfBlocks(n, self.num_allocatable, self.tier)
        unflagged = self.facts.flags == 0
        for idle in (self.facts.state == FREE, (self.facts.state & ~np.uint8(KEY)) == FREE):
            starts, lengths = find_runs(idle & unflagged, self.slab_size)
            fits = np.flatnonzero(lengths >= n)
            if len(fits):
                start = int(starts[fits[np.argmin(lengths[fits])]])
                return self._take_exactly(np.arange(start, start + n, dtype=np.int64))
        raise NoContiguousRun(n, int(lengths.max()) if len(lengths) else 0, self.num_allocatable)

    def allocate_compact(self, n: int) -> IdArray:
        """Take ``n`` blocks in as few runs as the free blocks allow: the best-fitting run, else the longest first.

        Raises:
            OutOfBlocks: Fewer are allocatable; nothing is taken.
        """
        if n > len(self._free):
            return np.asarray(self.allocate(n), np.int64)
        starts, lengths = find_runs((self.facts.state == FREE) & (self.facts.flags == 0), self.slab_size)
        taken: list[IdArray] = []
        missing = n
        while missing:
            fits = np.flatnonzero(lengths >= missing)
            best = int(fits[np.argmin(lengths[fits])]) if len(fits) else int(np.argmax(lengths))
            take = min(missing, int(lengths[best]))
            taken.append(np.arange(starts[best], starts[best] + take, dtype=np.int64))
            lengths[best] = 0
            missing -= take
        return self._take_exactly(np.sort(np.concatenate(taken)) if taken else np.empty(0, np.int64))

    def share(self, block_ids: Ids) -> None:
        """Add one reference to each block, reviving cached ones. The ids are distinct. [n]

        Raises:
            NotHeld: Some block is neither held nor cached; nothing changes.
        """
        facts = self.facts
        ids = np.asarray(block_ids, np.int64)
        states = facts.state[ids]
        codes = states.tobytes()
        shared, sole = codes.count(SHARED | KEY), codes.count(SOLE | KEY)
        # Along a prefix the holders get fewer, so the states of a match are usually in this order.
        if codes == _SHARED_KEY * shared + _SOLE_KEY * sole + _CACHED * (len(ids) - shared - sole):
            self._add_holder(ids[:shared], ids[shared : shared + sole], ids[shared + sole :])
            return
        if ((states == FREE) | (states == RESERVED) | (states > (SHARED | KEY))).any():
            raise NotHeld("a block that is neither held nor cached cannot be shared")
        holders = states & HOLDERS_MASK
        self._add_holder(ids[holders == SHARED], ids[holders == SOLE], ids[holders == 0])

    # -- giving blocks back ---------------------------------------------------------------------------

    def release(self, block_ids: Ids) -> int:
        """Drop one reference for each id and return how many blocks nobody holds any more.

        A block without a key is free at once. One with a key becomes cached and joins the young end of
        the eviction order, in the order given, so pass a block table *tail first*: its last block is the
        least likely to be hit again. Repeats are allowed: each drops one reference.

        Args:
            block_ids: Blocks the caller holds. [n]

        Raises:
            NotHeld: Some id has fewer references than were to be dropped (a double free), or does not exist.
                Nothing changes.

        Source: tail-first order as in vLLM v1's block pool; refusing the whole call is ours.
        """
        n = len(block_ids)
        if isinstance(block_ids, np.ndarray):
            if self._release_plain(block_ids, n):
                return n
        elif n < SCALAR_BELOW and self._release_few(block_ids):
            return n
        facts = self.facts
        ids = np.asarray(block_ids, np.int64)
        if n == 0:
            return 0
        if int(ids.min()) < 0 or int(ids.max()) >= facts.num_blocks:
            raise NotHeld(f"no block {int(ids.min()) if int(ids.min()) < 0 else int(ids.max())} in this pool")
        unique, counts = np.unique(ids, return_counts=True)
        if len(unique) < n:
            if (counts > facts.ref_counts()[unique]).any():
                raise NotHeld("a block was released more often than it is held")
            # Peel repeats off one reference at a time; the last occurrence decides the place in the order.
            _, last = np.unique(ids[::-1], return_index=True)
            keep = np.zeros(n, bool)
            keep[n - 1 - last] = True
            extra = ids[~keep]
            while len(extra):
                head, first = np.unique(extra, return_index=True)
                self._drop_shared(head)
                extra = np.delete(extra, first)
            ids = ids[keep]
        return self.release_distinct(ids)

    def _release_plain(self, ids: IdArray, n: int) -> bool:
        """Release distinct blocks with one holder and no key, the usual case; return whether they all were that."""
        facts = self.facts
        state = facts.state
        try:
            if n < len(_SMALL):
                sole, ramp, ramp_bytes = _SMALL[n]
            else:
                sole, ramp, ramp_bytes = _SOLE * n, _RAMP[:n], _RAMP_BYTES[: 4 * n]
            if facts.guarded[ids].tobytes() != sole or facts.num_flagged:
                return False
            state[ids] = _TO_FREE
        except IndexError:
            return False
        if n << 6 > self.num_blocks or n > len(_RAMP):
            # Only this call makes blocks free here, so the free ones must now be exactly n more.
            distinct = self.num_blocks - int(np.count_nonzero(state)) == len(self._free) + n
        else:
            mark = facts.mark
            mark[ids] = ramp
            distinct = mark[ids].tobytes() == ramp_bytes
        if not distinct:
            state[ids] = SOLE
            return False
        self._free.put_many(ids)
        self.num_freed += n
        return True

    def _release_few(self, ids: Sequence[int]) -> bool:
        """``_release_plain`` for a handful of ids, without numpy."""
        if self.facts.num_flagged or not self.facts.restate_sole(ids, FREE):
            return False
        self._free.put_few(ids)
        self.num_freed += len(ids)
        return True

    def release_distinct(self, ids: IdArray) -> int:
        """``release`` for ids that the caller knows to exist and to be distinct, such as one block table. [n]"""
        facts = self.facts
        states = facts.state[ids]
        codes = states.tobytes()
        if codes == _SOLE * len(ids):
            return self._make_idle(ids, ids[:0])
        plain, keyed = codes.count(SOLE), codes.count(SOLE | KEY)
        # Tail first come the unkeyed blocks, then keyed ones, then those that others share.
        if codes == _SOLE * plain + _SOLE_KEY * keyed + _SHARED_KEY * (len(ids) - plain - keyed):
            if plain + keyed < len(ids):
                self._drop_shared(ids[plain + keyed :])
            return self._make_idle(ids[:plain], ids[plain : plain + keyed])
        holders = states & HOLDERS_MASK
        if not holders.all() or (states > (SHARED | KEY)).any():
            raise NotHeld("a block that nobody holds was released")
        self._drop_shared(ids[holders == SHARED])
        return self._make_idle(ids[states == SOLE], ids[states == (SOLE | KEY)])

    def insert_keys(
        self,
        block_ids: Ids,
        keys: Sequence[BlockKey],
        tokens: NDArray[np.int32] | None = None,
        parent: int = ROOT,
    ) -> Keyed:
        """Give held, full blocks that follow each other in one sequence their keys.

        A block keeps the first key it was given, and the first block with a content keeps that content's key.

        Args:
            block_ids: The blocks. [n]
            keys: Their keys. [n]
            tokens: Their tokens, to be compared on a hit; ``None`` where keys are exact by themselves. [n * block_size]
            parent: Identity of the content before them, see ``PrefixCache``.
        """
        facts = self.facts
        ids = np.asarray(block_ids, np.int64)
        if not facts.state[ids].tobytes().isascii():
            return self._insert_singly(ids, keys, tokens, parent)
        inserted = self.cache.insert(ids, keys, tokens, parent)
        if inserted.displaced:
            self._lose_keys(inserted.displaced)
        if inserted.positions is not None:
            ids = ids[inserted.positions]
        facts.state[ids] |= KEY
        if self.eviction != "lru":
            facts.inserted[ids] = np.arange(self._insertions, self._insertions + len(ids))
            facts.uses[ids] = 0
            self._insertions += len(ids)
        return Keyed(len(ids), inserted.identity)

    def evict(self, n: int | None = None) -> int:
        """Evict the next ``n`` cached blocks, or all; return how many were. Pinned and fenced ones stay."""
        evictable = self.num_cached - self._withheld_cached
        n = evictable if n is None else min(n, evictable)
        self._evict(n)
        return n

    def evict_exactly(self, block_ids: IdArray) -> None:
        """Evict these cached blocks; they become free. [n]"""
        self._uncache(block_ids)
        self._free.put_many(block_ids[self.facts.flags[block_ids] == 0])

    # -- flags, reservations, moves ------------------------------------------------------------------

    def set_flag(self, block_ids: IdArray, flag: BlockFlag) -> None:
        """Raise a flag on blocks, held or idle. Distinct ids. [n]"""
        facts = self.facts
        fresh = block_ids[facts.flags[block_ids] == 0]
        facts.flags[block_ids] |= np.uint8(flag)
        self.facts.num_flagged += len(fresh)
        idle_free = fresh[facts.state[fresh] == FREE]
        self._withheld_cached += int(np.count_nonzero(facts.state[fresh] == CACHED))
        if len(idle_free):
            self._withheld_free += len(idle_free)
            self._drop_from_free_list()

    def clear_flag(self, block_ids: IdArray, flag: BlockFlag) -> None:
        """Lower a flag; free blocks left without any join the free list. Distinct ids. [n]"""
        facts = self.facts
        flagged = block_ids[facts.flags[block_ids] != 0]
        facts.flags[flagged] &= ~np.uint8(flag)
        bare = flagged[facts.flags[flagged] == 0]
        self.facts.num_flagged -= len(bare)
        idle_free = bare[facts.state[bare] == FREE]
        self._withheld_cached -= int(np.count_nonzero(facts.state[bare] == CACHED))
        if len(idle_free):
            self._withheld_free -= len(idle_free)
            self._free.put_many(idle_free)

    def fence(self, block_ids: IdArray) -> None:
        """Fence blocks that a copy is about to read or write; a block may be fenced by several. Distinct ids. [n]"""
        again = block_ids[(self.facts.flags[block_ids] & BlockFlag.FENCED) != 0]
        for block in again.tolist():
            self._more_fences[block] = self._more_fences.get(block, 0) + 1
        self.set_flag(block_ids, BlockFlag.FENCED)

    def unfence(self, block_ids: IdArray) -> None:
        """Undo one ``fence`` of these blocks. Distinct ids. [n]"""
        if self._more_fences:
            last = np.ones(len(block_ids), bool)
            for i, block in enumerate(block_ids.tolist()):
                more = self._more_fences.pop(block, 0)
                last[i] = more == 0
                if more > 1:
                    self._more_fences[block] = more - 1
            block_ids = block_ids[last]
        self.clear_flag(block_ids, BlockFlag.FENCED)

    def reserve(self, n: int) -> IdArray:
        """Take ``n`` blocks as destinations of a copy: promised, and in nobody's table yet. [n]

        Raises:
            OutOfBlocks: Fewer are allocatable; nothing is taken.
        """
        ids = np.asarray(self.allocate(n), np.int64)
        self.facts.state[ids] = RESERVED
        self.num_allocated -= n
        self._num_moving += n
        return ids

    def hand_out(self, block_ids: IdArray) -> None:
        """Give reserved blocks their first holder. [n]"""
        self.facts.state[block_ids] = SOLE
        self.num_allocated += len(block_ids)
        self._num_moving -= len(block_ids)

    def take_free(self, n: int) -> IdArray:
        """Take ``n`` listed free blocks to reserve; there are as many, and their state is the caller's to write. [n]"""
        return self._free.take_many(n)

    def put_free(self, block_ids: IdArray) -> None:
        """List blocks as free again whose state the caller has made so; flagged ones are withheld. [n]"""
        if self.facts.num_flagged:
            withheld = self.facts.flags[block_ids] != 0
            self._withheld_free += int(np.count_nonzero(withheld))
            block_ids = block_ids[~withheld]
        self._free.put_many(block_ids)

    def reserve_exactly(self, block_ids: IdArray) -> None:
        """Take these free, unflagged blocks out of circulation as destinations of a copy. [n]"""
        if (self.facts.state[block_ids] != FREE).any() or self.facts.flags[block_ids].any():
            raise Refused("a destination is not free")
        self.facts.state[block_ids] = RESERVED
        self._num_moving += len(block_ids)
        self._drop_from_free_list()

    def unreserve(self, block_ids: IdArray) -> None:
        """Give back destinations that were not used. [n]"""
        self.facts.state[block_ids] = FREE
        self._num_moving -= len(block_ids)
        self.put_free(block_ids)

    def commit_moves(self, sources: IdArray, destinations: IdArray) -> None:
        """Make reserved ``destinations`` what ``sources`` are; sources become free. Flags stay with the ids. [n]"""
        facts = self.facts
        cached = facts.state[sources] == CACHED
        if facts.num_flagged:
            self._withheld_cached += int(np.count_nonzero(facts.flags[destinations[cached]]))
            self._withheld_cached -= int(np.count_nonzero(facts.flags[sources[cached]]))
        if cached.any():
            # A stale entry of a destination must not come to life with the stamp of what moves there.
            self._order.forget_stale(facts)
        facts.move(sources, destinations)
        for ids in (sources, destinations):
            facts.rekeyed.note(ids)
            facts.reused.note(ids)
        self._num_moving -= len(sources)
        self.cache.rename(sources, destinations)
        if cached.any():
            remap = np.arange(facts.num_blocks, dtype=np.int64)
            remap[sources[cached]] = destinations[cached]
            self._order.rename(remap)
        self.put_free(np.sort(sources)[::-1])

    def resize(self, num_blocks: int) -> None:
        """Change the pool size; when shrinking, the ids above the new end are all free and unflagged."""
        old = self.num_blocks
        if num_blocks < old and (self.facts.state[num_blocks:] != FREE).any():
            raise Refused("blocks above the new end are in use")
        self._order.forget_stale(self.facts)  # entries must not name ids that are gone, or come back as others
        self.facts = self.facts.resized(num_blocks)
        self.cache.resize(num_blocks)
        self.num_blocks = num_blocks
        ids = self._free.ids()
        if num_blocks > old:
            ids = np.concatenate((np.arange(num_blocks - 1, old - 1, -1, dtype=np.int64), ids))
        self._free.replace(ids[ids < num_blocks])

    # -- inside --------------------------------------------------------------------------------------

    def _take_exactly(self, block_ids: IdArray) -> IdArray:
        cached = block_ids[self.facts.state[block_ids] == CACHED]
        if len(cached):
            self._uncache(cached)
        self.facts.state[block_ids] = SOLE
        self._drop_from_free_list()
        self.num_allocated += len(block_ids)
        return block_ids

    def _add_holder(self, shared: IdArray, sole: IdArray, cached: IdArray) -> None:
        """Add one holder to blocks that have several, one and none."""
        facts = self.facts
        if len(shared):
            facts.refs[shared] += 1
        if len(sole):
            facts.refs[sole] = 2
            facts.state[sole] += SHARED - SOLE
        if len(cached):
            facts.state[cached] = SOLE | KEY
            self.num_cached -= len(cached)
            self.num_allocated += len(cached)
            if facts.num_flagged:
                self._withheld_cached -= int(np.count_nonzero(facts.flags[cached]))
        if self.eviction == "lfu":
            for ids in (shared, sole, cached):
                facts.uses[ids] += 1

    def _insert_singly(
        self, ids: IdArray, keys: Sequence[BlockKey], tokens: NDArray[np.int32] | None, parent: int
    ) -> Keyed:
        """``insert_keys`` for a chain in which some blocks have a key already."""
        count, size = 0, 0 if tokens is None else len(tokens) // len(keys)
        for i, key in enumerate(keys):
            if self.facts.state_bytes[int(ids[i])] & KEY:
                parent = self.cache.identity_of(int(ids[i]))
                continue
            own = None if tokens is None else tokens[i * size : (i + 1) * size]
            done = self.insert_keys(ids[i : i + 1], [key], own, parent)
            count, parent = count + done.num_keys, done.identity
        return Keyed(count, parent)

    def _lose_keys(self, block_ids: list[int]) -> None:
        """Follow the cache, which gave the keys of these blocks to others; cached ones become free."""
        facts = self.facts
        ids = np.array(block_ids, np.int64)
        facts.rekeyed.note(ids)
        idle = ids[facts.state[ids] == CACHED]
        facts.state[ids] &= ~np.uint8(KEY)
        self.num_cached -= len(idle)
        if facts.num_flagged:
            self._withheld_cached -= int(np.count_nonzero(facts.flags[idle]))
        self.put_free(idle)

    def _drop_shared(self, ids: IdArray) -> None:
        facts = self.facts
        facts.refs[ids] -= 1
        facts.unshared.note(ids)
        alone = ids[facts.refs[ids] == 1]
        facts.state[alone] -= SHARED - SOLE

    def _make_idle(self, plain: IdArray, keyed: IdArray) -> int:
        facts = self.facts
        if len(plain):
            facts.state[plain] = _TO_FREE
            if self.facts.num_flagged:
                withheld = facts.flags[plain] != 0
                self._withheld_free += int(np.count_nonzero(withheld))
                self._free.put_many(plain[~withheld])
            elif len(plain) < SCALAR_BELOW:
                self._free.put_few(plain.tolist())
            else:
                self._free.put_many(plain)
        if len(keyed):
            facts.state[keyed] = CACHED
            facts.reused.note(keyed)
            facts.last_used[keyed] = min(self.step, LAST_STEP)
            if self.eviction == "lru":
                facts.stamp[keyed] = self._releases
                self._releases += 1
            else:
                facts.stamp[keyed] = np.arange(self._releases, self._releases + len(keyed))
                self._releases += len(keyed)
            self.num_cached += len(keyed)
            if self.facts.num_flagged:
                self._withheld_cached += int(np.count_nonzero(facts.flags[keyed]))
            self._order.add(facts, keyed)
        freed = len(plain) + len(keyed)
        self.num_freed += freed
        return freed

    def _evict(self, n: int) -> None:
        victims = self._order.take(self.facts, n)
        self._uncache(victims)
        self._free.put_many(victims)

    def _uncache(self, block_ids: IdArray) -> None:
        self.cache.forget(block_ids)
        self.facts.rekeyed.note(block_ids)
        self.facts.state[block_ids] = FREE
        self.num_cached -= len(block_ids)
        if self.facts.num_flagged:
            withheld = int(np.count_nonzero(self.facts.flags[block_ids]))
            self._withheld_cached -= withheld
            self._withheld_free += withheld
        self.num_evicted += len(block_ids)

    def _drop_from_free_list(self) -> None:
        """Rebuild the free list after blocks in its middle were taken. Cost: O(free)."""
        ids = self._free.ids()
        self._free.replace(ids[(self.facts.state[ids] == FREE) & (self.facts.flags[ids] == 0)])
