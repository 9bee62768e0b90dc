"""BlockTables: every sequence's block table, in one flat array of physical block ids. Owned by ``BlockManager``.

A row owns a slice of the array and moves to a larger one when it outgrows it, so that one vector
operation can extend hundreds of tables, and one can re-point all of them after a compaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.ids import IdArray

_MIN_CAPACITY = 8
# As an array without a dimension: numpy works with it in two thirds of the time that a Python int takes.
_ONE = np.array(1)


class Listing(NamedTuple):
    """Every block table, one after the other. Read-only.

    Attributes:
        rows: The rows that have blocks, ascending. [r]
        counts: Blocks in each one's table. [r]
        starts: Where each one's table begins in ``ids``. [r]
        ids: The blocks, each table in token order. [e]
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: IdArray

    def each(self) -> Iterator[tuple[int, IdArray]]:
        """Yield every row with its table."""
        ends = (self.starts + self.counts).tolist()
        for row, start, end in zip(self.rows.tolist(), self.starts.tolist(), ends, strict=True):
            yield row, self.ids[start:end]


class BlockTables:
    """Rows of block ids with the number of tokens written to them.

    Attributes:
        num_blocks: Blocks in each row's table. [rows]
        num_tokens: Tokens each row has written. [rows]
        identity: Prefix-cache identity of each row's content up to its last published block. [rows]
        births: How often each row number was given out or given back, to tell one sequence from the next. [rows]
        one_run: Rows whose blocks must stay one run of consecutive ids, and were all given at admission. [rows]
    """

    def __init__(self) -> None:
        self.num_blocks = np.zeros(16, np.int64)
        self.num_tokens = np.zeros(16, np.int64)
        self.identity = np.zeros(16, np.int64)
        self.births = [0] * 16  # a list: single numbers of an array take five times as long to count up
        self.one_run = np.zeros(16, bool)
        self._start = np.zeros(16, np.int64)
        self._capacity = np.zeros(16, np.int64)
        #: Leading entries of each row that ``untold`` has told of.
        self._told = np.zeros(16, np.int64)
        self._arena = np.zeros(256, np.int64)
        self._end = 0
        self._spare_rows: list[int] = list(range(15, -1, -1))
        self._live: set[int] = set()
        #: Kept until a table changes, since one observation needs it more than once.
        self._listing: Listing | None = None

    def new_row(self, block_ids: IdArray, num_tokens: int, identity: int = 0) -> int:
        """Return a new row holding ``block_ids``. [n]"""
        if not self._spare_rows:
            self._add_rows()
        row = self._spare_rows.pop()
        self._live.add(row)
        self._listing = None
        self._told[row] = 0
        if self._capacity[row] < max(1, len(block_ids)):
            # With room to grow: a table that is extended at once need not move first.
            self._place(row, len(block_ids) + (len(block_ids) >> 1) + _MIN_CAPACITY)
        start = self._start[row]
        self._arena[start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        self.num_tokens[row] = num_tokens
        self.identity[row] = identity
        self.births[row] += 1
        return row

    def drop_row(self, row: int) -> None:
        """Forget a row; its number, and its slice while it is there, will be used again."""
        self._live.remove(row)
        self._listing = None
        self.num_blocks[row] = self.num_tokens[row] = 0
        self.births[row] += 1
        self.one_run[row] = False
        self._spare_rows.append(row)

    def rows(self) -> NDArray[np.int64]:
        """Return the rows in use, ascending. [r]"""
        return np.fromiter(sorted(self._live), np.int64, len(self._live))

    def table(self, row: int) -> IdArray:
        """Return a row's block ids, in token order. A view: copy it to keep it. [num_blocks[row]]"""
        start = int(self._start[row])
        return self._arena[start : start + int(self.num_blocks[row])]

    def append(self, rows: NDArray[np.int64], block_ids: IdArray) -> None:
        """Append ``block_ids[i]`` to ``rows[i]``; rows are distinct. [n], [n]"""
        self._listing = None
        used = self.num_blocks[rows]
        short = (used >= self._capacity[rows]).nonzero()[0]
        if short.size:
            for row in rows[short].tolist():
                self._grow(row)
        self._arena[self._start[rows] + used] = block_ids
        used += _ONE
        self.num_blocks[rows] = used

    def extend(self, row: int, block_ids: IdArray) -> None:
        """Append all of ``block_ids`` to one row. [n]"""
        self._listing = None
        used = int(self.num_blocks[row])
        needed = used + len(block_ids)
        if needed > self._capacity[row]:
            self._grow(row, needed)
        start = int(self._start[row])
        self._arena[start + used : start + needed] = block_ids
        self.num_blocks[row] = needed

    def cut(self, row: int, num_blocks: int) -> IdArray:
        """Shorten one row's table to ``num_blocks`` and return the ids cut off, last first. [n]"""
        self._listing = None
        self._told[row] = min(int(self._told[row]), num_blocks)
        ids: IdArray = self.table(row)[num_blocks:][::-1].copy()
        self.num_blocks[row] = num_blocks
        return ids

    def last(self, rows: NDArray[np.int64]) -> IdArray:
        """Return the last block of each row; every row has one. [n]"""
        last: IdArray = self._arena[self._start[rows] + self.num_blocks[rows] - 1]
        return last

    def set_last(self, rows: NDArray[np.int64], block_ids: IdArray) -> None:
        """Replace the last block of each row. [n], [n]"""
        self._listing = None
        last = self.num_blocks[rows] - 1
        self._arena[self._start[rows] + last] = block_ids
        self._told[rows] = np.minimum(self._told[rows], last)

    def listing(self) -> Listing:
        """Return every table entry, table by table. Cost: O(entries), and little when no table has changed since."""
        if self._listing is None:
            rows = self.rows()
            counts = self.num_blocks[rows]
            if not counts.all():
                rows, counts = rows[counts != 0], counts[counts != 0]
            starts = self._start[rows]
            # A copy of each slice is several times as fast as one gather over all of them.
            slices = [self._arena[a:b] for a, b in zip(starts.tolist(), (starts + counts).tolist(), strict=True)]
            ids = np.concatenate(slices) if slices else np.empty(0, np.int64)
            self._listing = Listing(rows, counts, np.cumsum(counts) - counts, ids)
        return self._listing

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64], IdArray]:
        """Return every table entry: its row, its position in the table, the block it names. [e], [e], [e]"""
        rows, counts, starts, ids = self.listing()
        position = np.arange(len(ids), dtype=np.int64) - np.repeat(starts, counts)
        return np.repeat(rows, counts), position, ids

    def untold(self) -> tuple[NDArray[np.int64], IdArray]:
        """Return the entries that came since the last call, or were replaced: their rows and their blocks. [e], [e]"""
        rows, counts, starts, ids = self.listing()
        fresh = counts - self._told[rows]
        at = np.repeat(starts + counts - np.cumsum(fresh), fresh) + np.arange(int(fresh.sum()))
        self._told[rows] = counts
        return np.repeat(rows, fresh), ids[at]

    def rename(self, remap: IdArray) -> None:
        """Re-point every entry: ``remap[old]`` is the new id. [num_blocks]"""
        self._listing = None
        self._told[:] = 0
        rows = self.rows()
        counts = self.num_blocks[rows]
        total = int(counts.sum())
        ends = np.cumsum(counts)
        at = np.repeat(self._start[rows] - ends + counts, counts) + np.arange(total, dtype=np.int64)
        self._arena[at] = remap[self._arena[at]]

    def _grow(self, row: int, at_least: int = 0) -> None:
        ids = self.table(row).copy()
        self._place(row, max(at_least, 2 * int(self._capacity[row])))
        start = self._start[row]
        self._arena[start : start + len(ids)] = ids

    def _place(self, row: int, capacity: int) -> None:
        """Give a row a slice of ``capacity`` entries at the end of the array, making room if needed."""
        self._capacity[row] = 0
        if self._end + capacity > len(self._arena):
            self._repack(capacity)
        self._start[row], self._capacity[row] = self._end, capacity
        self._end += capacity

    def _repack(self, extra: int) -> None:
        """Close the gaps that moved and dropped rows left, in an array twice as large as is needed."""
        self._capacity[self._spare_rows] = 0
        live = [row for row in sorted(self._live) if self._capacity[row]]
        needed = int(self._capacity[live].sum()) + extra
        arena = np.zeros(max(256, 2 * needed), np.int64)
        end = 0
        for row in live:
            start, used = self._start[row], self.num_blocks[row]
            arena[end : end + used] = self._arena[start : start + used]
            self._start[row] = end
            end += int(self._capacity[row])
        self._arena, self._end = arena, end

    def _add_rows(self) -> None:
        n = len(self.num_blocks)
        for name in ("num_blocks", "num_tokens", "identity", "_start", "_capacity", "_told"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(n, np.int64))))
        self.one_run = np.concatenate((self.one_run, np.zeros(n, bool)))
        self.births += [0] * n
        self._spare_rows = list(range(2 * n - 1, n - 1, -1))
