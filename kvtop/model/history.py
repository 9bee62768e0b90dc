"""History: bounded series of the numbers that sparklines draw. Immutable; appending returns a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Points kept for each series: two minutes at one point a second.
LIMIT: Final = 120


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
