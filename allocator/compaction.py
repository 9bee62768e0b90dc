"""Compaction and shrinking as plans: which block moves where. Pure functions of a pool's arrays.

Destinations are free blocks first; cached blocks in the way move to free blocks elsewhere while
there are any, and are evicted otherwise, next victim first. Pinned and fenced blocks stay, and those
of sequences that need one run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.errors import OutOfBlocks, Refused
from allocator.facts import CACHED, FREE
from allocator.ids import IdArray
from allocator.metrics import count_runs, find_runs
from allocator.plans import MovePlan, Moves

_EMPTY = np.empty(0, np.int64)


class PoolShape:
    """What planning needs to know of a pool, as arrays over its blocks.

    Args:
        state: The pool's state bytes. [n]
        flags: Fenced and pinned bits. [n]
        eviction_order: Evictable cached blocks, next victim first. [m]
        slab_size: Blocks a slab.
        fixed: Blocks that stay though neither pinned nor fenced: those of sequences that need one run. [f]
    """

    def __init__(
        self,
        state: NDArray[np.uint8],
        flags: NDArray[np.uint8],
        eviction_order: IdArray,
        slab_size: int,
        fixed: IdArray = _EMPTY,
    ) -> None:
        self.num_blocks = len(state)
        self.slab_size = slab_size
        self.eviction_order = eviction_order
        self.stuck = flags != 0
        self.stuck[fixed] = True
        self.free = (state == FREE) & ~self.stuck
        self.cached = (state == CACHED) & ~self.stuck
        self.held = ~(self.free | self.cached | self.stuck)

    def ids(self, mask: NDArray[np.bool_]) -> IdArray:
        """Return the ids where ``mask`` is true, ascending."""
        return np.flatnonzero(mask)


def plan_pack_low(shape: PoolShape, max_moves: int | None = None, *, keep_cached: bool = False) -> MovePlan:
    """Return moves that bring all held blocks below a boundary; the fewest are the held blocks above it.

    Args:
        shape: The pool.
        max_moves: Budget in blocks; ``None`` is no limit.
        keep_cached: Leave out every move for which a cached block would have to be evicted.
    """
    boundary = pack_boundary(shape)
    below = np.arange(shape.num_blocks) < boundary
    return _clear(shape, window=~below, targets=below, max_moves=max_moves, keep_cached=keep_cached)


def pack_boundary(shape: PoolShape) -> int:
    """Return the lowest end below which every movable held block finds a place beside what cannot move."""
    places = np.concatenate(([0], np.cumsum(~shape.stuck)))
    return int(np.searchsorted(places, int(np.count_nonzero(shape.held))))


def plan_longest_run(shape: PoolShape, run_blocks: int | None = None, max_moves: int | None = None) -> MovePlan:
    """Return moves that free a run of ``run_blocks`` at the least cost: the window with the fewest held blocks.

    Without ``run_blocks``, the longest run that can be had at all is made.

    Raises:
        OutOfBlocks: Fewer blocks than that are allocatable.
        Refused: Blocks that cannot move leave no window of that length.
    """
    allocatable = int(np.count_nonzero(shape.free | shape.cached))
    _, spans = find_runs(~shape.stuck, shape.slab_size)
    widest = int(spans.max()) if len(spans) else 0
    n = min(allocatable, widest) if run_blocks is None else run_blocks
    if n > allocatable:
        raise OutOfBlocks(n, allocatable)
    if n == 0:
        return MovePlan()
    if n > widest:
        raise Refused(f"no window of {n} blocks: blocks that cannot move, or slab ends, leave {widest} at most")
    start = _best_window(shape, n)
    window = np.zeros(shape.num_blocks, bool)
    window[start : start + n] = True
    return _clear(shape, window=window, targets=~window, max_moves=max_moves)


def plan_by_sequence(shape: PoolShape, tables: list[IdArray], max_moves: int | None = None) -> MovePlan:
    """Return moves that bring each sequence into as few runs as the free blocks allow, worst sequence first.

    A move is taken only if it lowers the number of runs over all sequences, so the stages end, and
    a second plan on the result is empty. No cached block is evicted.

    Args:
        tables: Block tables. [sequences][blocks]
    """
    slab_size = shape.slab_size
    tables = [table.copy() for table in tables]
    free = shape.free.copy()
    budget = shape.num_blocks**2 if max_moves is None else max_moves
    holders = np.bincount(np.concatenate(tables), minlength=shape.num_blocks) if tables else np.zeros(0, np.int64)
    stages: list[Moves] = []
    while True:
        sources: list[IdArray] = []
        targets: list[IdArray] = []
        moved = np.zeros(shape.num_blocks, bool)
        left = 0
        for i in sorted(range(len(tables)), key=lambda i: -count_runs(tables[i], slab_size)):
            if count_runs(tables[i], slab_size) < 2:
                continue
            mine = tables[i][~shape.stuck[tables[i]] & ~moved[tables[i]]]
            private = mine[holders[mine] == 1]
            for part in (mine, private) if len(private) < len(mine) else (mine,):
                target = _best_fit(free, len(part), slab_size)
                if target is None:
                    continue
                remap = np.arange(shape.num_blocks, dtype=np.int64)
                remap[part] = target
                touched = [j for j, table in enumerate(tables) if (remap[table] != table).any()]
                before = sum(count_runs(tables[j], slab_size) for j in touched)
                if sum(count_runs(remap[tables[j]], slab_size) for j in touched) >= before:
                    continue
                if len(part) > budget:
                    left += len(part)
                    continue
                for j in touched:
                    tables[j] = remap[tables[j]]
                holders[target] = holders[part]
                free[target] = False
                moved[target] = True
                budget -= len(part)
                sources.append(part)
                targets.append(target)
                break
        if not sources:
            return MovePlan(tuple(stages), left)
        stages.append(Moves(np.concatenate(sources), np.concatenate(targets), _EMPTY))
        free[stages[-1].sources] = True
        holders[stages[-1].sources] = 0


def plan_shrink(shape: PoolShape, num_blocks: int) -> MovePlan:
    """Return moves that empty every block from ``num_blocks`` on; cached ones move too while there is room.

    Raises:
        OutOfBlocks: What is held does not fit below the new end.
        Refused: A pinned or fenced block lies above it.
    """
    above = np.arange(shape.num_blocks) >= num_blocks
    stuck_above = int(np.count_nonzero(shape.stuck & above))
    if stuck_above:
        raise Refused(
            f"{stuck_above} blocks above the new end {num_blocks} cannot move: pinned (unpin them), fenced, or of a "
            f"contiguous sequence"
        )
    room = num_blocks - int(np.count_nonzero(shape.stuck & ~above))
    held = int(np.count_nonzero(shape.held))
    if held > room:
        raise OutOfBlocks(held, room)
    excess = max(0, held + int(np.count_nonzero(shape.cached)) - room)
    evicted = shape.eviction_order[:excess]
    cached, free = shape.cached.copy(), shape.free.copy()
    cached[evicted] = False
    free[evicted] = True
    sources = np.concatenate((shape.ids(shape.held & above), shape.ids(cached & above)))
    targets = shape.ids(free & ~above)[: len(sources)]
    if len(sources) + len(evicted) == 0:
        return MovePlan()
    return MovePlan((Moves(sources, targets, evicted),))


def _clear(
    shape: PoolShape,
    window: NDArray[np.bool_],
    targets: NDArray[np.bool_],
    max_moves: int | None,
    *,
    keep_cached: bool = False,
) -> MovePlan:
    """Return moves of the held blocks in ``window`` to free blocks in ``targets``, then to cached ones there."""
    sources = shape.ids(shape.held & window)[::-1]
    free_targets, elsewhere = shape.ids(shape.free & targets), shape.ids(shape.free & window)
    num_sources = len(sources)
    if keep_cached:
        # Past the free targets each needs a free block in the window, for the cached one in its way, and two moves.
        saved_at_most = len(elsewhere) if max_moves is None else max(0, (max_moves - len(free_targets)) // 2)
        sources = sources[: len(free_targets) + min(len(elsewhere), saved_at_most)]
    if max_moves is not None:
        # Past the free targets a move costs two, as long as the cached block in its way can be saved.
        affordable = max((max_moves + len(free_targets)) // 2, max_moves - len(elsewhere), 1)
        count = min(len(sources), max_moves if max_moves <= len(free_targets) else affordable)
        sources, elsewhere = sources[:count], elsewhere[: max_moves - count]
    left = num_sources - len(sources)
    if len(sources) == 0:
        return MovePlan((), left)
    free_targets = free_targets[: len(sources)]
    short = len(sources) - len(free_targets)
    # Cached blocks stand where the rest must go. Those next to be evicted make room, and keep
    # their content while free blocks remain in the window.
    order = shape.eviction_order
    in_way = order[targets[order]][:short]
    saved = in_way[len(in_way) - min(len(in_way), len(elsewhere)) :]
    rescue = Moves(saved, elsewhere[: len(saved)], _EMPTY)
    main = Moves(sources, np.concatenate((free_targets, in_way)), in_way[: len(in_way) - len(saved)])
    return MovePlan((rescue, main) if len(saved) else (main,), left)


def _best_fit(free: NDArray[np.bool_], n: int, slab_size: int) -> IdArray | None:
    """Return the first ``n`` ids of the shortest free run that holds them; ``None`` when none does."""
    starts, lengths = find_runs(free, slab_size)
    fits = np.flatnonzero(lengths >= n)
    if n == 0 or not len(fits):
        return None
    start = int(starts[fits[np.argmin(lengths[fits])]])
    return np.arange(start, start + n, dtype=np.int64)


def _best_window(shape: PoolShape, n: int) -> int:
    """Return where the window of ``n`` blocks with the fewest held, then the fewest cached, blocks starts."""

    def sums(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        total = np.concatenate(([0], np.cumsum(mask)))
        return total[n:] - total[:-n]

    starts = np.arange(shape.num_blocks - n + 1)
    possible = (sums(shape.stuck) == 0) & (starts // shape.slab_size == (starts + n - 1) // shape.slab_size)
    cost = sums(shape.held) * (shape.num_blocks + 1) + sums(shape.cached)
    return int(np.flatnonzero(possible)[np.argmin(cost[possible])])
