"""RecordingWriter: appends moments and commands to a recording. RecordedEngine: an engine that writes one as it goes.

All of it happens on the thread that owns the engine. A record is handed to the system whole, in one write, so that a
process that is killed loses at most the record it was writing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator
from typing import IO, TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np

from allocator.commands import Annotate, Command, command_name
from allocator.config import STEP_S
from allocator.ids import Tier as TierName
from allocator.plans import Outcome
from allocator.snapshot import Snapshot
from allocator.work import Work
from kvtop.engine_setup import EngineOptions
from kvtop.errors import KvtopError, UserError
from kvtop.model.observation import MAX_VICTIMS
from kvtop.recording.frames import Frame, IndexEntry, RecordedCommand, RecordingHeader, Tier, pack_delta, pack_key
from kvtop.recording.framing import FOOTER, FOOTER_MAGIC, Kind, Mark, marks_of, pack_record, start_bytes

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Moments from one key frame to the next.
KEY_EVERY: Final = 256
#: Steps between two moments of a run at full speed, when not asked for: one virtual second.
DEFAULT_EVERY: Final = round(1 / STEP_S)
#: Blocks of both tiers above which the default interval grows with them, so that a step's cost does not.
_USUAL_BLOCKS: Final = 16_384
MAX_EVERY: Final = 1 << 40
#: Blocks of both tiers above which moments do not tell the next victims.
_MAX_FOR_VICTIMS: Final = 65_536


class RecordOrder(msgspec.Struct, frozen=True):
    """What to record.

    Attributes:
        path: A file that is not there yet.
        every: Steps between two moments; ``None`` takes ``default_every``.
        kvtop_version: The program that asks.
    """

    path: str
    every: int | None = None
    kvtop_version: str = ""


class RecordingWriter:
    """Appends to one recording.

    Args:
        file: Where to write, unbuffered and open for bytes; the writer's from here on.
        header: What is recorded.
        key_every: Moments from one key frame to the next.

    Attributes:
        header: What is recorded.
        written_bytes: Bytes written so far.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, file: IO[bytes], header: RecordingHeader, *, key_every: int = KEY_EVERY) -> None:
        self._file, self.header = file, header
        self._key_every = key_every
        self._number = 0
        self._before: Frame | None = None
        self._left = 0
        self._index: list[IndexEntry] = []
        self.written_bytes = 0
        self._write(start_bytes())
        self._append(Kind.HEADER, Mark.NONE, 0, msgspec.msgpack.encode(header))

    def add_moment(self, step: int, frame: Frame, marks: Mark) -> None:
        """Append a moment. ``frame`` is compared with the next one, so its arrays must stay as they are until then."""
        before = self._before
        if before is None or self._left == 0 or before.sizes != frame.sizes:
            self._index.append(IndexEntry(self._number, self.written_bytes, step, marks))
            self._append(Kind.KEY, marks, step, pack_key(frame))
            self._left = self._key_every
        else:
            self._note_in_index(marks)
            self._append(Kind.DELTA, marks, step, pack_delta(frame, before))
        self._left -= 1
        self._before = frame

    def add_command(self, done: RecordedCommand) -> None:
        """Append an applied command; the first record must be a moment."""
        marks = marks_of_command(done)
        self._note_in_index(marks)
        self._append(Kind.COMMAND, marks, done.step, msgspec.msgpack.encode(done))

    def close(self) -> None:
        """Write the index and close the file. Safe to call twice."""
        if self._file.closed:
            return
        try:
            offset = self.written_bytes
            self._append(Kind.INDEX, Mark.NONE, 0, msgspec.msgpack.encode(self._index))
            self._write(FOOTER.pack(offset, FOOTER_MAGIC))
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _note_in_index(self, marks: Mark) -> None:
        last = self._index[-1]
        self._index[-1] = msgspec.structs.replace(last, marks=last.marks | marks)

    def _append(self, kind: Kind, marks: Mark, step: int, payload: bytes) -> None:
        self._write(pack_record(kind, marks, self._number, step, payload))
        self._number += 1

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self.written_bytes += len(data)


