"""Numbers derived from one snapshot's arrays: each formula of DESIGN.md section 9, once. Pure functions."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.ids import BlockFlag, BlockState

#: Lower bounds of the reference-count buckets, and their names.
REF_BUCKETS: Final = ((0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (5, "5-8"), (9, "9-16"), (17, "17+"))


class TierNumbers(msgspec.Struct, frozen=True):
    """One tier's numbers, all from the same arrays, so that the conservation law holds by construction.

    Attributes:
        total: Pool size; free + cached + active + reserved.
        free: Blocks with nothing worth keeping.
        cached: Blocks without a holder whose content can still be hit.
        active: Blocks held by block tables.
        reserved: Blocks promised to a thread.
        shared: Blocks with two or more holders; subset of active, do not add.
        fenced: Blocks a copy is using; overlaps the states, do not add.
        pinned: Blocks an operator holds; overlaps the states, do not add.
        allocatable: Free + cached, neither fenced nor pinned.
        largest_free_run: Longest run of allocatable ids within a slab.
        free_runs: Number of such runs.
        external_ratio: 1 − largest_free_run ÷ allocatable; 0 when none is allocatable.
        internal_ratio: Empty slots in active blocks ÷ their slots; ``None`` without active blocks.
        usage_ratio: (active + reserved) ÷ total.
        ref_histogram: Blocks by reference count, in the buckets of ``REF_BUCKETS``.
    """

    total: int
    free: int
    cached: int
    active: int
    reserved: int
    shared: int
    fenced: int
    pinned: int
    allocatable: int
    largest_free_run: int
    free_runs: int
    external_ratio: float
    internal_ratio: float | None
    usage_ratio: float
    ref_histogram: tuple[int, ...]


def tier_numbers(arrays: BlockArrays, block_size: int, slab_size: int) -> TierNumbers:
    """Return every number of one tier. Cost: O(blocks), a few vector passes."""
    state = arrays.state
    # Byte-wide comparisons and counts: over a large pool they beat a histogram by many times.
    is_active = state == BlockState.ACTIVE
    free, cached = _count(state == BlockState.FREE), _count(state == BlockState.CACHED)
    active, reserved = _count(is_active), _count(state == BlockState.RESERVED)
    total = free + cached + active + reserved
    lengths = run_lengths(allocatable_mask(arrays), slab_size)
    allocatable = int(lengths.sum())
    largest = int(lengths.max()) if len(lengths) else 0
    slots = active * block_size
    filled = int(np.multiply(arrays.fill, is_active).sum(dtype=np.int64))
    return TierNumbers(
        total=total,
        free=free,
        cached=cached,
        active=active,
        reserved=reserved,
        shared=_count(arrays.ref_count >= 2),
        fenced=_count(arrays.flags & BlockFlag.FENCED),
        pinned=_count(arrays.flags & BlockFlag.PINNED),
        allocatable=allocatable,
        largest_free_run=largest,
        free_runs=len(lengths),
        external_ratio=external_ratio(largest, allocatable),
        internal_ratio=(slots - filled) / slots if slots else None,
        usage_ratio=(active + reserved) / total if total else 0.0,
        ref_histogram=_ref_histogram(arrays),
    )


def _ref_histogram(arrays: BlockArrays) -> tuple[int, ...]:
    at_least = [_count(arrays.ref_count >= low) for low, _ in REF_BUCKETS]
    at_least[0] -= _count(arrays.state == BlockState.RETIRED)
    return tuple(more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True))


def external_ratio(largest_free_run: int, allocatable: int) -> float:
    """Return the external fragmentation ratio; 0 when nothing is allocatable."""
    return 1 - largest_free_run / allocatable if allocatable else 0.0


def allocatable_mask(arrays: BlockArrays) -> NDArray[np.bool_]:
    """Return which blocks the next request could get. [n] bool"""
    idle = (arrays.state == BlockState.FREE) | (arrays.state == BlockState.CACHED)
    mask: NDArray[np.bool_] = idle & (arrays.flags == 0)
    return mask


def find_runs(mask: NDArray[np.bool_], slab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and lengths of the runs of true entries; a run ends at a slab's end. [r], [r]"""
    n = len(mask)
    padded = np.zeros(n + 2, bool)
    padded[1:-1] = mask
    # Borders alternate: a run starts, then it ends.
    borders = (padded[1:] != padded[:-1]).nonzero()[0]
    starts, ends = borders[::2], borders[1::2]
    if slab_size < n:
        cuts = np.arange(slab_size, n, slab_size)
        cuts = cuts[mask[cuts] & mask[cuts - 1]]
        starts, ends = np.union1d(starts, cuts), np.union1d(ends, cuts)
    return starts, ends - starts


def run_lengths(mask: NDArray[np.bool_], slab_size: int) -> NDArray[np.int64]:
    """Return the lengths of the runs of true entries, in id order. [r]"""
    return find_runs(mask, slab_size)[1]


def count_runs(block_ids: NDArray[np.int64], slab_size: int) -> int:
    """Return the contiguity of a block table: in how many runs of consecutive ids it lies."""
    return _count(run_starts(block_ids, slab_size))


def run_starts(block_ids: NDArray[np.int64], slab_size: int) -> NDArray[np.bool_]:
    """Return which entries of a block table do not follow the one before within a slab. [n] bool"""
    starts = np.ones(len(block_ids), bool)
    starts[1:] = np.diff(block_ids) != 1
    # Looked for only where there are several slabs: remainders are slow.
    if len(block_ids) and int(block_ids.max()) >= slab_size:
        starts |= block_ids % slab_size == 0
    return starts


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part`` ÷ ``whole``, or ``None`` when there is nothing to divide by or either is not known."""
    return part / whole if whole and part is not None else None


def plus(*parts: int | None) -> int | None:
    """Return the sum, or ``None`` when any part of it is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _count(mask: NDArray[Any]) -> int:
    return int(np.count_nonzero(mask))
