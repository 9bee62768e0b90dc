"""Recording: a recording's file, read. Finds moments by key frames and gives nothing that was not checked."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple

from allocator.block_map import FIELDS, BlockArrays
from allocator.commands import Annotate
from allocator.events import Event
from allocator.snapshot import Snapshot
from kvtop.errors import UserError
from kvtop.recording.frames import (
    Frame,
    Note,
    RecordedCommand,
    Stall,
    decode,
    decode_snapshot,
    unpack_delta,
    unpack_key,
)
from kvtop.recording.framing import (
    Head,
    Kind,
    Mark,
    RecordingError,
)
from kvtop.recording.notes import add_notes, read_beside
from kvtop.recording.records import Records
from kvtop.recording.tables import Tables, no_tables

#: Above the number of every record.
_NO_NUMBER: Final = 1 << 32
#: Events told of one moment, at most.
_EVENTS_KEPT: Final = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """One recorded step boundary.

    Attributes:
        number: Its record.
        snapshot: The engine's state; its events are those since the moment before.
        device, host: The block arrays, read-only; ``None`` is no host tier.
        stalled: Whether the engine had just found that nothing can get on.
        recent: Events since the key frame before, this moment's included, oldest first.
        tables: Every device block table.
        victims: Device blocks that would be evicted next, in order; ``None`` where that was not recorded.
    """

    number: int
    snapshot: Snapshot
    device: BlockArrays
    host: BlockArrays | None
    stalled: bool
    recent: tuple[Event, ...]
    tables: Tables = field(default_factory=no_tables)
    victims: tuple[int, ...] | None = None


class _State(NamedTuple):
    """The last frame that was decoded, from which the next one follows."""

    number: int
    frame: Frame
    recent: tuple[Event, ...]


class Recording:
    """A recording, open for reading. Safe from several threads.

    Moments are addressed by the number of their record. Opening reads the index of a recording that was closed, and
    follows the heads of one that was not.

    Args:
        file: The recording, open for bytes; it is the reader's from here on.
        name: What errors call it.
        path: Where it lies, so that marks can be kept beside it; ``None`` keeps none.

    Attributes:
        header: What was recorded.
        first, last: Its first and last moment.

    Raises:
        RecordingError: It is no recording, of another version, or nothing of it can be read.
    """

    def __init__(self, file: IO[bytes], name: str = "recording", path: str | None = None) -> None:
        self._file, self.name, self._path = file, name, path
        self._lock = threading.RLock()
        self._state: _State | None = None
        try:
            self._records = Records(file)
            self.header = self._records.header
            ends = [self.marked(number, None, way) for number, way in ((-1, 1), (_NO_NUMBER, -1))]
            if ends[0] is None or ends[1] is None:
                raise RecordingError("holds no whole moment")
            self.first, self.last = ends[0], ends[1]
        except RecordingError as error:
            file.close()
            raise RecordingError(f"{name} {error}") from None
        beside, trouble = ([], None) if path is None else read_beside(path)
        self._added = [*self._records.added, *beside]
        self._trouble = trouble

    @property
    def damage(self) -> str | None:
        """Why it ends before its time, such as a crash while it was written, or what is damaged; else ``None``."""
        return self._records.damage or self._trouble

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Recording:
        """Open a file.

        Raises:
            RecordingError: It cannot be read, or as the class does.
        """
        try:
            file = Path(path).open("rb")  # noqa: SIM115 - the reader closes it
        except (OSError, ValueError) as error:
            raise RecordingError(f"{os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from None
        return Recording(file, os.fspath(path), os.fspath(path))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._file.close()

    # ---- where

    @property
    def first_step(self) -> int:
        """Step of the first moment."""
        return self.step_of(self.first)

    @property
    def last_step(self) -> int:
        """Step of the last moment."""
        return self.step_of(self.last)

    def at(self, step: int) -> int:
        """Return the last moment at or before ``step``; the first one for an earlier step."""
        with self._lock:
            for index in range(bisect.bisect_right(self._records.keys, step, key=lambda key: key.step) - 1, -1, -1):
                for head in reversed(self._records.entries(index)):
                    if _is_moment(head) and head.step <= step:
                        return head.number
            return self.first

    def step_of(self, number: int) -> int:
        """Return a moment's step."""
        with self._lock:
            return self._records.locate(number).step

    def beside(self, number: int, way: int) -> int | None:
        """Return the moment after (``way`` 1) or before (-1) this one; ``None`` at the end."""
        return self.marked(number, None, way)

    def marked(self, number: int, marks: Mark | None, way: int) -> int | None:
        """Return the next moment after (``way`` 1) or before (-1) this one that has one of ``marks``, or any moment."""
        with self._lock:
            return self._with_added(self._marked(number, marks, way), number, marks, way)

    def _with_added(self, found: int | None, number: int, marks: Mark | None, way: int) -> int | None:
        """Return ``found`` or, where that is nearer, a moment at which somebody set a mark afterwards."""
        if marks is None or not marks & Mark.NOTE:
            return found
        noted = {self.at(note.step) for note in self._added} | ({found} if found is not None else set())
        beyond = [n for n in noted if (n > number if way > 0 else n < number)]
        return min(beyond, key=lambda n: abs(n - number), default=None)

    def _marked(self, number: int, marks: Mark | None, way: int) -> int | None:
        index = self._records.segment_of(number)
        while 0 <= index < len(self._records.keys):
            if marks is None or self._records.keys[index].marks & marks:
                heads = self._records.entries(index)
                for head in heads if way > 0 else reversed(heads):
                    is_beyond = head.number > number if way > 0 else head.number < number
                    if is_beyond and _is_moment(head) and (marks is None or head.marks & marks):
                        return head.number
            index += way
        return None

    def sample(self, first_step: int, last_step: int, at_most: int) -> list[int]:
        """Return moments spread over a part of the run, its first and last among them.

        Where there are enough of them, they are key frames, which need nothing else to be read.
        """
        with self._lock:
            first, last = self.at(first_step), self.at(last_step)
            keys = [key.number for key in self._records.keys if first < key.number < last]
            if len(keys) < at_most // 2:
                indexes = range(self._records.segment_of(first), self._records.segment_of(last) + 1)
                heads = itertools.chain.from_iterable(self._records.entries(index) for index in indexes)
                keys = [head.number for head in heads if _is_moment(head) and first < head.number < last]
            left = max(0, at_most - 2)
            picked = keys if len(keys) <= left else [keys[i * len(keys) // left] for i in range(left)]
            return [first, *picked, *([last] if last > first else [])]

    # ---- marks and commands

    @property
    def notes(self) -> tuple[Note, ...]:
        """Every mark that was set, while the run was recorded or afterwards, in order of steps."""
        live = []
        for number in self._commands(Mark.NOTE):
            try:
                done = self.command(number)
            except RecordingError as error:
                self._trouble = str(error).removeprefix(f"{self.name} ")
                continue
            assert isinstance(done.command, Annotate)
            live.append(Note(done.step, done.command.text))
        return tuple(sorted((*live, *self._added), key=lambda note: note.step))

    @property
    def added(self) -> tuple[Note, ...]:
        """The marks that were set afterwards."""
        return tuple(self._added)

    def add_notes(self, notes: list[Note]) -> Path:
        """Keep marks with the recording, and return the file that holds them; nothing is written over.

        Raises:
            KvtopError: They cannot be kept.
        """
        if self._path is None:
            raise UserError(f"{self.name}: it is no file that marks could be kept with")
        with self._lock:
            kept = add_notes(self._path, self._records.closed, notes)
            self._added += notes
            return kept

    def commands(self, marks: Mark = Mark.COMMAND) -> Iterator[RecordedCommand]:
        """Yield the commands with one of ``marks``, in order. Cost: reads the heads around them.

        Raises:
            RecordingError: One is damaged.
        """
        for number in self._commands(marks):
            yield self.command(number)

    def _commands(self, marks: Mark) -> Iterator[int]:
        for index, key in enumerate(self._records.keys):
            if key.marks & marks:
                with self._lock:
                    heads = self._records.entries(index)
                yield from (head.number for head in heads if head.kind is Kind.COMMAND and head.marks & marks)

    def before(self, number: int) -> tuple[RecordedCommand | Stall, ...]:
        """Return what happened before a moment and must happen again if the run is to come to it.

        Raises:
            RecordingError: Part of it is damaged or lost.
        """
        found: list[RecordedCommand | Stall] = [*(self.header.cut.before if self.header.cut else ())]
        for head in self._heads():
            if head.number >= number:
                break
            if head.kind is Kind.COMMAND:
                found.append(self.command(head.number))
            elif head.marks & Mark.STALL:
                found.append(Stall(head.step))
        return tuple(found)

    # ---- what

    def moment(self, number: int) -> Moment:
        """Return one moment. Cost: at most the key frame before it and the changes since.

        Raises:
            RecordingError: It is damaged, or what it rests on is.
        """
        with self._lock:
            try:
                state = self._decode(number)
                snapshot = decode_snapshot(state.frame)
            except RecordingError as error:
                raise RecordingError(f"{self.name} {error}") from None
        for tier in state.frame.tiers:
            for name, _ in FIELDS:
                getattr(tier.arrays, name).setflags(write=False)
        host = None if state.frame.host is None else state.frame.host.arrays
        frame = state.frame
        victims = tuple(frame.victims.tolist()) if self.header.has_victims else None
        return Moment(number, snapshot, frame.device.arrays, host, frame.stalled, state.recent, frame.tables, victims)

    def frame(self, number: int) -> tuple[Frame, Mark]:
        """Return one moment as it is written, and what of interest is in it.

        Raises:
            RecordingError: It is damaged, or what it rests on is.
        """
        with self._lock:
            try:
                return self._decode(number).frame, self._records.locate(number).marks
            except RecordingError as error:
                raise RecordingError(f"{self.name} {error}") from None

    def story(self) -> Iterator[Moment | RecordedCommand]:
        """Yield every moment and every command, in order.

        Raises:
            RecordingError: One is damaged or lost.
        """
        for _, item in self.stretch(0, _NO_NUMBER):
            yield item

    def stretch(self, first: int, last: int) -> Iterator[tuple[int, Moment | RecordedCommand]]:
        """Yield the moments and commands from one record to another, each with its number, in order.

        Raises:
            RecordingError: One of these, or of those before them, is damaged or lost.
        """
        for head in self._heads():
            if head.number > last:
                break
            if head.number < first:
                continue
            if _is_moment(head):
                yield head.number, self.moment(head.number)
            elif head.kind is Kind.COMMAND:
                yield head.number, self.command(head.number)

    def _heads(self) -> Iterator[Head]:
        try:
            yield from self._records.heads()
        except RecordingError as error:
            raise RecordingError(f"{self.name} {error}") from None

    def command(self, number: int) -> RecordedCommand:
        """Return a command's record.

        Raises:
            RecordingError: It is damaged.
        """
        with self._lock:
            try:
                return decode(self._records.payload(self._records.locate(number)), RecordedCommand)
            except RecordingError as error:
                raise RecordingError(f"{self.name} {error}") from None

    def _decode(self, number: int) -> _State:
        index = self._records.segment_of(number)
        state = self._state
        if state is None or not self._records.keys[index].number <= state.number <= number:
            state = None
        for head in self._records.entries(index):
            if head.number > number:
                break
            if not _is_moment(head) or (state is not None and head.number <= state.number):
                continue
            payload = self._records.payload(head)
            frame = unpack_key(payload) if state is None else unpack_delta(payload, state.frame)
            recent = () if state is None else state.recent
            recent = (*recent, *decode_snapshot(frame).events)[-_EVENTS_KEPT:]
            state = self._state = _State(head.number, frame, recent)
        if state is None or state.number != number:
            raise RecordingError(f"has no moment {number}")
        return state


def _is_moment(head: Head) -> bool:
    return head.kind in (Kind.KEY, Kind.DELTA)
