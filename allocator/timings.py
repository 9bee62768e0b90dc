"""Timings: how long turns, copies and waits took in real time, as histograms of fixed buckets. Decide nothing.

Real time differs from run to run, so these stand beside the counters, which do not.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import msgspec

#: Upper bounds of the buckets; a last one takes what is above. [s]
BOUNDS_S: Final = (1e-6, 2.5e-6, 1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)


class TimeCounts(msgspec.Struct, frozen=True):
    """One histogram as it stood.

    Attributes:
        counts: Times in each bucket of ``BOUNDS_S``, and above; not cumulative. [len(BOUNDS_S) + 1]
        sum_s: All of them together. [s]
    """

    counts: tuple[int, ...]
    sum_s: float


class Timings(msgspec.Struct, frozen=True):
    """Real time spent since the start.

    Attributes:
        step: What a step took; steps taken in one go share its time.
        copies: What copies took, by their kind.
        lock_waits: What waits for a lock took, by its layer. Who did not have to wait is not counted.
        lock_holds: For how long a lock was held, by its layer, of a sample of times.
    """

    step: TimeCounts
    copies: tuple[tuple[str, TimeCounts], ...]
    lock_waits: tuple[tuple[str, TimeCounts], ...]
    lock_holds: tuple[tuple[str, TimeCounts], ...] = ()


class Stopwatch:
    """A histogram being written, by one thread at a time. Cost: O(log buckets) each."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Note that something took ``seconds``, ``times`` times."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += times
        self._sum_s += seconds * times

    def read(self) -> TimeCounts:
        """Return the histogram as it stands."""
        return TimeCounts(tuple(self._counts), self._sum_s)
