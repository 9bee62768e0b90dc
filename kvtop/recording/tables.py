"""Tables: every device block table at a moment, and what changed in them since the moment before. Pure.

Most steps append a block to a few tables. So a change holds, for each row that is not as it was, how many of its
leading entries are, and those that follow.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from allocator.block_table import Listing
from allocator.ids import IdArray
from kvtop.recording.framing import RecordingError

_COUNTS: Final = struct.Struct("<II")
#: Holders of one block that are told, at most.
_MAX_HOLDERS: Final = 64

Tables = Listing


def no_tables() -> Tables:
    """Return what there is before anything was given out."""
    nothing = np.empty(0, np.int64)
    return Tables(nothing, nothing, nothing, nothing)


def make_tables(rows: NDArray[np.int64], counts: NDArray[np.int64], ids: IdArray) -> Tables:
    """Return tables that lie one after the other in ``ids``. [r], [r], [e]"""
    return Tables(rows, counts, np.cumsum(counts) - counts, ids)


def pack_tables(now: Tables, before: Tables) -> bytes:
    """Return what differs in ``now`` from ``before``."""
    if now is before:
        return _COUNTS.pack(0, 0)
    if np.array_equal(now.rows, before.rows):  # as in most steps
        old_counts, old_starts, gone = before.counts, before.starts, before.rows[:0]
    else:
        old_counts, old_starts = _aligned(now.rows, before)
        gone = before.rows[_aligned(before.rows, now)[0] == 0]
    kept = _leading(now, np.minimum(now.counts, old_counts), old_starts, before)
    changed = np.flatnonzero((kept != now.counts) | (kept != old_counts))
    fresh = now.counts[changed] - kept[changed]
    tails = now.ids[_spread(now.starts[changed] + kept[changed], fresh)]
    nothing = np.zeros(len(gone), np.int64)
    parts = (
        np.concatenate((now.rows[changed], gone)),
        np.concatenate((kept[changed], nothing)),
        np.concatenate((fresh, nothing)),
        tails,
    )
    counts = _COUNTS.pack(len(changed) + len(gone), len(tails))
    return counts + b"".join(part.astype("<u4").tobytes() for part in parts)


def unpack_tables(raw: bytes, offset: int, before: Tables) -> tuple[Tables, int]:
    """Return the tables that ``pack_tables`` packed against ``before``, and where the bytes end.

    Raises:
        RecordingError: They are none, or do not follow ``before``.
    """
    try:
        num_rows, num_ids = _COUNTS.unpack_from(raw, offset)
        if not num_rows:
            return before, offset + _COUNTS.size
        numbers = np.frombuffer(raw, "<u4", 3 * num_rows + num_ids, offset + _COUNTS.size).astype(np.int64)
    except (struct.error, ValueError) as error:
        raise RecordingError(f"holds block tables that cannot be read: {error}") from None
    rows, kept, fresh = numbers[: 3 * num_rows].reshape(3, num_rows)
    tails = np.split(numbers[3 * num_rows :], np.cumsum(fresh)[:-1])
    pieces = np.split(before.ids, before.starts[1:]) if len(before.rows) else []
    tables = dict(zip(before.rows.tolist(), pieces, strict=True))
    for row, length, tail in zip(rows.tolist(), kept.tolist(), tails, strict=True):
        old = tables.pop(row, before.ids[:0])
        if length > len(old):
            raise RecordingError("holds a change of block tables that does not follow the moment before")
        if length + len(tail):
            tables[row] = np.concatenate((old[:length], tail))
    if int(fresh.sum()) != num_ids:
        raise RecordingError("holds block tables of another length than it says")
    if not tables:
        return no_tables(), offset + _COUNTS.size + 4 * len(numbers)
    order = sorted(tables)
    counts = np.array([len(tables[row]) for row in order], np.int64)
    ids = np.concatenate([tables[row] for row in order])
    return make_tables(np.array(order, np.int64), counts, ids), offset + _COUNTS.size + 4 * len(numbers)


def table_of(tables: Tables, row: int) -> IdArray | None:
    """Return one row's block table; ``None`` when it has none. [n]"""
    at = int(np.searchsorted(tables.rows, row))
    if at == len(tables.rows) or tables.rows[at] != row:
        return None
    start = int(tables.starts[at])
    return tables.ids[start : start + int(tables.counts[at])]


def holders_of(tables: Tables, block_id: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return up to 64 (row, position) pairs that name a block, and how many there are."""
    at = np.flatnonzero(tables.ids == block_id)
    of = np.searchsorted(tables.starts, at[:_MAX_HOLDERS], side="right") - 1
    pairs = zip(tables.rows[of].tolist(), (at[:_MAX_HOLDERS] - tables.starts[of]).tolist(), strict=True)
    return tuple(pairs), len(at)


def _aligned(rows: NDArray[np.int64], before: Tables) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each of ``rows`` how many entries it had before, and where they began. [r], [r]"""
    if not len(before.rows):
        return np.zeros_like(rows), np.zeros_like(rows)
    at = np.minimum(np.searchsorted(before.rows, rows), len(before.rows) - 1)
    was_there = before.rows[at] == rows
    return np.where(was_there, before.counts[at], 0), before.starts[at]


def _leading(
    now: Tables, common: NDArray[np.int64], old_starts: NDArray[np.int64], before: Tables
) -> NDArray[np.int64]:
    """Return how many of each row's first ``common`` entries are as they were, up to the first that is not. [r]"""
    kept = common.copy()
    differs = np.flatnonzero(now.ids[_spread(now.starts, common)] != before.ids[_spread(old_starts, common)])
    if len(differs):
        ends = np.cumsum(common)
        row = np.searchsorted(ends, differs, side="right")
        np.minimum.at(kept, row, differs - (ends - common)[row])
    return kept


def _spread(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``counts[i]`` consecutive numbers from each ``starts[i]`` on. [sum of counts]"""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - ends + counts, counts)
