"""What ``kvtop check`` adds to a run: the progress law, and the sentence that says what was proved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from allocator.errors import InvariantViolation
from allocator.fault_kinds import FAULTS, FaultKind
from allocator.snapshot import Snapshot
from kvtop.model.format import count
from kvtop.report import Report

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Steps without any progress, with work at hand, after which the progress law counts as broken.
PATIENCE_STEPS: Final = 1000


class ProgressWatch:
    """Law 7: while a request is unfinished, tokens are computed or requests end, or attached programs hold the pool."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = -1
        self._since_step = engine.step

    def after_turn(self) -> None:
        """Note what moved since the last call.

        Raises:
            InvariantViolation: Nothing has, for ``PATIENCE_STEPS`` steps with work at hand.
        """
        c, step = self._engine.counters, self._engine.step
        ended = c.finished + c.cancelled + c.refused
        moved = c.prompt_tokens + c.generated_tokens + ended
        if moved != self._seen or c.submitted == ended or self._engine.is_waiting:
            self._seen, self._since_step = moved, step
        elif step - self._since_step >= PATIENCE_STEPS:
            reason = self._engine.stuck_reason or "no reason given"
            left = c.submitted - ended
            raise InvariantViolation(7, f"{left} unfinished, none has moved since step {self._since_step}: {reason}")


def verdict(report: Report, stuck_reason: str | None, snapshot: Snapshot) -> str:
    """Return what the check showed, in one line: how much was checked, and what progressed or why nothing could."""
    requests, checks = report["requests"], report["integrity"]["checks"]
    scope = "books only, geometry none has no contents" if snapshot.geometry == "none" else "contents included"
    proved = f"no fault in {count(checks)} checks ({scope}) over {count(report['steps'])} steps"
    if struck := _struck(report, to_catch=False):
        proved += f", {struck} survived"
    if stuck_reason is not None:
        return f"{proved}; but no progress: {stuck_reason}"
    if requests["submitted"] and requests["refused"] == requests["submitted"]:
        reasons = [event.text for event in snapshot.events if event.kind == "refuse"]
        why = f", the last one so: {reasons[-1]}" if reasons else ""
        return f"{proved}; all {count(requests['refused'])} requests had to be refused{why}"
    return (
        f"{proved}; {count(requests['finished'])} of {count(requests['submitted'])} requests finished, "
        f"{count(requests['refused'])} refused, {count(report['tokens']['generated'])} tokens generated"
    )


def told_faults(report: Report, asked: Iterable[FaultKind], fault: InvariantViolation | None) -> tuple[str, ...]:
    """Return what became of the injected faults that break a law and so must be caught, one line each.

    Args:
        report: The report at the end.
        asked: Faults that were to strike at random.
        fault: What the last check found.
    """
    lines = []
    struck = _struck(report, to_catch=True)
    if struck:
        lines.append(f"{struck} had been injected, to be caught: {'it was' if fault else 'IT WAS NOT'}")
    unseen = [kind for kind in asked if FAULTS[kind].caught_by and not report["injected"][kind]]
    if unseen and fault is None:
        lines.append(f"{', '.join(unseen)} never struck, so nothing is proved of it; more --steps, or a higher rate")
    return tuple(lines)


def is_uncaught(report: Report, fault: InvariantViolation | None) -> bool:
    """Return whether a fault that breaks a law struck and no check found it."""
    return fault is None and bool(_struck(report, to_catch=True))


def _struck(report: Report, *, to_catch: bool) -> str:
    """Return how often faults of one sort struck, in words; empty when none did."""
    injected = report["injected"].items()
    return ", ".join(f"{count(n)} {kind}" for kind, n in injected if n and bool(FAULTS[kind].caught_by) == to_catch)
