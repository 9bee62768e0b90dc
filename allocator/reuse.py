"""ReuseDistances: the hits that a prefix cache of any size would have had on the requests seen so far.

**What is predicted.** A query asks for a prompt's full blocks, and hits are an unbroken run from the first. Each
block asked for has a *critical capacity* c: the smallest pool in which it would have been hit. The hits of a pool of
N blocks are then the accesses with c ≤ N, and one run gives them for every N at once.

**Theory, for LRU.** At any moment H blocks are held by running sequences, and at most N − H others stay cached, those
released last. So what is cached is always a prefix of one *stack*: all keyed blocks that nobody holds, by release, the
head of a chain above its tail (a release goes tail first). The same requests in the same order make the same stack
for every N. Let d be a block's depth in it. As blocks are released above it, and H goes up and down, it stays cached
while d + H ≤ N, and once it is evicted it is gone, so ::

    c ← max(c, d + H)   after every change,      c = d + H   when it is released

H counts the *private* blocks too: partial ones, and output without keys. They take room from the cached ones while
their sequence runs, and leave it free, and free blocks are handed out before cached ones are evicted. The *holes*
above a block, c − d − H, only grow down the stack, so c is a position in a stack with H blocks on top and holes in it:

1. a block that is hit leaves a hole where it was;
2. n blocks that become held use up the n uppermost holes: the free blocks, handed out first;
3. a keyed block that is released moves from the held ones to the top of the stack;
4. a private block that is released leaves a hole there.

A chain's head is held or above its tail, so c does not fall along a prompt, and the unbroken run needs no more
care. A prompt that ends on a block boundary has its last block counted as a miss at every capacity.

**Where it is exact.** In serial replay each request runs alone, so the order of everything is the same for every N,
and so is H at a request's end: its blocks. Then the predictions are the counts of real replays, for capacities from the
*floor*, the largest request served (a smaller pool would have refused it and gone on without it), to the *ceiling*: the
smallest request refused so far, less one, or where the stack was cut for want of memory. Besides, nobody but the
requests may change what is cached, a key must name its block and all before it, and output must be new when it is
generated; ``is_exact`` says whether all that held. With several sequences at once it is an estimate: another pool would
have run more or fewer of them at once, and output is known only when its sequence ends.

**Cost.** Blocks of one chain that lie one below the other are one segment of the stack, so a request costs
O(log n) for each segment it touches, and one dictionary update for its keys.

Source: stack algorithms of Mattson and others (1970), holes for invalidated entries, a tree of counts over time
as in Olken (1981); held and private blocks are ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Final

import msgspec
import numpy as np

from allocator.ids import BlockKey

#: Keyed blocks remembered: twice what the largest capacity of a summary needs, since a chain is forgotten as a whole
#: and a pool can be made larger; within these bounds, since each costs some 150 bytes.
_POOLS: Final = 8
_MIN_REMEMBERED: Final = 1 << 15
_MAX_REMEMBERED: Final = 1 << 21
_MIN_SLOTS: Final = 1024
#: Slots of segments that are not in the stack: of a running sequence's own, and of one that an ended sequence left to
#: those who share it.
_RUNNING: Final = -2
_LEFT: Final = -1
#: Capacities of a summary, as shares of the pool.
SHARES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)


class Prediction(msgspec.Struct, frozen=True):
    """Hits at one capacity; ``None`` where they cannot be known."""

    capacity: int
    hit_blocks: int | None


class ReuseSummary(msgspec.Struct, frozen=True):
    """What a snapshot carries of the reuse distances.

    Attributes:
        is_exact: Whether the predictions are what real replays would count, rather than estimates.
        query_blocks: Full prompt blocks asked for.
        floor: Smallest capacity that serves every request seen. [blocks]
        ceiling: Largest capacity that can be predicted; ``None`` is no bound. [blocks]
        predictions: At the ``SHARES`` of the pool, ascending.
    """

    is_exact: bool
    query_blocks: int
    floor: int
    ceiling: int | None
    predictions: tuple[Prediction, ...]


class _Segment:
    """Consecutive blocks of one chain, ``keys[first:stop]``: held, or one below the other in the stack at ``slot``."""

    __slots__ = ("first", "keys", "slot", "stop")

    def __init__(self, keys: Sequence[BlockKey], first: int, stop: int) -> None:
        self.keys, self.first, self.stop, self.slot = keys, first, stop, _RUNNING


class ReuseDistances:
    """The stack and the histogram of critical capacities. Changed by the engine alone.

    Args:
        num_blocks: Pool size, from which follows how many blocks are remembered.
        is_exact: Whether the run is serial and evicts by LRU.
        remembered: Keyed blocks remembered at most; by default eight pools, within bounds.

    Attributes:
        is_exact: Whether what was seen so far allows exact predictions; whoever disturbs the cache sets it to false.
        query_blocks: Full prompt blocks asked for.
        floor: Blocks of the largest request served.
        ceiling: Largest capacity that can be predicted; ``None`` is no bound.
    """

    def __init__(self, num_blocks: int, *, is_exact: bool, remembered: int | None = None) -> None:
        self.is_exact = is_exact
        self.query_blocks = 0
        self.floor = 0
        self.ceiling: int | None = None
        self._remembered = remembered or min(max(_POOLS * num_blocks, _MIN_REMEMBERED), _MAX_REMEMBERED)
        self._owner: dict[BlockKey, _Segment] = {}
        self._running: dict[int, _Segment] = {}
        self._held = 0
        # A slot is a time of release: a segment, the holes above it, and a sum over both in a Fenwick tree.
        self._segments: list[_Segment | None] = []
        self._holes: list[int] = []
        self._tree = [0] * (_MIN_SLOTS + 1)
        self._total = 0
        self._oldest = 0
        self._holed: list[int] = []  # slots with holes, negated: a heap with the newest first
        self._summary: tuple[int, ReuseSummary] | None = None
        # Differences of the histogram: a run of accesses with c, c + 1, … costs two entries.
        self._steps = array("q", bytes(8 * _MIN_SLOTS))

    # -- what the engine tells ------------------------------------------------------------------------

    def query(self, num_full: int, needed: int) -> None:
        """Count a request that is about to start: full blocks in its prompt, blocks it takes by its end."""
        self.query_blocks += num_full
        if needed > self.floor:
            self.floor = needed

    def refuse(self, needed: int) -> None:
        """Note a request of ``needed`` blocks that was refused: a pool that large would have served it."""
        self._limit(needed - 1)

    def start(
        self, seq_id: int, keys: Sequence[BlockKey], num_full: int, *, hittable: int, taken: int, held: int
    ) -> None:
        """Note that a sequence was given its blocks.

        Args:
            seq_id: The sequence.
            keys: Keys of its leading full blocks.
            num_full: Full blocks it has.
            hittable: Leading blocks whose hits count; 0 for a sequence that has run before.
            taken: Blocks in its table.
            held: Blocks held by all sequences, this one included.
        """
        owner = self._owner
        num_full = min(num_full, len(keys))
        found = 0
        while found < num_full and (segment := owner.get(keys[found])) is not None and segment.slot < 0:
            found = self._leaves(segment, keys, found, num_full)
        if found and hittable:
            self._count(1, min(found, hittable))
        self._hold(held - taken + found)
        first = found
        own: _Segment | None = None
        kept = kept_stop = first
        while (
            found < num_full
            and (segment := owner.get(keys[found])) is not None
            and segment.slot >= 0
            and segment.first == found
        ):
            stop = self._leaves(segment, keys, found, num_full)
            if found < hittable:
                above = self._held + self._from(segment.slot) - (segment.stop - found)
                self._count(above + 1, min(stop, hittable) - found)
            if self._take(segment, stop) and stop - found > kept_stop - kept:
                own, kept, kept_stop = segment, found, stop
            found = stop
        self._hold(held)
        known = len(owner)
        if own is None:
            own = _Segment(keys, first, num_full)
        # The longest part keeps its owner, so that a conversation that goes on costs its new blocks only.
        own.keys, own.first, own.stop = keys, first, num_full
        for start, stop in ((first, kept), (kept_stop, num_full)):
            if start < stop:
                owner.update(dict.fromkeys(keys[start:stop], own))
        own.slot = _RUNNING
        self._running[seq_id] = own
        if len(owner) - known != num_full - found:
            self.is_exact = False  # a key that does not name all before it was known behind one that was not

    def release(self, seq_id: int, num_full: int, *, shared: int, taken: int, held: int) -> None:
        """Note that a sequence is about to give its blocks back.

        Args:
            seq_id: The sequence.
            num_full: Full blocks it has.
            shared: Leading blocks that others hold too.
            taken: Blocks in its table.
            held: Blocks held by all sequences, this one included.
        """
        self._hold(held)
        owner, own = self._owner, self._running.pop(seq_id)
        own.slot = _LEFT
        keys, stop, at = own.keys, min(num_full, len(own.keys)), shared
        for key in keys[max(num_full, own.first) : own.stop]:  # its prompt was not computed to the end
            if owner.get(key) is own:
                del owner[key]
        own.stop = max(own.first, min(own.stop, num_full))
        if own.stop < stop:
            fresh = keys[own.stop : stop]
            if any(map(owner.__contains__, fresh)):
                # Whether the older block still has its key depends on the pool's size.
                self.is_exact = False
                fresh = list(takewhile(lambda key: key not in owner, fresh))
            owner.update(dict.fromkeys(fresh, own))
            own.stop += len(fresh)
        parts: list[_Segment] = []
        while at < stop and (segment := owner.get(keys[at])) is not None and segment.slot == _LEFT:
            if not segment.first <= at < segment.stop:
                break
            if segment.first < at:
                segment = self._split(segment, at)
            if segment.stop > stop:
                self._split(segment, stop)
            parts.append(segment)
            at = segment.stop
        for key in keys[at:stop]:
            # Behind a gap in the chain nobody would find them, and nobody holds them any more.
            if (segment := owner.get(key)) is not None and segment.slot == _LEFT:
                del owner[key]
                self.is_exact = False
        own.stop = min(own.stop, max(own.first, at))
        num_keyed = at - min(at, shared)
        private = max(0, taken - shared - num_keyed)
        self._held -= num_keyed + private
        for segment in reversed(parts):
            self._put(segment)
        if private and self._segments:
            self._add_holes(len(self._segments) - 1, private)
        while len(owner) > self._remembered and self._forget_oldest():
            pass

    # -- what it predicts -----------------------------------------------------------------------------

    def hits(self, capacity: int) -> int | None:
        """Return the blocks that a pool of ``capacity`` blocks would have hit; ``None`` outside floor and ceiling.

        Cost: O(capacity), in one vector pass.
        """
        if capacity < self.floor or (self.ceiling is not None and capacity > self.ceiling):
            return None
        steps = np.frombuffer(self._steps, np.int64)[: capacity + 1]
        return int(np.dot(steps, np.arange(capacity + 1, capacity + 1 - len(steps), -1)))

    def summary(self, num_blocks: int, *, is_final: bool = True) -> ReuseSummary:
        """Return the predictions at the ``SHARES`` of a pool of ``num_blocks``.

        Args:
            num_blocks: Pool size.
            is_final: Whether it must be of this moment; otherwise it may be a hundredth of the queries old.
        """
        last = self._summary
        if (
            last is not None
            and last[0] == num_blocks
            and not is_final
            and self.query_blocks <= 1.01 * last[1].query_blocks
        ):
            return last[1]
        capacities = [max(1, round(share * num_blocks)) for share in SHARES]
        predictions = tuple(Prediction(capacity, self.hits(capacity)) for capacity in capacities)
        summary = ReuseSummary(self.is_exact, self.query_blocks, self.floor, self.ceiling, predictions)
        self._summary = (num_blocks, summary)
        return summary

    # -- segments -------------------------------------------------------------------------------------

    def _leaves(self, segment: _Segment, keys: Sequence[BlockKey], at: int, num_full: int) -> int:
        """Return where a chain that is in ``segment`` at position ``at`` leaves it; it never comes back."""
        low, high = at + 1, max(at + 1, min(segment.stop, num_full))
        owner = self._owner
        if owner.get(keys[high - 1]) is segment:
            return high
        while low < high:
            middle = (low + high) >> 1
            if owner.get(keys[middle]) is segment:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, segment: _Segment, at: int) -> _Segment:
        """Cut a segment in two at a position; return the part from there on, which lies where the whole lay."""
        tail = _Segment(segment.keys, at, segment.stop)
        tail.slot = segment.slot
        segment.stop = at
        self._owner.update(dict.fromkeys(tail.keys[at : tail.stop], tail))
        return tail

    def _count(self, capacity: int, length: int) -> None:
        """Count accesses with critical capacities ``capacity``, ``capacity`` + 1, …, ``length`` of them."""
        steps = self._steps
        if capacity + length >= len(steps):
            steps.extend(array("q", bytes(8 * max(len(steps), capacity + length + 1 - len(steps)))))
        steps[capacity] += 1
        steps[capacity + length] -= 1

    def _limit(self, ceiling: int) -> None:
        self.ceiling = ceiling if self.ceiling is None else min(self.ceiling, ceiling)

    # -- the stack ------------------------------------------------------------------------------------

    def _hold(self, held: int) -> None:
        """Let ``held`` blocks be held: more of them use up the uppermost holes, fewer leave holes."""
        more = held - self._held
        self._held = held
        if more < 0:
            if self._segments:
                self._add_holes(len(self._segments) - 1, -more)
            return
        holed, holes = self._holed, self._holes
        while more and holed:
            slot = -holed[0]
            used = min(more, holes[slot])
            holes[slot] -= used
            more -= used
            self._add(slot, -used)
            if holes[slot] == 0:
                heappop(holed)

    def _take(self, segment: _Segment, stop: int) -> bool:
        """Take a segment's blocks up to ``stop`` out of the stack, leaving holes.

        Returns:
            Whether the segment is what was taken; else it is what remains, since that is the longer part.
        """
        slot, count = segment.slot, stop - segment.first
        if self._holes[slot] == 0:
            heappush(self._holed, -slot)
        self._holes[slot] += count
        if segment.stop - stop > count:
            segment.first = stop
            return False
        self._segments[slot] = self._split(segment, stop) if stop < segment.stop else None
        segment.slot = _LEFT
        return True

    def _put(self, segment: _Segment) -> None:
        """Put a segment on top of the stack."""
        if segment.first == segment.stop:
            return
        if len(self._segments) + 1 == len(self._tree):
            self._close_up()
        slot = segment.slot = len(self._segments)
        self._segments.append(segment)
        self._holes.append(0)
        self._add(slot, segment.stop - segment.first)

    def _add_holes(self, slot: int, count: int) -> None:
        if self._holes[slot] == 0:
            heappush(self._holed, -slot)
        self._holes[slot] += count
        self._add(slot, count)

    def _forget_oldest(self) -> bool:
        """Drop the deepest segment: pools that reach down to it cannot be predicted. Return whether there was one."""
        while self._oldest < len(self._segments) and self._segments[self._oldest] is None:
            # No block lies below these holes, so nobody will miss them.
            self._add(self._oldest, -self._holes[self._oldest])
            self._holes[self._oldest] = 0
            self._oldest += 1
        if self._oldest == len(self._segments):
            return False
        segment, owner = self._segments[self._oldest], self._owner
        assert segment is not None
        length = segment.stop - segment.first
        self._limit(self._held + self._from(self._oldest) - length)
        for key in segment.keys[segment.first : segment.stop]:
            if owner.get(key) is segment:
                del owner[key]
        self._segments[self._oldest] = None
        self._add(self._oldest, -length)
        return True

    # -- sums over time -------------------------------------------------------------------------------

    def _close_up(self) -> None:
        """Number the slots in use anew, and leave room for as many again."""
        used = [slot for slot, segment in enumerate(self._segments) if segment is not None or self._holes[slot]]
        self._segments = [self._segments[slot] for slot in used]
        self._holes = [self._holes[slot] for slot in used]
        self._oldest = 0
        size = max(_MIN_SLOTS, 2 * len(used))
        tree = self._tree = [0] * (size + 1)
        for slot, segment in enumerate(self._segments):
            tree[slot + 1] = self._holes[slot]
            if segment is not None:
                segment.slot = slot
                tree[slot + 1] += segment.stop - segment.first
        for i in range(1, size + 1):
            parent = i + (i & -i)
            if parent <= size:
                tree[parent] += tree[i]
        self._holed = [-slot for slot, holes in enumerate(self._holes) if holes]
        heapify(self._holed)

    def _add(self, slot: int, amount: int) -> None:
        self._total += amount
        tree, i = self._tree, slot + 1
        size = len(tree)
        while i < size:
            tree[i] += amount
            i += i & -i

    def _from(self, slot: int) -> int:
        """Return the blocks and holes in ``slot`` and above it in the stack."""
        tree, i, older = self._tree, slot, 0
        while i:
            older += tree[i]
            i &= i - 1
        return self._total - older
