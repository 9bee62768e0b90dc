"""What observers see of one tier, made out of its pool and block tables: the map's arrays, and numbers of its rows.

The engine waits while they are made, up to 20 times a second. So a place in a map that was written before gets
only what changed since: blocks whose state byte is another, blocks in the pool's ``ChangeLog``s, and blocks that
came to a block table or are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays, MapPlace
from allocator.block_table import BlockTables, Listing
from allocator.facts import HOLDERS_MASK, KEY, SHARED, SOLE, publish_states
from allocator.ids import NO_ROW, IdArray
from allocator.metrics import run_starts
from allocator.pool import BlockPool

#: Buffers of a map.
_NUM_PLACES: Final = 2
#: Blocks below which to write everything takes no longer than to look for what changed.
SMALL_POOL: Final = 131_072


class _Look(NamedTuple):
    """What is different from the look before.

    Attributes:
        touched: Blocks of another state. [t]
        rekeyed: Blocks that may have another key. [k]
        reused: Blocks that may have another last use. [u]
        recounted: Blocks that may have several holders, and not as many as then. [c]
        held, rows: Blocks that came to a table, or were left to one table by others, with its row. [h]
        shared, first_rows: Blocks that several tables name, with their rows; the last of a block is its first holder.
            [s]
    """

    touched: IdArray
    rekeyed: IdArray
    reused: IdArray
    recounted: IdArray
    held: IdArray
    rows: NDArray[np.int64]
    shared: IdArray
    first_rows: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Written:
    """A place in the map that was written.

    Attributes:
        partial: Blocks that it shows as filled in part.
        has_flags: Whether it shows any flag.
        looks: What is different since.
    """

    partial: IdArray
    has_flags: bool
    looks: list[_Look] = field(default_factory=list)


class TierObserver:
    """Writes the published arrays of one tier, and counts by row.

    Not locked by itself: ``BlockManager`` holds the allocator lock.

    Args:
        pool, tables: The tier; every holder of a block is a table.
        block_size: Tokens a block.
    """

    def __init__(self, pool: BlockPool, tables: BlockTables, block_size: int) -> None:
        self._pool, self._tables, self._block_size = pool, tables, block_size
        self._places: list[_Written] = []
        self._states = np.empty(0, np.uint8)
        self._listing: Listing | None = None
        self._shared = np.empty(0, bool)

    def write(self, out: BlockArrays) -> None:
        """Write every published array. Cost: O(blocks + entries); in a map's own memory a fraction of it.

        Args:
            out: Arrays of the pool's size.
        """
        if not isinstance(out, MapPlace) or self._pool.num_blocks < SMALL_POOL:
            self._write_all(out)
            return
        # Nothing is known of the place while it is half written.
        written, out.baseline.content = out.baseline.content, None
        look = self._look()
        if look is None:
            self._places.clear()
        else:
            for place in self._places:
                place.looks.append(look)
        if isinstance(written, _Written) and written in self._places:
            self._write_changed(out, written)
        else:
            written = _Written(self._write_all(out), self._pool.facts.num_flagged > 0)
            self._places = [*self._places, written][-_NUM_PLACES:]
        out.baseline.content = written

    def row_numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many blocks each row shares, and in how many runs its table lies. [rows], [rows]"""
        listing = self._tables.listing()
        rows, _, starts, ids = listing
        shared, runs = np.zeros((2, len(self._tables.num_blocks)), np.int64)
        if len(rows):
            shared[rows] = np.add.reduceat(self._named_by_several(listing), starts, dtype=np.int64)
            begins = run_starts(ids, self._pool.slab_size)
            begins[starts] = True
            runs[rows] = np.add.reduceat(begins, starts, dtype=np.int64)
        return shared, runs

    def _named_by_several(self, listing: Listing) -> NDArray[np.bool_]:
        """Return which entries name a block that other tables name too; the tables alone decide that. [e]"""
        if self._listing is not listing:
            self._listing, self._shared = listing, _is_shared(self._pool.facts.state, listing)
        return self._shared

    def _look(self) -> _Look | None:
        """Return what is different from the look before; ``None`` when that may be anything."""
        facts, tables = self._pool.facts, self._tables
        rekeyed, reused, unshared = facts.rekeyed.take(), facts.reused.take(), facts.unshared.take()
        rows, fresh = tables.untold()
        if rekeyed is None or reused is None or unshared is None:  # too much, or a resize: it makes other facts
            self._states = facts.state.copy()
            return None
        listing = tables.listing()
        owners = _owners(listing)
        is_shared = self._named_by_several(listing)
        if ((facts.state[unshared] & HOLDERS_MASK) == SOLE).any():
            left = (_is_shared(self._states, listing) & ~is_shared).nonzero()[0]
            fresh, rows = np.concatenate((fresh, listing.ids[left])), np.concatenate((rows, owners[left]))
        shared_at = is_shared.nonzero()[0][::-1]
        touched = _differing(facts.state, self._states)
        states = facts.state[touched]
        keyed = touched[((states ^ self._states[touched]) & KEY) != 0]
        self._states[touched] = states
        return _Look(
            touched,
            np.concatenate((keyed, rekeyed)),
            reused,
            np.concatenate((fresh, unshared)),
            fresh,
            rows,
            listing.ids[shared_at],
            owners[shared_at],
        )

    def _write_changed(self, out: BlockArrays, written: _Written) -> None:
        facts, looks = self._pool.facts, written.looks
        touched = np.concatenate([look.touched for look in looks])
        states = facts.state[touched]
        shown = np.empty_like(states)
        publish_states(states, shown)
        out.state[touched] = shown
        out.ref_count[touched] = states & SOLE
        hash64 = self._pool.cache.hash64()
        for look in looks:
            self._write_shared(look.recounted[(facts.state[look.recounted] & SHARED) != 0], out)
            out.hash64[look.rekeyed] = hash64[look.rekeyed]
            out.last_used[look.reused] = facts.last_used[look.reused]
            out.owner[look.held] = look.rows
        # Any holder of a shared block may have come or gone, so the last look tells of all of them.
        out.owner[looks[-1].shared] = looks[-1].first_rows
        out.owner[touched[(states & HOLDERS_MASK) == 0]] = NO_ROW
        out.fill[touched] = self._usual_fill(states)
        out.fill[written.partial] = self._usual_fill(facts.state[written.partial])
        written.partial = self._write_partial(out)
        if facts.num_flagged or written.has_flags:
            out.flags[:] = facts.flags
            written.has_flags = facts.num_flagged > 0
        looks.clear()

    def _write_all(self, out: BlockArrays) -> IdArray:
        """Write all of every array; return the blocks that are filled in part."""
        facts, listing = self._pool.facts, self._tables.listing()
        publish_states(facts.state, out.state)
        np.copyto(out.ref_count, facts.state & SOLE)
        shared_at = self._named_by_several(listing).nonzero()[0][::-1]
        shared = listing.ids[shared_at]
        self._write_shared(shared, out)
        out.flags[:] = facts.flags
        out.hash64[:] = self._pool.cache.hash64()
        out.last_used[:] = facts.last_used
        owners = _owners(listing)
        out.owner.fill(NO_ROW)
        out.owner[listing.ids] = owners
        # The first row of those that share a block is the one shown, and of several writes the last one stays.
        out.owner[shared] = owners[shared_at]
        out.fill[:] = self._usual_fill(facts.state)
        return self._write_partial(out)

    def _write_shared(self, shared: IdArray, out: BlockArrays) -> None:
        out.ref_count[shared] = np.minimum(self._pool.facts.refs[shared], 65535)

    def _usual_fill(self, states: NDArray[np.uint8]) -> NDArray[np.uint16]:
        """Return the tokens in blocks of these states, if no table says otherwise: all that is held or cached is full.

        [n], [n]
        """
        fill: NDArray[np.uint16] = np.multiply((states & (HOLDERS_MASK | KEY)) != 0, self._block_size, dtype=np.uint16)
        return fill

    def _write_partial(self, out: BlockArrays) -> IdArray:
        """Write the fill of the blocks at the end of tables that are not full, and return them. [p]"""
        rows, counts, starts, ids = self._tables.listing()
        size, tokens = self._block_size, self._tables.num_tokens[rows]
        full = np.minimum(tokens // size, counts)
        open_blocks = counts - full
        # A table may reach further than the tokens that are written: the blocks after the first open one are empty.
        which = np.repeat(np.arange(len(rows)), open_blocks)
        position = np.arange(len(which)) - np.repeat(np.cumsum(open_blocks) - open_blocks, open_blocks)
        partial: IdArray = ids[(starts + full)[which] + position]
        out.fill[partial] = np.where(position == 0, tokens[which] % size, 0)
        return partial


def _is_shared(states: NDArray[np.uint8], listing: Listing) -> NDArray[np.bool_]:
    """Return which entries name a block that these state bytes say to be shared. [n] → [e]"""
    shared: NDArray[np.bool_] = (states.take(listing.ids) & SHARED) != 0
    return shared


def _owners(listing: Listing) -> NDArray[np.int32]:
    """Return the row of every entry. [e]"""
    return np.repeat(listing.rows.astype(np.int32), listing.counts)


def _differing(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> IdArray:
    """Return where two arrays differ; eight bytes are compared at a time. [n], [n] → [d]"""
    whole = len(left) & ~7
    lefts, rights = left[:whole].view(np.uint64), right[:whole].view(np.uint64)
    words = (lefts != rights).nonzero()[0]
    at = (lefts[words] ^ rights[words]).view(np.uint8).nonzero()[0]
    return np.concatenate(((words << 3)[at >> 3] + (at & 7), (left[whole:] != right[whole:]).nonzero()[0] + whole))
