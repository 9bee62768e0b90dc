"""``kvtop bench allocator``, ``locks`` and ``observer``: how much each measures, and what each prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtop.bench import figures, locks
from kvtop.bench.console import ConsoleSizes, measure_console
from kvtop.bench.copies import measure_copies
from kvtop.bench.events import EventSizes, measure_events
from kvtop.bench.figures import Figure
from kvtop.bench.locks import LockSizes, compare_layers
from kvtop.bench.observer import ObserverSizes, measure_observer
from kvtop.bench.open_console import OpenSizes, measure_open_console
from kvtop.bench.overhead import OverheadSizes, measure_overhead
from kvtop.bench.pools import measure_pairs, measure_scaling
from kvtop.bench.recording import RecordSizes, measure_recording
from kvtop.bench.sequences import measure_decode, measure_prefix
from kvtop.bench.threads import measure_threads
from kvtop.bench.watching import measure_statistics
from kvtop.errors import EXIT_OK
from kvtop.headless import say, write_out


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much ``kvtop bench allocator`` measures: workload sizes, and how often a timing is repeated in a round."""

    num_blocks: int = 100_000
    batches: tuple[int, ...] = (1, 16, 256, 4096)
    repeats: int = 9
    num_slots: int = 256
    warm_up_steps: int = 100
    num_steps: int = 500
    cache_blocks: int = 12_000
    num_requests: int = 3000
    warm_up_requests: int = 500
    pool_sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000, 4_000_000)
    thread_batches: tuple[int, ...] = (1, 16, 256)
    thread_counts: tuple[int, ...] = (1, 2, 4, 8)
    duration_s: float = 0.4
    copied_pool_bytes: int = 512 << 20
    watched_blocks: int = 1_000_000


GROUPS: Final[dict[str, Callable[[int, Sizes], Iterator[Figure]]]] = {
    "pairs": lambda rounds, s: measure_pairs(rounds, num_blocks=s.num_blocks, sizes=s.batches, repeats=s.repeats),
    "decode": lambda rounds, s: measure_decode(
        rounds, num_blocks=s.num_blocks, num_slots=s.num_slots, warm_up=s.warm_up_steps, num_steps=s.num_steps
    ),
    "prefix": lambda rounds, s: measure_prefix(
        rounds, num_blocks=s.cache_blocks, num_requests=s.num_requests, warm_up=s.warm_up_requests
    ),
    "scaling": lambda rounds, s: measure_scaling(rounds, pool_sizes=s.pool_sizes, n=16, repeats=s.repeats),
    "threads": lambda rounds, s: measure_threads(
        rounds, num_blocks=s.num_blocks, sizes=s.thread_batches, counts=s.thread_counts, duration_s=s.duration_s
    ),
    "copies": lambda rounds, s: measure_copies(
        rounds, pool_bytes=s.copied_pool_bytes, copied_share=0.25, repeats=s.repeats
    ),
    "statistics": lambda rounds, s: measure_statistics(rounds, num_blocks=s.watched_blocks, repeats=s.repeats),
}


def run_bench_allocator(only: Collection[str], *, rounds: int, as_json: bool, sizes: Sizes | None = None) -> int:
    """Measure the allocator alone, print a table or JSON, and return the exit code.

    Args:
        only: Names of ``GROUPS``; empty is all.
        rounds: Times everything is measured.
        as_json: Print one JSON object instead of text.
        sizes: How much; by default what the figures of the documentation were made with.
    """
    found: list[Figure] = []
    for name, measure in GROUPS.items():
        if not only or name in only:
            say(f"{name}: {rounds} rounds")
            found += measure(rounds, sizes or Sizes())
    return _print("allocator", rounds, found, as_json)


def run_bench_locks(*, rounds: int, as_json: bool, sizes: LockSizes | None = None) -> int:
    """Measure what each layer of locking is worth, print it, and return the exit code."""
    comparisons = []
    for comparison in compare_layers(rounds, sizes or LockSizes()):
        say(f"{comparison.layer}, {comparison.load}: done")
        comparisons.append(comparison)
    if as_json:
        values = {**figures.conditions("locks", rounds), "comparisons": locks.as_object(comparisons)}
        write_out(json.dumps(values, allow_nan=False))
    else:
        write_out(locks.as_text(comparisons))
    return EXIT_OK


def run_bench_observer(*, rounds: int, as_json: bool, sizes: ObserverSizes | None = None) -> int:
    """Measure what an observer costs an engine, print it, and return the exit code.

    Raises:
        KvtopError: The engine process cannot be started, or is lost.
    """
    say(f"observer: {rounds} rounds, after the engine has warmed up")
    return _print("observer", rounds, list(measure_observer(rounds, sizes or ObserverSizes())), as_json)


def run_bench_record(*, rounds: int, as_json: bool, sizes: RecordSizes | None = None) -> int:
    """Measure what a recording costs a run, and its size, print it, and return the exit code."""
    say(f"recording: {rounds} rounds")
    return _print("record", rounds, list(measure_recording(rounds, sizes or RecordSizes())), as_json)


def run_bench_overhead(*, rounds: int, as_json: bool, sizes: OverheadSizes | None = None) -> int:
    """Measure what observers and scrapes cost a published engine, print it, and return the exit code.

    Raises:
        KvtopError: An engine cannot be started, or is lost.
    """
    say(f"overhead: {rounds} rounds, after two engines have warmed up")
    return _print("overhead", rounds, list(measure_overhead(rounds, sizes or OverheadSizes())), as_json)


def run_bench_console(
    *, rounds: int, as_json: bool, sizes: ConsoleSizes | None = None, open_sizes: OpenSizes | None = None
) -> int:
    """Measure what the console costs, print it, and return the exit code.

    Raises:
        KvtopError: A console did not come to its end, or an engine did not start.
    """
    say(f"console: {rounds} rounds, each in a terminal of its own")
    found = [
        *measure_console(rounds, sizes or ConsoleSizes()),
        *measure_open_console(rounds, open_sizes or OpenSizes()),
    ]
    return _print("console", rounds, found, as_json)


def run_bench_events(*, rounds: int, as_json: bool, sizes: EventSizes | None = None) -> int:
    """Measure how fast cache events are taken in, print it, and return the exit code.

    Raises:
        KvtopError: Events were lost on the way.
    """
    say(f"events: {rounds} rounds")
    return _print("events", rounds, list(measure_events(rounds, sizes or EventSizes())), as_json)


def _print(benchmark: str, rounds: int, found: Sequence[Figure], as_json: bool) -> int:
    if as_json:
        write_out(json.dumps(figures.as_object(benchmark, rounds, found), allow_nan=False))
    else:
        write_out(figures.as_text(found))
    return EXIT_OK
