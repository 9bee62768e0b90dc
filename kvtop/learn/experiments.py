"""Experiments: what a lesson runs besides its engine, by name, with parameters and results that texts may tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvtop.learn.expression import Value

Results = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        help: What it does, in one line.
        parameters: Name → least, greatest and usual value, all whole.
        results: Names of what it finds out.
        work: Runs it; takes seconds at most.
    """

    help: str
    parameters: Mapping[str, tuple[int, int, int]]
    results: tuple[str, ...]
    work: Callable[..., Results]


#: All of them.
EXPERIMENTS: Final[dict[str, Experiment]] = {}


def run_experiment(name: str, parameters: Mapping[str, Value]) -> Results:
    """Run an experiment and return its results."""
    return EXPERIMENTS[name].work(**parameters)
