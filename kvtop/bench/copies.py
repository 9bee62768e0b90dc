"""Copies between the tiers on a CPU, through the tensor storage, against one contiguous copy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from allocator import Geometry, TorchStorage
from allocator.ids import IdArray
from allocator.plans import CopyJob
from kvtop.bench.figures import Figure, figure, ratio_figure

_BLOCK_SIZE: Final = 16
#: Blocks of a run in the coalesced case.
_RUN: Final = 8
#: Slots stamped in one go when memory is touched.
_STAMPED_AT_ONCE: Final = 1 << 15

#: Shapes of a block, with the share of a contiguous copy's speed that scattered blocks should reach.
SHAPES: Final = (
    (Geometry("64 KiB", 16, 2, 1, 64, "bf16"), 0.75),
    (Geometry("512 KiB", 32, 2, 2, 128, "bf16"), 0.92),
    (Geometry("2 MiB", 32, 2, 8, 128, "bf16"), 0.92),
)


def measure_copies(rounds: int, *, pool_bytes: int, copied_share: float, repeats: int) -> Iterator[Figure]:
    """Yield the speed of copies of scattered blocks and of runs of 8, device tier to host tier, for each block size.

    ``pool_bytes`` is a tier's memory, ``copied_share`` the part of it that one copy moves.
    """
    for geometry, at_least in SHAPES:
        num_blocks = max(2 * _RUN, pool_bytes // geometry.block_bytes(_BLOCK_SIZE))
        count = max(_RUN, int(num_blocks * copied_share) // _RUN * _RUN)
        storage = TorchStorage(geometry, _BLOCK_SIZE, "cpu", num_blocks)
        try:
            _touch(storage, num_blocks)
            jobs = _jobs(num_blocks, count)
            for job in jobs.values():
                storage.copy(job)  # pages and caches are warm for all of them
            times: dict[str, list[float]] = {name: [] for name in jobs}
            for _ in range(rounds):
                for name, took in _time_by_turns(storage, jobs, repeats).items():
                    times[name].append(took)
        finally:
            storage.close()
        copied = count * storage.block_bytes
        speed = [copied / took for took in times["contiguous"]]
        yield figure("copies", f"{geometry.name} blocks, contiguous", "GB/s", speed)
        for name, bound in (("scattered", at_least), (f"runs of {_RUN}", 0.9)):
            what = f"{geometry.name} blocks, {name} ÷ contiguous"
            yield ratio_figure("copies", what, times["contiguous"], times[name], at_least=bound)


def _jobs(num_blocks: int, count: int) -> dict[str, CopyJob]:
    rng = np.random.default_rng(7)

    def runs() -> IdArray:
        starts = rng.permutation(num_blocks // _RUN)[: count // _RUN].astype(np.int64) * _RUN
        ids: IdArray = (starts[:, None] + np.arange(_RUN)).ravel()
        return ids

    def scattered() -> IdArray:
        return rng.permutation(num_blocks)[:count].astype(np.int64)

    first = np.arange(count, dtype=np.int64)
    return {
        "contiguous": CopyJob("device", first, "host", first + (num_blocks - count)),
        "scattered": CopyJob("device", scattered(), "host", scattered()),
        f"runs of {_RUN}": CopyJob("device", runs(), "host", runs()),
    }


def _time_by_turns(storage: TorchStorage, jobs: dict[str, CopyJob], repeats: int) -> dict[str, float]:
    """Return each job's median time, the jobs taking turns. [ns]"""
    times: dict[str, list[int]] = {name: [] for name in jobs}
    for index in range(repeats):
        for name in list(jobs) if index % 2 == 0 else list(jobs)[::-1]:
            began = time.perf_counter_ns()
            storage.copy(jobs[name])
            times[name].append(time.perf_counter_ns() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def _touch(storage: TorchStorage, num_blocks: int) -> None:
    """Give both tiers their memory and write to every page of it: untouched memory copies faster than any other."""
    storage.resize("device", num_blocks)
    storage.resize("host", num_blocks)
    num_slots = num_blocks * _BLOCK_SIZE
    for start in range(0, num_slots, _STAMPED_AT_ONCE):
        slots = np.arange(start, min(start + _STAMPED_AT_ONCE, num_slots), dtype=np.int64)
        storage.write_stamps("device", slots, slots.view(np.uint64))
        storage.write_stamps("host", slots, slots.view(np.uint64))
