"""Records: a recording's file as a list of records. Follows heads, checks payloads, trusts an index only if it fits.

Not locked by itself: ``Recording`` holds its lock.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Final

from kvtop.recording.frames import IndexEntry, Note, RecordingHeader, decode
from kvtop.recording.framing import (
    FOOTER,
    FOOTER_MAGIC,
    HEAD_BYTES,
    START_BYTES,
    Head,
    Kind,
    RecordingError,
    check_start,
    unpack_head,
)
from kvtop.recording.notes import Closed, read_notes

_SEGMENTS_KEPT: Final = 8
#: Records before the index.
_OF_THE_RUN: Final = (Kind.KEY, Kind.DELTA, Kind.COMMAND)


class Records:
    """The records of one file.

    Args:
        file: The recording, open for bytes; its owner closes it.

    Attributes:
        header: What was recorded.
        keys: Key frames.
        end: Where the records of the run end. [bytes]
        closed: Its end, where marks can be appended; ``None`` for one that was not closed.
        added: Marks that were appended.
        damage: Why it ends before its time, or what of it is damaged; ``None`` when nothing is known of that.

    Raises:
        RecordingError: It is no recording, of another version, or holds no whole moment.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._segments: OrderedDict[int, tuple[Head, ...]] = OrderedDict()
        self._size = file.seek(0, os.SEEK_END)
        self.closed: Closed | None = None
        self.damage: str | None = None
        check_start(self._read(0, START_BYTES))
        head = self._head(START_BYTES, 0)
        if head is None or head.kind is not Kind.HEADER:
            raise RecordingError("is cut short or damaged before its first moment")
        self.header = decode(self.payload(head), RecordingHeader)
        self._first_key = head.end
        self.keys, self.end = self._load_index() or self._scan()
        self.added: list[Note] = self._load_notes()

    def heads(self) -> Iterator[Head]:
        """Yield every head in order.

        Raises:
            RecordingError: One is lost.
        """
        number = self.keys[0].number
        for index, key in enumerate(self.keys):
            if key.number != number:
                raise RecordingError(f"has lost its record {number}")
            heads = self.entries(index)
            number += len(heads)
            yield from heads

    def _load_index(self) -> tuple[list[IndexEntry], int] | None:
        """Return key frames and the end of the records from the index; ``None`` when there is none to trust."""
        at = self._size - FOOTER.size
        if at < self._first_key:
            return None
        offset, magic = FOOTER.unpack(self._read(at, FOOTER.size))
        if magic != FOOTER_MAGIC or offset >= at:
            return None
        return self._index_at(offset)

    def _index_at(self, offset: int) -> tuple[list[IndexEntry], int] | None:
        """Return key frames and the end of the records from the index there, if it is whole and the end follows it."""
        head = self._head(offset, None)
        if head is None or head.kind is not Kind.INDEX:
            return None
        if self._read(head.end, FOOTER.size) != FOOTER.pack(offset, FOOTER_MAGIC):
            return None
        try:
            keys = decode(self.payload(head), list[IndexEntry])
        except RecordingError:
            return None
        self.closed = Closed(offset, head.end + FOOTER.size, head.number + 1)
        return keys, offset

    def _load_notes(self) -> list[Note]:
        """Return the marks that were appended; damaged ones are left out, and told."""
        if self.closed is None:
            return []
        data = self._read(self.closed.end, self._size - self.closed.end)
        notes, trouble = read_notes(data, self.closed.number, FOOTER.pack(self.closed.index, FOOTER_MAGIC))
        if trouble is not None:
            self.closed, self.damage = None, trouble  # what is appended now would not be found behind the damage
        return notes

    def _scan(self) -> tuple[list[IndexEntry], int]:
        """Follow the heads from the first one; what comes after a damaged or unfinished record is left out."""
        keys: list[IndexEntry] = []
        offset, number = self._first_key, 1
        while True:
            head = self._head(offset, number)
            if head is not None and head.kind is Kind.INDEX and (found := self._index_at(offset)) is not None:
                return found  # closed, and what was appended then is damaged
            if head is None or head.kind not in _OF_THE_RUN or (not keys and head.kind is not Kind.KEY):
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
            self.payload(last)
        except RecordingError:
            return (keys[:-1] if last.kind is Kind.KEY else keys), last.offset
        return keys, end

    def segment_of(self, number: int) -> int:
        """Return which key frame a record follows, or is."""
        return max(0, bisect.bisect_right(self.keys, number, key=lambda key: key.number) - 1)

    def locate(self, number: int) -> Head:
        """Return the head of a record.

        Raises:
            RecordingError: It is not there.
        """
        index = self.segment_of(number)
        heads = self.entries(index)
        at = number - self.keys[index].number
        if not 0 <= at < len(heads):
            raise RecordingError(f"has no record {number}")
        return heads[at]

    def entries(self, index: int) -> tuple[Head, ...]:
        """Return the heads from one key frame to the next; those behind damage are unknown, and left out."""
        kept = self._segments.get(index)
        if kept is not None:
            return kept
        key = self.keys[index]
        end = self.keys[index + 1].offset if index + 1 < len(self.keys) else self.end
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

    def payload(self, head: Head) -> bytes:
        """Return a record's payload.

        Raises:
            RecordingError: It is damaged.
        """
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
