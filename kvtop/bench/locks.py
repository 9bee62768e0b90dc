"""What each layer of the allocator's locking is worth: the same load with the layer and without it, by turns."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from allocator import BlockManager, chain_keys
from allocator.content import TokenArray
from allocator.ids import BlockKey
from kvtop.bench.beside import compare_executor, compare_sequence_locks
from kvtop.bench.comparison import Comparison, Side, by_turns
from kvtop.bench.figures import low_high, middle, number, quiet_heap, spread, table
from kvtop.bench.pools import make_manager, scrambled_pool
from kvtop.bench.sequences import BLOCK_SIZE, prefix_load
from kvtop.bench.threads import Work, churn, run_threads
from kvtop.model.format import count

#: Sequences that one thread keeps alive in the lookup load.
_WINDOW: Final = 8
_HEADINGS: Final = (
    "layer", "load", "with", "without", "unit", "ratio", "low–high", "waits with", "without", "longest ms", "without",
    "counted",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LockSizes:
    """How much is measured.

    Attributes:
        pool_blocks: Blocks of the reservation load and of the decode load.
        batches: Blocks a call of the reservation load.
        counts: Numbers of threads.
        duration_s: Time of each cell. [s]
        cache_blocks: Blocks of the lookup load: few enough that blocks are evicted.
        num_prompts: Prompts of the lookup load.
        num_rows: Sequences of a decode step.
        num_steps: Decode steps timed.
        copied_blocks: Blocks of real size that are swapped beside other work.
        engine_steps, engine_blocks: Steps and pool of the engine that copies beside its steps.
    """

    pool_blocks: int = 100_000
    batches: tuple[int, ...] = (1, 4, 16)
    counts: tuple[int, ...] = (1, 2, 4, 8)
    duration_s: float = 0.4
    cache_blocks: int = 12_000
    num_prompts: int = 800
    num_rows: int = 256
    num_steps: int = 200
    copied_blocks: int = 32
    engine_steps: int = 600
    engine_blocks: int = 256


def compare_layers(rounds: int, sizes: LockSizes) -> Iterator[Comparison]:
    """Yield a comparison for each layer and load."""
    yield from compare_reservations(rounds, sizes)
    yield from compare_lookups(rounds, sizes)
    yield compare_batching(rounds, sizes)
    yield from compare_sequence_locks(
        rounds, copied_blocks=sizes.copied_blocks, counts=sizes.counts, duration_s=sizes.duration_s
    )
    yield compare_executor(rounds, num_steps=sizes.engine_steps, num_blocks=sizes.engine_blocks)


def compare_reservations(rounds: int, sizes: LockSizes) -> Iterator[Comparison]:
    """Yield pairs of allocate and release with each thread's reservation and without."""
    for n in sizes.batches:
        for num_threads in sizes.counts:

            def run(side: Side, reserve: bool, n: int = n, num_threads: int = num_threads) -> None:
                pool = scrambled_pool(sizes.pool_blocks, reserve=reserve)
                with quiet_heap():
                    turnout = churn(pool, n, num_threads, sizes.duration_s)
                side.add(turnout.per_s, pool.lock, refills=turnout.counted, steals=pool.steals)

            yield by_turns("reservation", f"{n} blocks, {_threads(num_threads)}", "pairs/s", rounds, run)


def compare_lookups(rounds: int, sizes: LockSizes) -> Iterator[Comparison]:
    """Yield admissions with the prefix matched before the lock is taken, and under it."""
    load = [(tokens, chain_keys(tokens, BLOCK_SIZE)) for tokens in prefix_load(sizes.num_prompts)]
    for num_threads in sizes.counts:

        def run(side: Side, is_optimistic: bool, num_threads: int = num_threads) -> None:
            manager = make_manager(sizes.cache_blocks, watermark_ratio=0.0, optimistic_lookup=is_optimistic)
            with quiet_heap():
                turnout = run_threads(num_threads, sizes.duration_s, _admissions(manager, load, num_threads))
            side.add(turnout.per_s, manager.lock, retries=manager.optimistic_retries)

        yield by_turns("optimistic lookup", _threads(num_threads), "admissions/s", rounds, run)


def compare_batching(rounds: int, sizes: LockSizes) -> Comparison:
    """Return decode steps made in one call, and in one call a sequence."""

    def run(side: Side, in_one_call: bool) -> None:
        manager = make_manager(sizes.pool_blocks, prefix_cache=False, watermark_ratio=0.0)
        side.add(_decode_rate(manager, in_one_call, sizes), manager.lock)

    return by_turns("batching", f"decode of {sizes.num_rows} sequences", "steps/s", rounds, run)


def as_object(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the comparisons as plain values for JSON."""
    return [
        {"layer": c.layer, "load": c.load, "unit": c.unit, "ratio": spread(c.ratios)}
        | {
            name: {
                "rate": spread(side.rates),
                "contended_waits": spread(side.waits),
                "longest_wait_ms": spread(side.longest_wait_ms),
                **{counter: spread(values) for counter, values in side.counted.items()},
            }
            for name, side in (("with", c.switched_on), ("without", c.switched_off))
        }
        for c in comparisons
    ]


def as_text(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as an aligned table for people."""
    return table([_HEADINGS, *map(_row, comparisons)], numeric=(2, 3, 5, 6, 7, 8, 9, 10))


def _row(c: Comparison) -> tuple[str, ...]:
    on, off = c.switched_on, c.switched_off
    waits = [count(statistics.median(side.waits)) for side in (on, off)]
    longest = [_middle(side.longest_wait_ms) for side in (on, off)]
    counted = ", ".join(f"{count(statistics.median(values))} {name}" for name, values in on.counted.items())
    rates = (_middle(on.rates), _middle(off.rates), c.unit)
    return (c.layer, c.load, *rates, _middle(c.ratios), low_high(c.ratios), *waits, *longest, counted)


def _middle(values: Sequence[float]) -> str:
    return number(middle(values))


def _admissions(manager: BlockManager, load: list[tuple[TokenArray, list[BlockKey]]], num_threads: int) -> Work:
    """Return the work of a thread: admit a prompt, publish its keys, free its oldest."""

    def work(index: int) -> tuple[Callable[[], None], Callable[[], None]]:
        mine = deque(load[index::num_threads])
        live: deque[int] = deque()

        def once() -> None:
            if len(live) == _WINDOW:
                manager.free(live.popleft())
            tokens, keys = mine[0]
            mine.rotate(-1)
            admission = manager.admit(keys, len(tokens), tokens=tokens)
            live.append(admission.row)
            first = admission.matched_blocks
            own = tokens[first * BLOCK_SIZE : len(keys) * BLOCK_SIZE]
            manager.publish_keys(admission.row, keys[first:], first, tokens=own)

        def finish() -> None:
            while live:
                manager.free(live.popleft())

        return once, finish

    return work


def _decode_rate(manager: BlockManager, in_one_call: bool, sizes: LockSizes) -> float:
    """Return decode steps a second; the median step counts."""
    rows = np.array([manager.admit((), 64 + i % BLOCK_SIZE).row for i in range(sizes.num_rows)], np.int64)
    calls = [rows] if in_one_call else [rows[i : i + 1] for i in range(len(rows))]
    times = []
    with quiet_heap():
        for _ in range(sizes.num_steps):
            began = time.perf_counter_ns()
            for part in calls:
                manager.append(part)
            times.append(time.perf_counter_ns() - began)
    return 1e9 / statistics.median(times)


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
