"""Runs a recorded run again, from its options and commands, and compares it moment for moment."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from allocator.commands import Pause, Resume, SetSpeed, Step, command_name
from allocator.errors import InvariantViolation
from allocator.plans import Outcome
from allocator.work import CANCELLED
from kvtop.engine_setup import build_engine
from kvtop.errors import UserError
from kvtop.model.observation import MAX_VICTIMS
from kvtop.recording.compare import differences, event_differences
from kvtop.recording.frames import RecordedCommand, Stall
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
        follower = _Follower(engine, next_event=None if header.cut else 0)
        moments = commands = 0
        for item in itertools.chain(header.cut.before if header.cut else (), recording.story()):
            what = follower.follow(item)
            if what:
                return Rerun(moments, commands, engine.step, what)
            if isinstance(item, Moment):
                moments += 1
                after_moment(engine.step)
            elif isinstance(item, RecordedCommand):
                commands += 1
        return Rerun(moments, commands, engine.step)
    finally:
        engine.close()


class _Follower:
    """An engine that does what a recording tells, and is compared with it.

    Args:
        engine: A new engine.
        next_event: Number of the first event; ``None`` where a piece of a recording begins, which does not tell it.
    """

    def __init__(self, engine: Engine, next_event: int | None) -> None:
        self._engine = engine
        self._next_event = next_event

    def follow(self, item: Moment | RecordedCommand | Stall) -> tuple[str, ...]:
        """Come to ``item``, and return in what it differs."""
        if isinstance(item, Stall):
            self._advance(item.step)
            self._advance(item.step + 1)
            return ()
        return self._command(item) if isinstance(item, RecordedCommand) else self._moment(item)

    def _moment(self, moment: Moment) -> tuple[str, ...]:
        engine, events = self._engine, moment.snapshot.events
        self._advance(moment.snapshot.step)
        if moment.stalled:
            self._advance(moment.snapshot.step + 1)
        snapshot = engine.snapshot(phase="", speed=None, steps_per_s=None, next_event=self._next_event or 0)
        told = snapshot.events
        if self._next_event is None:
            told = tuple(e for e in told if events and e.number >= events[0].number)
        self._next_event = snapshot.events[-1].number + 1 if snapshot.events else self._next_event or 0
        device = engine.arrays("device")
        assert device is not None
        victims = None if moment.victims is None else engine.next_victims(MAX_VICTIMS)
        again = Moment(0, snapshot, device, engine.arrays("host"), moment.stalled, (), engine.tables(), victims)
        return (*differences(moment, again), *event_differences(events, told))

    def _command(self, done: RecordedCommand) -> tuple[str, ...]:
        engine = self._engine
        self._advance(done.step)
        if engine.step != done.step:
            return (f"step: {done.step} and {engine.step}",)
        if isinstance(done.command, Pause | Resume | Step | SetSpeed):
            return ()  # of the pace, and not of the run
        outcome = msgspec.structs.replace(_again(engine, done), seconds=0.0)
        if outcome == done.outcome:
            return ()
        return (f"{command_name(done.command)}: {_told(done.outcome)} and {_told(outcome)}",)

    def _advance(self, step: int) -> None:
        """Take the engine to ``step``, or as far as it gets."""
        engine, began_s = self._engine, time.monotonic()
        while engine.step < step:
            try:
                taken = engine.advance(step - engine.step)
            except InvariantViolation:
                return  # as in the recorded run, or else its numbers will tell
            if taken == 0 and (engine.late_s is None or time.monotonic() - began_s > _LATE_BOUND_S):
                return


def _again(engine: Engine, done: RecordedCommand) -> Outcome:
    """Do a recorded command; one that was cancelled is cancelled at the same block."""
    if done.outcome.ok or not done.outcome.message.startswith(CANCELLED):
        return engine.apply(done.command)
    work = engine.begin(done.command)
    if not done.outcome.moved_blocks:
        work.cancel()
    while (outcome := work.advance()) is None:
        if work.settled_blocks >= done.outcome.moved_blocks:
            work.cancel()
    return outcome


def _told(outcome: Outcome) -> str:
    return f"{'done' if outcome.ok else 'refused'}, {outcome.message}"
