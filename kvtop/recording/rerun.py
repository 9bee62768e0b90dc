"""Runs a recorded run again, from its options and commands, and compares it moment for moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from allocator.errors import InvariantViolation
from kvtop.engine_setup import build_engine
from kvtop.errors import UserError
from kvtop.recording.compare import differences
from kvtop.recording.frames import RecordedCommand
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.writer import load_crc

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Seconds for which a copy that does not come back may hold a run up.
_LATE_BOUND_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rerun:
    """How a run that was run again went.

    Attributes:
        moments, commands: How many were the same.
        step: Step of the first difference, or of the last moment where there is none.
        what: In what they differ, the recording first; empty when they do not.
    """

    moments: int
    commands: int
    step: int
    what: tuple[str, ...] = ()


def rerun(recording: Recording, after_moment: Callable[[int], object] = lambda step: None) -> Rerun:
    """Run a recording's engine again and compare; ends at the first difference.

    Args:
        recording: The recording.
        after_moment: Called with the step after each moment that was the same.

    Raises:
        UserError: It cannot be run again: other programs took part, the file that its requests come from is gone or
            another, or its pools do not fit here.
        RecordingError: The recording is damaged.
    """
    header = recording.header
    if header.attached:
        raise UserError(f"{recording.name}: other programs could use its blocks (--publish), so it cannot be run again")
    engine, _ = build_engine(msgspec.structs.replace(header.options, speed=None))
    try:
        if load_crc(header.options) != header.load_crc:
            file = header.options.trace or header.options.workload_file
            raise UserError(f"{recording.name}: the file its requests come from, {file}, has changed since")
        moments = commands = 0
        step = 0
        for item in recording.story():
            what = _command(engine, item) if isinstance(item, RecordedCommand) else _moment(engine, item)
            step = engine.step
            if what:
                return Rerun(moments, commands, step, what)
            if isinstance(item, Moment):
                moments += 1
                after_moment(step)
            else:
                commands += 1
        return Rerun(moments, commands, step)
    finally:
        engine.close()


def _moment(engine: Engine, moment: Moment) -> tuple[str, ...]:
    _advance(engine, moment.snapshot.step)
    if moment.stalled:
        _advance(engine, moment.snapshot.step + 1)
    again = engine.snapshot(phase="", speed=None, steps_per_s=None)
    return differences(
        moment.snapshot, moment.device, moment.host, again, engine.arrays("device"), engine.arrays("host")
    )


def _command(engine: Engine, done: RecordedCommand) -> tuple[str, ...]:
    _advance(engine, done.step)
    if engine.step != done.step:
        return (f"step: {done.step} and {engine.step}",)
    outcome = msgspec.structs.replace(engine.apply(done.command), seconds=0.0)
    return () if outcome == done.outcome else (f"{done.command}: {done.outcome} and {outcome}",)


def _advance(engine: Engine, step: int) -> None:
    """Take the engine to ``step``, or as far as it gets."""
    began_s = time.monotonic()
    while engine.step < step:
        try:
            taken = engine.advance(step - engine.step)
        except InvariantViolation:
            return  # as in the recorded run, or else its numbers will tell
        if taken == 0 and (engine.late_s is None or time.monotonic() - began_s > _LATE_BOUND_S):
            return
