"""RecordedSource and RecordedOperations: a recording as if it were an engine that can also be wound back.

Time goes by the reader's clock: a reading shows the last moment that is due. Nothing runs in between, so a recording
that nobody reads costs nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from allocator.commands import Annotate, Pause, Resume, SetSpeed, Step, command_name
from allocator.config import STEP_S
from allocator.ids import IdArray
from allocator.plans import Outcome, Plan
from kvtop.errors import KvtopError, SourceError
from kvtop.model.lineage import lineage
from kvtop.model.observation import BlockHolders, Focus, Kin, Observation
from kvtop.recording.frames import Note
from kvtop.recording.framing import Mark, RecordingError
from kvtop.recording.notes import check_note
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.tables import holders_of, table_of
from kvtop.serving_commands import AnyCommand

_READ_ONLY: Final = "a recording takes no commands"
_NO_HOST_TIER: Final = "the recorded engine had no host tier"
#: Moments that a reading goes on by at most when played as fast as possible.
_FAST_MOMENTS: Final = 64


class RecordedSource:
    """Plays a recording.

    Args:
        recording: The recording; the source's from here on.
        name: The target's name.
        speed: Virtual seconds a real second; ``None`` is as fast as it can be read.
        paused: Stand still until told otherwise.
        clock: Monotonic seconds.
        now: Seconds since 1970.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        name: str = "recording",
        speed: float | None = 1.0,
        paused: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.recording = recording
        self.missing: Mapping[str, str] = {"operations": _READ_ONLY}
        self._speed = speed
        self._paused = paused
        self._clock, self._now = clock, now
        self._lock = threading.Lock()
        self._number = recording.first
        self._is_closed = False
        self._anchor()

    # ---- reading

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        """Return the moment that is due; its phase and speed are the player's.

        Raises:
            SourceError: The recording is damaged there, or the source is closed.
        """
        with self._lock:
            self._check_open()
            self._play()
            try:
                moment = self.recording.moment(self._number)
            except RecordingError as error:
                raise SourceError(str(error)) from None
            self.missing = {"operations": _READ_ONLY, **({} if moment.host else {"host-tier": _NO_HOST_TIER})}
            events = tuple(event for event in moment.recent if event.number >= focus.next_event)
            if focus.max_events is not None:
                events = events[max(0, len(events) - focus.max_events) :]
            snapshot = msgspec.structs.replace(
                moment.snapshot,
                phase=self._phase(moment.snapshot.phase),
                speed=self._speed,
                events=events,
                notes=(*moment.snapshot.notes, *self._notes()),
            )
            victims = None if moment.victims is None else moment.victims[: focus.num_victims]
            return Observation(
                snapshot,
                moment.device,
                moment.host,
                _table(moment, focus.seq_id),
                _holders(moment, focus.block_id),
                victims if focus.num_victims else None,
                _lineage(moment) if focus.lineage else None,
            )

    @property
    def notes(self) -> tuple[Note, ...]:
        """The marks that were set in it, in order of steps."""
        return self.recording.notes

    def shows(self, note: Note) -> bool:
        """Return whether a mark belongs to the moment shown: whether that is the last one up to its step."""
        with self._lock:
            return self.recording.at(note.step) == self._number or note.step == self.step

    def mark(self, text: str) -> tuple[int, Path]:
        """Set a mark at the moment shown; return its step, and the file that keeps it.

        Raises:
            KvtopError: The text cannot be a mark's, or it cannot be kept.
        """
        with self._lock:
            self._check_open()
            note = Note(self.step, check_note(text), self._now())
            return note.step, self.recording.add_notes([note])

    def close(self) -> None:
        """Close the recording. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self.recording.close()

    # ---- the player

    @property
    def step(self) -> int:
        """Step of the moment shown last."""
        return self.recording.step_of(self._number)

    @property
    def is_paused(self) -> bool:
        """Whether it stands still."""
        return self._paused

    def pause(self) -> None:
        """Stand still at the moment that is due."""
        with self._lock:
            self._check_open()
            self._play()
            self._paused = True

    def resume(self) -> bool:
        """Play on from here; false at the end."""
        with self._lock:
            self._check_open()
            self._paused = False
            self._anchor()
            return self._number < self.recording.last

    def set_speed(self, speed: float | None) -> None:
        """Play at ``speed`` virtual seconds a real second; ``None`` is as fast as possible."""
        with self._lock:
            self._check_open()
            self._play()
            self._speed = speed
            self._anchor()

    def go_to(self, step: int) -> int:
        """Go to the last moment at or before ``step``, and return its step."""
        with self._lock:
            self._check_open()
            return self._put(self.recording.at(max(0, step)))

    def stop_at(self, step: int) -> int:
        """Pause at the last moment at or before ``step``, and return its step."""
        with self._lock:
            self._check_open()
            self._paused = True
            return self._put(self.recording.at(max(0, step)))

    def scrub(self, moments: int) -> int:
        """Pause, go forward (or back) by so many moments as far as there are, and return the step."""
        with self._lock:
            self._check_open()
            self._play()
            self._paused = True
            number = self._number
            for _ in range(abs(moments)):
                beside = self.recording.beside(number, 1 if moments > 0 else -1)
                if beside is None:
                    break
                number = beside
            return self._put(number)

    def scrub_time(self, seconds: float) -> int:
        """Pause, go forward (or back) by so much virtual time, by one moment at least, and return the step."""
        with self._lock:
            self._check_open()
            self._play()
            self._paused = True
            number = self.recording.at(max(0, self.recording.step_of(self._number) + round(seconds / STEP_S)))
            if number == self._number or (number > self._number) != (seconds > 0):
                number = self.recording.beside(self._number, 1 if seconds > 0 else -1) or self._number
            return self._put(number)

    def jump(self, marks: Mark, way: int = 1) -> int | None:
        """Pause at the next (``way`` 1) or previous (-1) moment with one of ``marks``; ``None`` when there is none."""
        with self._lock:
            self._check_open()
            self._play()
            self._paused = True
            number = self.recording.marked(self._number, marks, way)
            return None if number is None else self._put(number)

    def _put(self, number: int) -> int:
        self._number = number
        self._anchor()
        return self.recording.step_of(number)

    def _anchor(self) -> None:
        self._anchor_s, self._anchor_step = self._clock(), self.recording.step_of(self._number)

    def _play(self) -> None:
        """Go on to the moment that is due; never back."""
        if self._paused or self._number >= self.recording.last:
            return
        if self._speed is None:
            for _ in range(_FAST_MOMENTS):
                self._number = self.recording.beside(self._number, 1) or self._number
            return
        due = self._anchor_step + math.floor((self._clock() - self._anchor_s) * self._speed / STEP_S + 1e-6)
        self._number = max(self._number, self.recording.at(due))

    def _phase(self, recorded: str) -> str:
        if recorded.startswith(("failed", "stuck")):
            return recorded
        if self._number >= self.recording.last:
            return "done"
        return "paused" if self._paused else "running"

    def _notes(self) -> tuple[str, ...]:
        return () if self.recording.damage is None else (f"the recording is incomplete: {self.recording.damage}",)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SourceError("the recording was closed")


class RecordedOperations:
    """The door of a recording: it can be played, and takes no other command."""

    def __init__(self, source: RecordedSource) -> None:
        self._source = source

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; see ``Operations``."""
        if isinstance(command, Pause | Resume | Step | SetSpeed):
            return Plan(summary=f"{command_name(command)} the recording")
        if isinstance(command, Annotate):
            return Plan(summary=f"mark step {self._source.step:,}: {command.text}")
        return Plan(summary=command_name(command), refusal=_READ_ONLY)

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Play as ``command`` says; see ``Operations``."""
        match command:
            case Pause():
                self._source.pause()
                return Outcome(ok=True, message="paused")
            case Resume():
                is_on = self._source.resume()
                return Outcome(ok=is_on, message="playing" if is_on else "the recording ends here")
            case Step(moments):
                return Outcome(ok=True, message=f"step {self._source.scrub(moments):,}")
            case SetSpeed(speed):
                self._source.set_speed(speed)
                return Outcome(ok=True, message="speed max" if speed is None else f"speed {speed:g}")
            case Annotate(text):
                try:
                    step, path = self._source.mark(text)
                except KvtopError as error:
                    return Outcome(ok=False, message=str(error))
                where = "" if str(path) == self._source.recording.name else f", kept in {path}"
                return Outcome(ok=True, message=f"marked step {step:,}: {text.strip()}{where}")
        return Outcome(ok=False, message=f"{command_name(command)}: {_READ_ONLY}")


def _table(moment: Moment, seq_id: int | None) -> IdArray | None:
    rows = (row.row for row in moment.snapshot.sequences if row.seq_id == seq_id)
    row = next(rows, None)
    return None if row is None else table_of(moment.tables, row)


def _holders(moment: Moment, block_id: int | None) -> BlockHolders | None:
    if block_id is None or not 0 <= block_id < moment.device.num_blocks:
        return None
    sequences = {row.row: row.seq_id for row in moment.snapshot.sequences}
    pairs, total = holders_of(moment.tables, block_id)
    return BlockHolders(block_id, tuple((sequences[row], at) for row, at in pairs if row in sequences), total)


def _lineage(moment: Moment) -> tuple[Kin, ...]:
    ids = {row.row: row.seq_id for row in moment.snapshot.sequences if row.row is not None}
    return lineage({ids[row]: table for row, table in moment.tables.each() if row in ids})
