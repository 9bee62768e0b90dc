"""Snapshots and views made from a few words, for tests of whoever reads them."""

from __future__ import annotations

from allocator.snapshot import Counters, Snapshot
from allocator.timings import BOUNDS_S, Stopwatch, Timings
from kvtop.model.observation import Observation
from kvtop.model.reduce import reduce
from kvtop.model.view import View


def make_timings() -> Timings:
    """Return timings of two steps, one at a bucket's bound and one above all bounds, one copy and no wait."""
    step, copy, wait = Stopwatch(), Stopwatch(), Stopwatch()
    step.add(BOUNDS_S[1])
    step.add(20.0)
    copy.add(0.003)
    none = (("allocator", wait.read()),)
    return Timings(step.read(), (("swap-out", copy.read()),), lock_waits=none, lock_holds=none)


def make_snapshot(**settings: object) -> Snapshot:
    values = {
        "step": 7,
        "time_s": 0.2,
        "phase": "running",
        "speed": 1.0,
        "steps_per_s": 40.0,
        "source": "embedded",
        "workload": "chat",
        "geometry": "tiny",
        "device": "cpu",
        "block_size": 16,
        "block_bytes": 512,
        "slab_size": 1024,
        "eviction": "lru",
        "preempt": "swap",
        "policy": "fcfs",
        "compact": "manual",
        "compact_threshold_ratio": 0.5,
        "watermark_ratio": 0.01,
        "num_running": 2,
        "num_waiting": 3,
        "num_swapped": 1,
        "counters": Counters(evictions=5, preemptions_recompute=2, query_blocks=9),
        "sequences": (),
        "timings": make_timings(),
    }
    return Snapshot(**{**values, **settings})


def make_view(snapshot: Snapshot, device: object, host: object = None, now_s: float = 100.0) -> View:
    return reduce(View(source="embedded"), Observation(snapshot, device, host), now_s)
