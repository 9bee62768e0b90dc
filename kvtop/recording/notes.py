"""Notes: marks that somebody sets in a recording after the run. Owns what is appended to a file that was closed.

A mark is one record behind the recording's end, followed by the end again, so that nothing of the recording is written
over. Where that cannot be done, since the file is read-only or was never closed, marks go into a file of their own
beside it, ``FILE.marks``: a start, and one record after another.
"""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from pathlib import Path
from typing import IO, Final

import msgspec

from allocator.commands import MAX_TEXT
from kvtop.errors import KvtopError, UserError
from kvtop.recording.frames import Note, decode
from kvtop.recording.framing import (
    FOOTER,
    FOOTER_MAGIC,
    HEAD_BYTES,
    Kind,
    Mark,
    RecordingError,
    pack_record,
    unpack_head,
)

_BESIDE_START: Final = b"kvtopmrk"
#: Bytes of a file of marks, at most.
_MAX_BESIDE: Final = 64 << 20
_DAMAGED: Final = "a mark set afterwards is damaged or cut short"


class Closed(msgspec.Struct, frozen=True):
    """The end of a recording that was closed.

    Attributes:
        index: Where its index begins. [bytes]
        end: Where what is appended begins. [bytes]
        number: Number of the first record that is appended.
    """

    index: int
    end: int
    number: int


def beside(path: str | os.PathLike[str]) -> Path:
    """Return the file of marks that belongs to a recording."""
    return Path(f"{os.fspath(path)}.marks")


def check_note(text: str) -> str:
    """Return a mark's text as it is kept.

    Raises:
        UserError: It is empty, too long, or holds what is no printable character.
    """
    kept = text.strip()
    if not kept or len(kept) > MAX_TEXT or not kept.isprintable():
        raise UserError(f"a mark's text: 1 to {MAX_TEXT} printable characters")
    return kept


def read_notes(data: bytes, number: int, between: bytes = b"") -> tuple[list[Note], str | None]:
    """Return the marks in records one after another, and what is wrong with the rest; ``None`` when nothing is.

    Args:
        data: The records.
        number: Number of the first.
        between: What follows each.
    """
    notes: list[Note] = []
    trouble, offset = None, 0
    while offset < len(data):
        head = unpack_head(data[offset : offset + HEAD_BYTES], offset)
        if head is None or head.kind is not Kind.NOTE or head.number != number:
            return notes, _DAMAGED
        payload, rest = data[offset + HEAD_BYTES : head.end], data[head.end : head.end + len(between)]
        try:
            if len(payload) != head.length or zlib.crc32(payload) != head.crc or rest != between:
                raise RecordingError(_DAMAGED)
            notes.append(decode(payload, Note))
        except RecordingError:
            trouble = _DAMAGED
        offset, number = head.end + len(between), number + 1
    return notes, trouble


def read_beside(path: str | os.PathLike[str]) -> tuple[list[Note], str | None]:
    """Return the marks in the file beside a recording, and what is wrong with it; no file is no marks."""
    try:
        with beside(path).open("rb") as file:
            data = file.read(_MAX_BESIDE)
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError) as error:
        return [], f"{beside(path)}: {getattr(error, 'strerror', None) or error}"
    if not data.startswith(_BESIDE_START):
        return [], f"{beside(path)} holds no marks"
    return read_notes(data[len(_BESIDE_START) :], 0)


def add_notes(path: str, closed: Closed | None, notes: list[Note]) -> Path:
    """Keep marks with a recording, and return the file that holds them.

    Args:
        path: The recording.
        closed: Its end as it was read; ``None`` for one that was not closed, or whose appended marks are damaged.
        notes: The marks.

    Raises:
        KvtopError: They can be kept neither in the recording nor beside it.
    """
    if closed is not None:
        try:
            _append(path, closed, notes)
            return Path(path)
        except (PermissionError, RecordingError):
            pass  # beside it, then
        except OSError as error:
            if error.errno != errno.EROFS:
                raise KvtopError(f"{path}: the mark was not kept: {error.strerror}") from None
    try:
        _append_beside(beside(path), notes)
    except OSError as error:
        raise KvtopError(f"{beside(path)}: the mark was not kept: {error.strerror}") from None
    return beside(path)


def _append(path: str, closed: Closed, notes: list[Note]) -> None:
    end = FOOTER.pack(closed.index, FOOTER_MAGIC)
    with open(path, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two at once would give two marks one number
        file.seek(closed.end)
        kept, trouble = read_notes(file.read(), closed.number, end)
        if trouble is not None:
            raise RecordingError(trouble)
        size = file.seek(0, os.SEEK_END)
        _write_whole(file, _packed(notes, closed.number + len(kept), end), size)


def _append_beside(path: Path, notes: list[Note]) -> None:
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        data = file.read()
        if not data:
            _write_whole(file, _BESIDE_START + _packed(notes, 0, b""), 0)
            return
        if not data.startswith(_BESIDE_START):
            raise OSError(errno.EINVAL, "it holds no marks")
        kept, trouble = read_notes(data[len(_BESIDE_START) :], 0)
        if trouble is not None:
            raise OSError(errno.EINVAL, trouble)
        _write_whole(file, _packed(notes, len(kept), b""), len(data))


def _packed(notes: list[Note], number: int, between: bytes) -> bytes:
    return b"".join(
        pack_record(Kind.NOTE, Mark.NOTE, number + i, note.step, msgspec.msgpack.encode(note)) + between
        for i, note in enumerate(notes)
    )


def _write_whole(file: IO[bytes], data: bytes, size: int) -> None:
    """Append all of ``data`` to a file of ``size`` bytes, or nothing."""
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(size)
        raise
