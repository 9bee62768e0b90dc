"""Several threads at one pool: each allocates, keeps eight handles in a ring, and releases the oldest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from allocator import SharedPool
from kvtop.bench.figures import Figure, figure, quiet_heap, ratio_figure
from kvtop.bench.pools import scrambled_pool

_RING: Final = 8
#: Seconds the threads wait for each other at the start.
_START_LIMIT_S: Final = 60.0


class Turnout(NamedTuple):
    """What threads got done together.

    Attributes:
        per_s: Rounds of their work a second, all threads together.
        least_share: The slowest thread's rounds ÷ the quickest's.
        worst_ms: The longest single round. [ms]
        counted: What ``count_up`` returned while the threads were still there.
    """

    per_s: float
    least_share: float
    worst_ms: float
    counted: int


#: Makes one thread's work: called in that thread with its number; returns what it repeats, and what it does at the end.
Work = Callable[[int], tuple[Callable[[], None], Callable[[], None]]]


def run_threads(count: int, duration_s: float, work: Work, count_up: Callable[[], int] = lambda: 0) -> Turnout:
    """Run ``work`` in ``count`` threads that start together, for ``duration_s``; then ``count_up``, before they end."""
    stop = threading.Event()
    start = threading.Barrier(count + 1)

    def repeat(index: int) -> tuple[int, int]:
        once, finish = work(index)
        start.wait(_START_LIMIT_S)
        now, is_over = time.perf_counter_ns, stop.is_set
        rounds = worst = 0
        while not is_over():
            began = now()
            once()
            worst = max(worst, now() - began)
            rounds += 1
        finish()
        return rounds, worst

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(repeat, index) for index in range(count)]
        start.wait(_START_LIMIT_S)
        began = time.perf_counter()
        stop.wait(duration_s)
        stop.set()
        took = time.perf_counter() - began
        results = [future.result() for future in futures]
        counted = count_up()
    rounds = [done for done, _ in results]
    return Turnout(sum(rounds) / took, min(rounds) / max(1, *rounds), max(worst for _, worst in results) / 1e6, counted)


def churn(pool: SharedPool, n: int, count: int, duration_s: float) -> Turnout:
    """Return what ``count`` threads get done that allocate and release ``n`` blocks, and the refills that took."""

    def work(_index: int) -> tuple[Callable[[], None], Callable[[], None]]:
        ring: deque[object] = deque()
        allocate, release = pool.allocate, pool.release

        def once() -> None:
            ring.append(allocate(n))
            if len(ring) > _RING:
                release(ring.popleft())  # type: ignore[arg-type]

        def finish() -> None:
            while ring:
                release(ring.popleft())  # type: ignore[arg-type]
            pool.give_back()

        return once, finish

    return run_threads(count, duration_s, work, lambda: pool.refills)


def measure_threads(
    rounds: int, *, num_blocks: int, sizes: tuple[int, ...], counts: tuple[int, ...], duration_s: float
) -> Iterator[Figure]:
    """Yield pairs a second for each size and number of threads, and how much of one thread's rate is kept.

    The bound is for the most threads and for sizes up to 16.
    """
    rates: dict[tuple[int, int], list[float]] = {(n, count): [] for n in sizes for count in counts}
    turnouts: dict[int, list[Turnout]] = {n: [] for n in sizes}
    for _ in range(rounds):
        for n in sizes:
            pool = scrambled_pool(num_blocks)
            with quiet_heap():
                for count in counts:
                    turnout = churn(pool, n, count, duration_s)
                    rates[n, count].append(turnout.per_s)
            turnouts[n].append(turnout)
    for (n, count), values in rates.items():
        what = f"{n} blocks, {count} {'thread' if count == 1 else 'threads'}"
        yield figure("threads", what, "pairs/s", values)
    first, last = counts[0], counts[-1]
    for n in sizes:
        bound = 0.9 if n <= 16 else None
        yield ratio_figure(
            "threads", f"{n} blocks, {last} threads ÷ {first}", rates[n, last], rates[n, first], at_least=bound
        )
        yield figure(
            "threads", f"{n} blocks, slowest of {last} threads ÷ quickest", "x", [t.least_share for t in turnouts[n]]
        )
        yield figure("threads", f"{n} blocks, {last} threads, longest pair", "ms", [t.worst_ms for t in turnouts[n]])
