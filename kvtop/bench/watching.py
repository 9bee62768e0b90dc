"""What an observer asks for: the copy of a pool's arrays, and the numbers made from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from allocator import BlockManager
from allocator.metrics import tier_numbers
from kvtop.bench.figures import Figure, figure
from kvtop.bench.pools import make_manager

#: Blocks of one sequence.
_TABLE: Final = 64


def measure_statistics(rounds: int, *, num_blocks: int, repeats: int) -> Iterator[Figure]:
    """Yield the time of a copy of all arrays, and of all of a tier's numbers, for two patterns of free blocks."""
    for pattern, run in (("every second block free", 1), ("free runs of 32", 32)):
        manager = _half_held(num_blocks, run)
        arrays = manager.arrays("device")
        assert arrays is not None
        acts: dict[str, Callable[[], object]] = {
            "copy of the arrays": partial(manager.arrays, "device"),
            "numbers and free runs": partial(tier_numbers, arrays, manager.block_size, num_blocks),
        }
        for what, act in acts.items():
            times = [_median_ms(act, repeats) for _ in range(rounds)]
            yield figure("statistics", f"{what}, {num_blocks:,} blocks, {pattern}", "ms", times)


def _half_held(num_blocks: int, run: int) -> BlockManager:
    """Return a manager half of whose blocks, in runs of ``run`` ids, are held by sequences of 64 blocks."""
    manager = make_manager(num_blocks, prefix_cache=False, watermark_ratio=0.0)
    pool = manager.device
    ids = np.asarray(pool.allocate(num_blocks), np.int64)
    is_held = ids // run % 2 == 0
    pool.release(ids[is_held])
    for _ in range(int(np.count_nonzero(is_held)) // _TABLE):
        manager.admit((), _TABLE * manager.block_size)
    pool.release(ids[~is_held])
    return manager


def _median_ms(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        act()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e6
