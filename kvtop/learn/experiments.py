"""Experiments: what a lesson runs besides its engine, by name, with parameters and results that texts may tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import msgspec

from kvtop.errors import UserError
from kvtop.learn.expression import Value
from kvtop.learn.lesson import EngineSpec

Results = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        help: What it does, in one line.
        parameters: Name → least, greatest and usual value, all whole.
        results: Names of what it finds out.
        work: Runs it, for a lesson's engine and with the parameters by name; takes seconds at most.
    """

    help: str
    parameters: Mapping[str, tuple[int, int, int]]
    results: tuple[str, ...]
    work: Callable[..., Results]


def run_experiment(name: str, spec: EngineSpec, parameters: Mapping[str, Value]) -> Results:
    """Run an experiment and return its results.

    Args:
        name: Which.
        spec: The engine that the lesson is at.
        parameters: By name.

    Raises:
        UserError: It cannot be run on such an engine.
    """
    try:
        return EXPERIMENTS[name].work(spec, **parameters)
    except ValueError as error:
        raise UserError(f"experiment {name}: {error}") from None


def _policies(spec: EngineSpec) -> Results:
    """Serve the engine's requests to their end under every eviction policy, and ask the oracle."""
    from kvtop.learn.oracle import accesses_of, best_hits
    from kvtop.learn.workshop import build

    results: dict[str, Value] = {}
    for policy in ("lru", "fifo", "lfu"):
        options = msgspec.structs.replace(spec.options, eviction=policy, geometry="none")
        engine = build(dataclasses.replace(spec, options=options))
        try:
            while engine.advance(1000):
                pass
            results[f"{policy}_hits"] = engine.counters.hit_blocks
        finally:
            engine.close()
    accesses, capacity = accesses_of(spec)
    return {**results, "oracle_hits": best_hits(accesses, capacity), "num_accesses": len(accesses)}


@cache
def _rerun(spec: EngineSpec, *, blocks: int, watermark_percent: int) -> Results:
    """Run the engine's steps again as it is, with more blocks, and with another watermark."""
    from kvtop.learn.workshop import build, go_to

    changes: dict[str, dict[str, int | float]] = {
        "same": {},
        "blocks": {"num_blocks": blocks},
        "watermark": {"watermark_ratio": watermark_percent / 100},
    }
    results: dict[str, Value] = {}
    for name, change in changes.items():
        options = msgspec.structs.replace(spec.options, geometry="none", reuse_distances=False, **change)
        # The load stays the one that was made for the pool as it was.
        engine = build(dataclasses.replace(spec, options=options, load_blocks=spec.options.num_blocks))
        try:
            go_to(engine, spec.warm_steps + spec.record_steps)
            snapshot = engine.snapshot(phase="running", speed=None, steps_per_s=None)
            counters = snapshot.counters
            results[f"waiting_{name}"] = snapshot.num_waiting
            results[f"preemptions_{name}"] = counters.preemptions_swap + counters.preemptions_recompute
        finally:
            engine.close()
    return results


def _lost_update(_spec: EngineSpec, *, threads: int, takes: int) -> Results:
    from kvtop.learn.threads import lose_updates

    return lose_updates(threads, takes)


def _lock(_spec: EngineSpec, *, threads: int, pairs: int) -> Results:
    from kvtop.learn.threads import count_lock

    return count_lock(threads, pairs)


def _optimistic(_spec: EngineSpec, *, threads: int, lookups: int) -> Results:
    from kvtop.learn.threads import look_up_optimistically

    return look_up_optimistically(threads, lookups)


#: All of them.
EXPERIMENTS: Final[dict[str, Experiment]] = {
    "policies": Experiment(
        "serve the engine's requests under LRU, FIFO and LFU, and work out what the oracle would hit",
        {},
        ("lru_hits", "fifo_hits", "lfu_hits", "oracle_hits", "num_accesses"),
        _policies,
    ),
    "rerun": Experiment(
        "run the engine's steps again as it is, with other blocks, and with another watermark",
        {"blocks": (1, 1_000_000, 1024), "watermark_percent": (0, 90, 20)},
        (
            *("waiting_same", "waiting_blocks", "waiting_watermark"),
            *("preemptions_same", "preemptions_blocks", "preemptions_watermark"),
        ),
        _rerun,
    ),
    "lost-update": Experiment(
        "let threads take blocks from a pool without a lock, and from the same behind one",
        {"threads": (2, 16, 2), "takes": (1, 10_000, 200)},
        ("taken", "counted", "lost", "twice", "twice_locked"),
        _lost_update,
    ),
    "lock": Experiment(
        "let threads allocate and release, without reservations and with them, and count takings of the lock",
        {"threads": (1, 16, 4), "pairs": (1, 100_000, 2000)},
        ("calls", "takings", "takings_reserved", "waits", "waits_reserved", "refills"),
        _lock,
    ),
    "optimistic": Experiment(
        "let threads look prefixes up before the lock is taken, while blocks are evicted",
        {"threads": (1, 16, 4), "lookups": (1, 10_000, 300)},
        ("lookups", "retries", "found"),
        _optimistic,
    ),
}
