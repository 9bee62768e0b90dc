"""Bulk allocation: pairs of allocate and release of one size, how their cost grows with the pool, and its memory."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

import numpy as np

from allocator import BlockManager, BlockPool, SharedPool
from allocator.config import EngineConfig
from allocator.storage import NoStorage
from kvtop.bench.figures import Figure, figure, quiet_heap, ratio_figure

#: Arrays of the pool that describe cached content alone: part of a cache entry, not of a block.
_CACHE_FACTS: Final = frozenset({"stamp", "inserted", "uses"})
#: Blocks asked for at a time while a pool is brought into disorder.
_CHUNK: Final = 16
#: Largest pool brought into disorder for the bound of the scaling; larger ones are measured fresh, and in disorder too.
_LARGEST_SCRAMBLED: Final = 1_000_000


def make_manager(num_blocks: int, **settings: Any) -> BlockManager:
    """Return a manager that keeps books only, without a host tier."""
    config = EngineConfig(num_blocks=num_blocks, geometry="none", num_swap_blocks=0, **settings)
    return BlockManager(config, NoStorage())


def scrambled_pool(num_blocks: int, *, reserve: bool = True, seed: int = 1) -> SharedPool:
    """Return a pool of which a quarter is held and the rest was given back in random order, in chunks of 16."""
    pool = SharedPool(BlockPool(num_blocks), reserve=reserve)
    held = [pool.allocate(_CHUNK) for _ in range(num_blocks * 98 // 100 // _CHUNK)]
    random.Random(seed).shuffle(held)
    for ids in held[len(held) // 4 :]:
        pool.release(ids)
    return pool


def time_pairs(pool: SharedPool, n: int, *, max_blocks: int, repeats: int, rng: random.Random) -> float:
    """Return the time of one allocate and one release of ``n`` blocks; the median of ``repeats``. [ns]

    Up to 1000 allocations in a row, ``max_blocks`` blocks at most, then as many releases in random order.
    """
    count = max(1, min(1000, max_blocks // n))
    allocate, release, now = pool.allocate, pool.release, time.perf_counter_ns
    times = []
    for _ in range(repeats):
        start = now()
        held = [allocate(n) for _ in range(count)]
        allocated = now()
        rng.shuffle(held)
        shuffled = now()
        for ids in held:
            release(ids)
        times.append((now() - shuffled + allocated - start) / count)
        del held
    return statistics.median(times)


def measure_pairs(rounds: int, *, num_blocks: int, sizes: tuple[int, ...], repeats: int) -> Iterator[Figure]:
    """Yield the time of a pair for each size, on the thread-safe pool."""
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(rounds):
        pool, rng = scrambled_pool(num_blocks), random.Random(2)
        with quiet_heap():
            for n in sizes:
                for warm in (True, False):
                    took = time_pairs(pool, n, max_blocks=num_blocks * 48 // 100, repeats=repeats, rng=rng)
                    if not warm:
                        times[n].append(took)
    for n in sizes:
        yield figure("pairs", f"allocate and release {n:,}", "µs", [t / 1e3 for t in times[n]])


def measure_scaling(rounds: int, *, pool_sizes: tuple[int, ...], n: int, repeats: int) -> Iterator[Figure]:
    """Yield what a pool of each size costs to build, a pair of ``n`` blocks in it, and its bytes a block.

    The bound is on the largest pool against the smallest.
    """
    cells = [(size, size <= _LARGEST_SCRAMBLED) for size in pool_sizes]
    cells += [(size, True) for size, is_scrambled in cells if not is_scrambled]
    builds: dict[int, list[float]] = {size: [] for size in pool_sizes}
    pairs: dict[tuple[int, bool], list[float]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for size, is_scrambled in cells:
            start = time.perf_counter_ns()
            pool = SharedPool(BlockPool(size))
            built_ms = (time.perf_counter_ns() - start) / 1e6
            if len(builds[size]) < len(pairs[size, is_scrambled]) + 1:
                builds[size].append(built_ms)
            if is_scrambled:
                pool = scrambled_pool(size)
            rng = random.Random(3)
            with quiet_heap():
                for warm in (True, False):
                    took = time_pairs(pool, n, max_blocks=min(8000, size // 2), repeats=repeats, rng=rng)
                    if not warm:
                        pairs[size, is_scrambled].append(took)
            del pool
    for size in pool_sizes:
        yield figure("scaling", f"build {size:,} blocks", "ms", builds[size])
    for size, is_scrambled in cells:
        state = "in disorder" if is_scrambled else "fresh"
        yield figure("scaling", f"pair of {n}, {size:,} blocks, {state}", "ns", pairs[size, is_scrambled])
    smallest = pairs[cells[0]]
    largest, *disordered = [cell for cell in cells if cell[0] == pool_sizes[-1]]
    yield ratio_figure("scaling", _against(largest, cells[0]), pairs[largest], smallest, at_most=1.3)
    for cell in disordered:
        yield ratio_figure("scaling", _against(cell, cells[0]), pairs[cell], smallest)
    yield from measure_memory(pool_sizes[-1] if pool_sizes[-1] < 1_000_000 else 1_000_000)


def measure_memory(num_blocks: int) -> Iterator[Figure]:
    """Yield the bytes a block takes once every page is touched, one copy of the block map included."""
    manager = make_manager(num_blocks)
    pool = manager.device
    arrays = manager.arrays("device")
    assert arrays is not None
    facts = _array_bytes(vars(pool.facts))
    published = {field.name: getattr(arrays, field.name).nbytes for field in fields(arrays)}
    entry = sum(facts.get(name, 0) for name in _CACHE_FACTS) + published["hash64"] + _cache_bytes(pool)
    free_list = sum(_array_bytes(vars(pool._free)).values())
    block = sum(facts.values()) + free_list + sum(published.values()) + _cache_bytes(pool) - entry
    yield figure("scaling", "bytes a block, block map included", "B", [block / num_blocks], at_most=40)
    yield figure("scaling", "bytes a cached block takes more", "B", [entry / num_blocks])


def _cache_bytes(pool: BlockPool) -> int:
    """Return the bytes of the prefix cache's own arrays: keys and lineage; tokens come with the first entry."""
    return sum(_array_bytes(vars(pool.cache)).values())


def _array_bytes(attributes: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each array that owns its memory, or lies in a buffer of its own."""
    return {
        name: value.nbytes
        for name, value in attributes.items()
        if isinstance(value, np.ndarray) and not isinstance(value.base, np.ndarray)
    }


def _against(cell: tuple[int, bool], other: tuple[int, bool]) -> str:
    return f"pair, {cell[0]:,} {'in disorder' if cell[1] else 'fresh'} ÷ {other[0]:,}"
