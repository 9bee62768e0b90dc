"""Figure: one measured number with its spread over the rounds, and how figures are printed. Pure functions."""

from __future__ import annotations

import gc
import os
import platform
import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

_HEADINGS: Final = ("group", "what", "median", "low–high", "unit", "bound", "kept")


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, once a round.

    Attributes:
        group: The workload it belongs to.
        what: What is measured.
        unit: Its unit; ``x`` is a ratio of two things measured in the same round.
        values: One value a round; none for a round in which nothing was measured.
        at_least, at_most: What it should reach; ``None`` where nothing is promised.
    """

    group: str
    what: str
    unit: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float | None:
        """The middle of the rounds' values; ``None`` without any."""
        return middle(self.values)

    @property
    def kept(self) -> bool | None:
        """Whether the median is within its bound; ``None`` without one of the two."""
        median = self.median
        if median is None:
            return None
        if self.at_least is not None:
            return median >= self.at_least
        return None if self.at_most is None else median <= self.at_most


def figure(group: str, what: str, unit: str, values: Sequence[float], **bounds: float | None) -> Figure:
    """Return a figure; ``bounds`` are its ``at_least`` or ``at_most``."""
    return Figure(group, what, unit, tuple(values), **bounds)


def ratio_figure(
    group: str, what: str, above: Sequence[float], below: Sequence[float], **bounds: float | None
) -> Figure:
    """Return the figure of ``above`` ÷ ``below``, see ``ratios``. [rounds], [rounds]"""
    return figure(group, what, "x", ratios(above, below), **bounds)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return ``above`` ÷ ``below`` inside each round; a round in which ``below`` got nothing done has none.

    Args:
        above, below: Rates, one a round. [rounds], [rounds]
    """
    return [a / b for a, b in zip(above, below, strict=True) if b]


def as_object(benchmark: str, rounds: int, figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures as plain values for JSON."""
    return {
        **conditions(benchmark, rounds),
        "figures": [
            {
                "group": f.group,
                "what": f.what,
                "unit": f.unit,
                **spread(f.values),
                "at_least": f.at_least,
                "at_most": f.at_most,
                "kept": f.kept,
            }
            for f in figures
        ],
    }


def conditions(benchmark: str, rounds: int) -> dict[str, Any]:
    """Return what was run, and on what, for JSON."""
    return {
        "benchmark": benchmark,
        "rounds": rounds,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the ends of the rounds' values, for JSON; ``None`` without any."""
    return {"median": middle(values), "low": min(values, default=None), "high": max(values, default=None)}


def middle(values: Sequence[float]) -> float | None:
    """Return the median; ``None`` without any value."""
    return statistics.median(values) if values else None


def as_text(figures: Sequence[Figure]) -> str:
    """Return the figures as an aligned table for people."""
    return table([_HEADINGS, *map(_row, figures)], numeric=(2, 3))


def table(rows: Sequence[Sequence[str]], numeric: Collection[int]) -> str:
    """Return rows of cells as aligned lines; the columns in ``numeric`` stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Keep what exists already out of garbage collections while the context lasts, so that none falls into a timing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def number(value: float | None) -> str:
    """Write a figure with three digits or more: ``0.987``, ``12.3``, ``4,096``; ``—`` where there is none."""
    if value is None:
        return "—"
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3}f}"


def low_high(values: Sequence[float]) -> str:
    """Write the ends of the rounds' values: ``0.91–1.04``; ``—`` without any."""
    if not values:
        return number(None)
    return f"{number(min(values))}–{number(max(values))}"


def _row(f: Figure) -> tuple[str, ...]:
    bound = "" if f.kept is None else f"≥ {f.at_least:g}" if f.at_least is not None else f"≤ {f.at_most:g}"
    kept = "" if f.kept is None else "yes" if f.kept else "NO"
    return (f.group, f.what, number(f.median), low_high(f.values), f.unit, bound, kept)