class RecordedEngine:
    """An engine that writes a recording as it goes; everything else of the engine is reached through it as it is.

    A recording that cannot be written ends; the engine goes on, and ``failure`` and a note of its snapshots say why.

    Args:
        engine: The engine; nobody else may take its steps from here on.
        writer: The recording, ended by ``close``.
        every: Steps between two moments.

    Attributes:
        failure: Why the recording ended early; ``None`` while it goes on.
        written_bytes: Size of the recording so far.
    """

    def __init__(self, engine: Engine, writer: RecordingWriter, every: int) -> None:
        self._engine = engine
        self._writer: RecordingWriter | None = writer
        self._every = every
        self._encoder = msgspec.msgpack.Encoder()
        self._buffers: list[tuple[Tier, Tier | None]] = []
        self._next_event = 0
        self._stalled_at: int | None = None
        self._taken_at: int | None = None
        self._has_victims = writer.header.has_victims
        #: Of commands since the last moment.
        self._marks = Mark.NONE
        self.failure: str | None = None
        self.written_bytes = 0
        self._take()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def advance(self, max_steps: int) -> int:
        """Take steps as ``Engine.advance`` does, with a moment at every multiple of ``every`` and at the end."""
        engine, taken = self._engine, 0
        try:
            while taken < max_steps:
                budget = min(max_steps - taken, self._every - engine.step % self._every)
                got = engine.advance(budget)
                taken += got
                if got == budget:
                    if engine.step % self._every == 0:
                        self._take()
                    continue
                if engine.late_s is None and self._stalled_at != engine.step:
                    self._stalled_at = engine.step
                    self._take(stalled=True)
                break
        except Exception:
            self._take()
            raise
        return taken

    def apply(self, command: Command) -> Outcome:
        """Do ``command`` as ``Engine.apply`` does, with a moment after it."""
        return self.begin(command).finish()

    def begin(self, command: Command) -> Work:
        """Return ``command`` as ``Engine.begin`` does, noted with a moment once it is done."""
        return Work(command_name(command), lambda work: self._noted(command, work))

    def _noted(self, command: Command, work: Work) -> Generator[None, None, Outcome]:
        step, inner = self._engine.step, self._engine.begin(command)
        while True:
            inner.is_cancelled = work.is_cancelled
            outcome = inner.advance()
            work.done_blocks, work.total_blocks = inner.done_blocks, inner.total_blocks
            if outcome is not None:
                break
            yield
        self._stalled_at = None
        done = RecordedCommand(step, command, msgspec.structs.replace(outcome, seconds=0.0))
        self._note_command(done)
        return outcome

    def note_pace(self, command: Command, outcome: Outcome) -> None:
        """Keep a command that concerns the pace only, which the engine itself knows nothing of."""
        self._note_command(RecordedCommand(self._engine.step, command, msgspec.structs.replace(outcome, seconds=0.0)))

    def snapshot(
        self,
        *,
        phase: str,
        speed: float | None,
        steps_per_s: float | None,
        next_event: int = 0,
        max_events: int | None = None,
    ) -> Snapshot:
        """Return the engine's snapshot, with a note if the recording has ended early."""
        seen = self._engine.snapshot(
            phase=phase, speed=speed, steps_per_s=steps_per_s, next_event=next_event, max_events=max_events
        )
        return seen if self.failure is None else msgspec.structs.replace(seen, notes=(*seen.notes, self.failure))

    def end_recording(self) -> None:
        """End the recording with a last moment; the engine may go on. Safe to call twice."""
        if self._writer is not None and self._taken_at != self._engine.step:
            self._take()
        self._guarded(lambda writer: writer.close())
        self._writer = None

    def close(self) -> None:
        """End the recording, and close the engine. Safe to call twice."""
        try:
            self.end_recording()
        finally:
            self._engine.close()

    def _note_command(self, done: RecordedCommand) -> None:
        self._guarded(lambda writer: writer.add_command(done))
        self._marks |= marks_of_command(done)
        self._take()

    def _take(self, stalled: bool = False) -> None:
        self._guarded(lambda writer: self._write_moment(writer, stalled))

    def _write_moment(self, writer: RecordingWriter, stalled: bool) -> None:
        engine = self._engine
        phase = "done" if engine.done else f"stuck: {engine.stuck_reason}" if engine.stuck_reason else "running"
        snapshot = engine.snapshot(phase=phase, speed=None, steps_per_s=None, next_event=self._next_event)
        if snapshot.events:
            self._next_event = snapshot.events[-1].number + 1
        device, host = self._fill()
        victims = engine.next_victims(MAX_VICTIMS) if self._has_victims else ()
        frame = Frame(
            self._encoder.encode(snapshot), device, host, stalled, engine.tables(), np.array(victims, np.int64)
        )
        writer.add_moment(
            engine.step, frame, self._marks | marks_of(snapshot.events) | (Mark.STALL if stalled else Mark.NONE)
        )
        self._taken_at, self._marks = engine.step, Mark.NONE

    def _fill(self) -> tuple[Tier, Tier | None]:
        """Write the arrays into the buffer that was not used last, and return it."""
        engine = self._engine
        num_device, num_host = engine.pool_size("device") or 0, engine.pool_size("host")
        for device, host in self._buffers[:1]:
            fits = device.arrays.num_blocks == num_device
            if not fits or (host is not None and host.arrays.num_blocks != num_host):
                self._buffers.clear()
        if len(self._buffers) < 2:
            self._buffers.append((Tier.empty(num_device), None if num_host is None else Tier.empty(num_host)))
        else:
            self._buffers.reverse()
        tiers = self._buffers[-1]
        names: tuple[TierName, TierName] = ("device", "host")
        for name, tier in zip(names, tiers, strict=True):
            if tier is not None:
                engine.arrays(name, tier.arrays)
        return tiers

    def _guarded(self, work: Callable[[RecordingWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            work(self._writer)
            self.written_bytes = self._writer.written_bytes
        except OSError as error:
            self.failure = f"the recording ended at step {self._engine.step}: {error.strerror or error}"
            self._writer.abandon()
            self._writer = None


def default_every(options: EngineOptions, *, every_step: bool) -> int:
    """Return the steps between two moments when none were asked for.

    Args:
        options: The engine.
        every_step: Whether the run is paced, so that a moment a step costs little; else ``DEFAULT_EVERY``.
    """
    blocks = _num_blocks(options)
    return (1 if every_step else DEFAULT_EVERY) * max(1, -(-blocks // _USUAL_BLOCKS))


def tells_victims(options: EngineOptions, every: int) -> bool:
    """Return whether moments tell the next victims: to work them out takes as long as half of all else in a moment."""
    return _num_blocks(options) <= _MAX_FOR_VICTIMS and (options.speed is not None or every >= DEFAULT_EVERY // 2)


def _num_blocks(options: EngineOptions) -> int:
    """Return the blocks of both tiers."""
    blocks = options.num_blocks
    return blocks + (round(blocks * options.swap_ratio) if options.num_swap_blocks is None else options.num_swap_blocks)


def marks_of_command(done: RecordedCommand) -> Mark:
    """Return what of interest a command is."""
    return Mark.COMMAND | (Mark.NOTE if isinstance(done.command, Annotate) and done.outcome.ok else Mark.NONE)


def check_order(order: RecordOrder) -> None:
    """Raise unless the file can be new, before an engine is built for it.

    Raises:
        UserError: It is there already, or its folder is not.
    """
    if os.path.lexists(order.path):
        raise UserError(f"--record {order.path}: exists already; choose another name")
    folder = os.path.dirname(order.path)
    if folder and not os.path.isdir(folder):
        raise UserError(f"--record {order.path}: there is no folder {folder}")


def record_engine(engine: Engine, options: EngineOptions, order: RecordOrder, *, attached: bool = False) -> Engine:
    """Return ``engine`` as one that writes a recording until it is closed.

    Args:
        engine: A new engine; nobody else may use it from here on.
        options: What it was built from.
        order: Where to, and how often.
        attached: Whether other programs may use its blocks.

    Raises:
        UserError: The file is there already, or cannot be made.
        KvtopError: The trace that drives the engine cannot be read again.
    """
    check_order(order)
    path, every = order.path, order.every
    if every is None:
        every = default_every(options, every_step=options.speed is not None)
    try:
        file = open(path, "xb", buffering=0)  # noqa: SIM115 - the writer closes it
    except (OSError, ValueError) as error:
        raise UserError(f"--record {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        has_victims = tells_victims(options, every)
        header = RecordingHeader(order.kvtop_version, options, every, load_crc(options), attached, has_victims)
        recorded = RecordedEngine(engine, RecordingWriter(file, header), every)
    except OSError as error:
        file.close()
        raise KvtopError(f"--record {path}: {error.strerror or error}") from None
    return cast("Engine", recorded)


def load_crc(options: EngineOptions) -> int | None:
    """Return the CRC-32 of the file that the requests come from; ``None`` without one."""
    path = options.trace or options.workload_file
    if path is None:
        return None
    crc = 0
    with open(os.fspath(path), "rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
