"""What ``kvtop check`` adds to a run: the progress law, and the sentence that says what was proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from allocator.errors import InvariantViolation
from allocator.snapshot import Snapshot
from kvtop.model.format import count
from kvtop.report import Report

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Steps without any progress, with work at hand, after which the progress law counts as broken.
PATIENCE_STEPS: Final = 1000


class ProgressWatch:
    """Law 7: while a request is unfinished, tokens are computed or requests end."""

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
        if moved != self._seen or c.submitted == ended:
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
