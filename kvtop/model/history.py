"""History: bounded series of the numbers that sparklines draw. Immutable; appending returns a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Points kept for each series: an hour at one point a second.
LIMIT: Final = 3600


@dataclass(frozen=True, slots=True)
class History:
    """Named series of equal length, oldest first; an unknown point is ``None``."""

    series: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)

    def append(self, point: Mapping[str, float | None]) -> History:
        """Return the history with one more point, the oldest dropped beyond ``LIMIT``."""
        length = max((len(s) for s in self.series.values()), default=0)
        names = [*self.series, *(n for n in point if n not in self.series)]
        blank: tuple[float | None, ...] = (None,) * length
        return History({n: (*self.series.get(n, blank), point.get(n))[-LIMIT:] for n in names})

    def get(self, name: str) -> tuple[float | None, ...]:
        """Return one series; empty when there is none of that name."""
        return self.series.get(name, ())


def rates(history: History, name: str) -> list[float | None]:
    """Return how fast a total rose between each two points, the first unknown; ``None`` where either is unknown."""
    times, totals = history.get("at_s"), history.get(name)
    found: list[float | None] = [None] * min(1, len(totals))
    for i in range(1, len(totals)):
        before, after, start, end = totals[i - 1], totals[i], times[i - 1], times[i]
        if before is None or after is None or start is None or end is None or end <= start:
            found.append(None)
        else:
            found.append((after - before) / (end - start))
    return found


def per_second(history: History, name: str, points: int = 6) -> float | None:
    """Return how fast a total of the history rises, over its last few points; ``None`` before there are two."""
    times, totals = history.get("at_s")[-points:], history.get(name)[-points:]
    known = [(t, v) for t, v in zip(times, totals, strict=False) if t is not None and v is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])


def hit_ratios(history: History) -> list[float | None]:
    """Return the hit ratio between each two points of the history; ``None`` where nothing was asked."""
    hits, queries = history.get("hit_blocks"), history.get("query_blocks")
    ratios: list[float | None] = []
    for i in range(1, len(hits)):
        if None in (hits[i], hits[i - 1], queries[i], queries[i - 1]):
            ratios.append(None)
            continue
        asked = queries[i] - queries[i - 1]  # type: ignore[operator]
        ratios.append((hits[i] - hits[i - 1]) / asked if asked else None)  # type: ignore[operator]
    return ratios
