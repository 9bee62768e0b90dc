"""A layer switched on and off under one load, by turns: its rates, and what its locks counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from allocator.locks import CountedLock
from kvtop.bench.figures import ratios


@dataclass(slots=True)
class Side:
    """One side of a comparison, a value a round.

    Attributes:
        rates: What was done a second.
        waits: Times somebody waited for the allocator lock.
        longest_wait_ms: The longest of these waits. [ms]
        counted: What the layer counts, by name.
    """

    rates: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    longest_wait_ms: list[float] = field(default_factory=list)
    counted: dict[str, list[float]] = field(default_factory=dict)

    def add(self, rate: float, lock: CountedLock, **counted: float) -> None:
        """Add one round's values."""
        self.rates.append(rate)
        self.waits.append(lock.contended)
        self.longest_wait_ms.append(lock.longest_wait_s * 1e3)
        for name, value in counted.items():
            self.counted.setdefault(name, []).append(value)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layer switched on and off under one load.

    Attributes:
        layer: The layer.
        load: The load.
        unit: What a rate counts.
        switched_on, switched_off: The two sides.
    """

    layer: str
    load: str
    unit: str
    switched_on: Side
    switched_off: Side

    @property
    def ratios(self) -> list[float]:
        """Rate with the layer ÷ without it, see ``figures.ratios``. [rounds]"""
        return ratios(self.switched_on.rates, self.switched_off.rates)


def by_turns(layer: str, load: str, unit: str, rounds: int, run: Callable[[Side, bool], None]) -> Comparison:
    """Run both sides in every round, in alternating order."""
    sides = {True: Side(), False: Side()}
    for index in range(rounds):
        for is_on in (True, False) if index % 2 == 0 else (False, True):
            run(sides[is_on], is_on)
    return Comparison(layer, load, unit, sides[True], sides[False])
