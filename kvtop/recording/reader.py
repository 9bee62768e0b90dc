"""Recording: a recording's file, read. Finds moments by key frames and gives nothing that was not checked."""

from __future__ import annotations

import bisect
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NamedTuple

from allocator.block_map import FIELDS, BlockArrays
from allocator.events import Event
from allocator.snapshot import Snapshot
from kvtop.recording.frames import (
    Frame,
    IndexEntry,
    RecordedCommand,
    RecordingHeader,
    decode,
    decode_snapshot,
    unpack_delta,
    unpack_key,
)
from kvtop.recording.framing import (
    FOOTER,
    FOOTER_MAGIC,
    HEAD_BYTES,
    START_BYTES,
    Head,
    Kind,
    Mark,
    RecordingError,
    check_start,
    unpack_head,
)

_SEGMENTS_KEPT: Final = 8
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
    """

    number: int
    snapshot: Snapshot
    device: BlockArrays
    host: BlockArrays | None
    stalled: bool
    recent: tuple[Event, ...]


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

    Attributes:
        header: What was recorded.
        damage: Why it ends before its time, such as a crash while it was written; ``None`` for one that was closed.

    Raises:
        RecordingError: It is no recording, of another version, or nothing of it can be read.
    """

    def __init__(self, file: IO[bytes], name: str = "recording") -> None:
        self._file, self.name = file, name
        self._lock = threading.RLock()
        self._segments: OrderedDict[int, tuple[Head, ...]] = OrderedDict()
        self._state: _State | None = None
        self.damage: str | None = None
        self._size = file.seek(0, os.SEEK_END)
        try:
            check_start(self._read(0, START_BYTES))
            head = self._head(START_BYTES, 0)
            if head is None or head.kind is not Kind.HEADER:
                raise RecordingError("is cut short or damaged before its first moment")
            self.header = decode(self._payload(head), RecordingHeader)
            self._first_key = head.end
            self._keys, self._end = self._load_index() or self._scan()
            ends = [self.marked(number, None, way) for number, way in ((-1, 1), (_NO_NUMBER, -1))]
            if ends[0] is None or ends[1] is None:
                raise RecordingError("holds no whole moment")
            self.first, self.last = ends[0], ends[1]
        except RecordingError as error:
            file.close()
            raise RecordingError(f"{name} {error}") from None

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
        return Recording(file, os.fspath(path))

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
            for index in range(bisect.bisect_right(self._keys, step, key=lambda key: key.step) - 1, -1, -1):
                for head in reversed(self._entries(index)):
                    if _is_moment(head) and head.step <= step:
                        return head.number
            return self.first

    def step_of(self, number: int) -> int:
        """Return a moment's step."""
        with self._lock:
            return self._locate(number).step

    def beside(self, number: int, way: int) -> int | None:
        """Return the moment after (``way`` 1) or before (-1) this one; ``None`` at the end."""
        return self.marked(number, None, way)

    def marked(self, number: int, marks: Mark | None, way: int) -> int | None:
        """Return the next moment after (``way`` 1) or before (-1) this one that has one of ``marks``, or any moment."""
        with self._lock:
            index = self._segment_of(number)
            while 0 <= index < len(self._keys):
                if marks is None or self._keys[index].marks & marks:
                    heads = self._entries(index)
                    for head in heads if way > 0 else reversed(heads):
                        is_beyond = head.number > number if way > 0 else head.number < number
                        if is_beyond and _is_moment(head) and (marks is None or head.marks & marks):
                            return head.number
                index += way
            return None

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
        return Moment(number, snapshot, state.frame.device.arrays, host, state.frame.stalled, state.recent)

    def story(self) -> Iterator[Moment | RecordedCommand]:
        """Yield every moment and every command, in order.

        Raises:
            RecordingError: One is damaged or lost.
        """
        number = self._keys[0].number
        for index in range(len(self._keys)):
            with self._lock:
                heads = self._entries(index)
            if self._keys[index].number != number:
                raise RecordingError(f"{self.name} has lost its record {number}")
            number += len(heads)
            for head in heads:
                if _is_moment(head):
                    yield self.moment(head.number)
                elif head.kind is Kind.COMMAND:
                    yield self.command(head.number)

    def command(self, number: int) -> RecordedCommand:
        """Return a command's record.

        Raises:
            RecordingError: It is damaged.
        """
        with self._lock:
            try:
                return decode(self._payload(self._locate(number)), RecordedCommand)
            except RecordingError as error:
                raise RecordingError(f"{self.name} {error}") from None

    def _decode(self, number: int) -> _State:
        index = self._segment_of(number)
        state = self._state
        if state is None or not self._keys[index].number <= state.number <= number:
            state = None
        for head in self._entries(index):
            if head.number > number:
                break
            if not _is_moment(head) or (state is not None and head.number <= state.number):
                continue
            payload = self._payload(head)
            frame = unpack_key(payload) if state is None else unpack_delta(payload, state.frame)
            recent = () if state is None else state.recent
            recent = (*recent, *decode_snapshot(frame).events)[-_EVENTS_KEPT:]
            state = self._state = _State(head.number, frame, recent)
        if state is None or state.number != number:
            raise RecordingError(f"has no moment {number}")
        return state

    # ---- records

    def _load_index(self) -> tuple[list[IndexEntry], int] | None:
        """Return key frames and the end of the records from the index; ``None`` when there is none to trust."""
        at = self._size - FOOTER.size
        if at < self._first_key:
            return None
        offset, magic = FOOTER.unpack(self._read(at, FOOTER.size))
        if magic != FOOTER_MAGIC or offset >= at:
            return None
        head = self._head(offset, None)
        if head is None or head.kind is not Kind.INDEX or head.end != at:
            return None
        try:
            return decode(self._payload(head), list[IndexEntry]), offset
        except RecordingError:
            return None

    def _scan(self) -> tuple[list[IndexEntry], int]:
        """Follow the heads from the first one; what comes after a damaged or unfinished record is left out."""
        keys: list[IndexEntry] = []
        offset, number = self._first_key, 1
        while True:
            head = self._head(offset, number)
            if head is None or head.kind in (Kind.HEADER, Kind.INDEX) or (not keys and head.kind is not Kind.KEY):
                break
            if head.kind is Kind.KEY:
                keys.append(IndexEntry(number, offset, head.step, head.marks))
            else:
                last = keys[-1]
                keys[-1] = IndexEntry(last.number, last.offset, last.step, last.marks | head.marks)
            offset, number = head.end, number + 1
        if keys:
            # A system that went down may have kept a record's place and not its bytes.
            keys, offset = self._without_empty_end(keys, offset)
        left = self._size - offset
        self.damage = (
            f"it was not closed; {left} bytes behind its last whole record are left out"
            if left
            else ("it was not closed")
        )
        return keys, offset

    def _without_empty_end(self, keys: list[IndexEntry], end: int) -> tuple[list[IndexEntry], int]:
        """Return key frames and end without the last record if its payload did not arrive."""
        last, offset = None, keys[-1].offset
        while offset < end:
            last = self._head(offset, None)
            assert last is not None
            offset = last.end
        assert last is not None
        try:
            self._payload(last)
        except RecordingError:
            return (keys[:-1] if last.kind is Kind.KEY else keys), last.offset
        return keys, end

    def _segment_of(self, number: int) -> int:
        return max(0, bisect.bisect_right(self._keys, number, key=lambda key: key.number) - 1)

    def _locate(self, number: int) -> Head:
        index = self._segment_of(number)
        heads = self._entries(index)
        at = number - self._keys[index].number
        if not 0 <= at < len(heads):
            raise RecordingError(f"has no record {number}")
        return heads[at]

    def _entries(self, index: int) -> tuple[Head, ...]:
        """Return the heads from one key frame to the next; those behind damage are unknown, and left out."""
        kept = self._segments.get(index)
        if kept is not None:
            return kept
        key = self._keys[index]
        end = self._keys[index + 1].offset if index + 1 < len(self._keys) else self._end
        heads: list[Head] = []
        offset, number = key.offset, key.number
        while offset < end:
            head = self._head(offset, number)
            if head is None or head.end > end or (head.kind is Kind.KEY) != (not heads):
                break
            heads.append(head)
            offset, number = head.end, number + 1
        if offset != end:
            self.damage = f"it is damaged at byte {offset}"
        self._segments[index] = tuple(heads)
        while len(self._segments) > _SEGMENTS_KEPT:
            self._segments.popitem(last=False)
        return self._segments[index]

    def _head(self, offset: int, number: int | None) -> Head | None:
        """Return the head at ``offset`` if it is whole, followed by its payload, and has this number."""
        head = unpack_head(self._read(offset, HEAD_BYTES), offset)
        if head is None or head.end > self._size or number not in (None, head.number):
            return None
        return head

    def _payload(self, head: Head) -> bytes:
        payload = self._read(head.offset + HEAD_BYTES, head.length)
        if len(payload) != head.length or zlib.crc32(payload) != head.crc:
            raise RecordingError(f"is damaged in record {head.number}, at byte {head.offset} (step {head.step})")
        return payload

    def _read(self, offset: int, length: int) -> bytes:
        try:
            self._file.seek(offset)
            return self._file.read(length)
        except (OSError, ValueError) as error:
            raise RecordingError(f"cannot be read: {error}") from None


def _is_moment(head: Head) -> bool:
    return head.kind in (Kind.KEY, Kind.DELTA)
