"""Records: how a recording's file is cut up, and how each piece is checked. Owns no file.

A recording is ``MAGIC``, the format's version, and records one after another. A record is a head of fixed size and a
payload. The head has a checksum of its own, so that lengths can be followed without reading payloads; the payload's
checksum lies in the head. Records are numbered without a gap, so one that is lost is noticed too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from allocator.events import Event
from kvtop.errors import UserError

MAGIC: Final = b"kvtoprec"
FORMAT_VERSION: Final = 2
_START: Final = struct.Struct("<8sI")
START_BYTES: Final = _START.size
_HEAD: Final = struct.Struct("<BBIQII")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
#: The end of a recording that was closed: where its index begins, and a word to know it by.
FOOTER: Final = struct.Struct("<Q8s")
FOOTER_MAGIC: Final = b"kvtopend"


class RecordingError(UserError):
    """A recording cannot be read: not one, of another version, or damaged where it was asked for."""


class Kind(IntEnum):
    """What a record holds."""

    HEADER = 1
    KEY = 2
    DELTA = 3
    COMMAND = 4
    INDEX = 5
    NOTE = 6


class Mark(IntFlag):
    """What of interest happened up to a moment since the one before it."""

    NONE = 0
    PREEMPTION = 1
    EVICTION = 2
    FAULT = 4
    COMMAND = 8
    NOTE = 16
    STALL = 32


_MARK_OF_EVENT: Final = {
    "preempt": Mark.PREEMPTION,
    "evict": Mark.EVICTION,
    "fault": Mark.FAULT,
    "command": Mark.COMMAND,
}


class Head(NamedTuple):
    """One record's head, and where it lies.

    Attributes:
        kind: What the record holds.
        marks: What of interest is in it.
        number: Counts up by one from 0.
        step: Engine step of the record.
        length: Bytes of the payload.
        crc: CRC-32 of the payload.
        offset: Where the record begins. [bytes]
    """

    kind: Kind
    marks: Mark
    number: int
    step: int
    length: int
    crc: int
    offset: int

    @property
    def end(self) -> int:
        """Where the next record begins. [bytes]"""
        return self.offset + HEAD_BYTES + self.length


def start_bytes() -> bytes:
    """Return the first bytes of every recording."""
    return _START.pack(MAGIC, FORMAT_VERSION)


def check_start(data: bytes) -> None:
    """Raise unless ``data`` begins a recording that this program can read.

    Raises:
        RecordingError: It is no recording, or one of another version.
    """
    if len(data) < START_BYTES or not data.startswith(MAGIC):
        raise RecordingError("is not a recording of kvtop")
    version = _START.unpack_from(data)[1]
    if version != FORMAT_VERSION:
        raise RecordingError(f"has recording format {version}; this kvtop reads format {FORMAT_VERSION}")


def pack_record(kind: Kind, marks: Mark, number: int, step: int, payload: bytes) -> bytes:
    """Return one whole record."""
    head = _HEAD.pack(kind, marks, number, step, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def unpack_head(data: bytes, offset: int) -> Head | None:
    """Return the head that ``data`` holds; ``None`` when it is cut short or damaged."""
    if len(data) < HEAD_BYTES or zlib.crc32(data[: _HEAD.size]) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    kind, marks, number, step, length, crc = _HEAD.unpack_from(data)
    try:
        return Head(Kind(kind), Mark(marks), number, step, length, crc, offset)
    except ValueError:
        return None


def marks_of(events: Iterable[Event]) -> Mark:
    """Return what of interest is among ``events``."""
    marks = Mark.NONE
    for event in events:
        marks |= _MARK_OF_EVENT.get(event.kind, Mark.NONE)
    return marks
