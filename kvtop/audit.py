"""AuditLog: a lasting line for every command that an engine was asked to do. Owns its file."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from allocator.plans import Outcome, Plan
from kvtop.processes import program_of
from kvtop.serving_commands import AnyCommand

#: Bytes after which a file is set aside as ``….1`` and a new one begun.
MAX_BYTES: Final = 8 << 20
#: What a reader begins with, and takes at once, of a file; and the entries that it keeps.
TAIL_BYTES: Final = 1 << 20
MAX_KEPT: Final = 1000


class AuditEntry(msgspec.Struct, frozen=True):
    """One command.

    Attributes:
        time: When it was done, UTC.
        engine: The engine's name.
        pid, uid: Who asked; ``None`` where the system does not say.
        command: The command.
        plan: What it would do, as planned just before; ``None`` when it could not be planned.
        outcome: What it did; ``None`` when that is not known.
        error: Why it is not known.
        program: The program that asked, as the system named it then.
    """

    time: str
    engine: str
    pid: int | None
    uid: int | None
    command: AnyCommand
    plan: Plan | None
    outcome: Outcome | None
    error: str | None = None
    program: str | None = None


def audit_path() -> Path:
    """Return the file of this user's audit log, which need not exist yet."""
    import platformdirs

    return Path(platformdirs.user_state_dir("kvtop", appauthor=False)) / "audit.jsonl"


class AuditLog:
    """Appends to this user's audit log. Any thread may use it; several processes may share the file.

    Args:
        path: The file.
        complain: Told when a line cannot be written; the command is done all the same.
        now: Seconds since 1970.
    """

    def __init__(
        self, path: Path, complain: Callable[[str], None] = lambda text: None, now: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._complain = complain
        self._now = now
        self._lock = threading.Lock()

    def write(
        self,
        engine: str,
        who: tuple[int | None, int | None],
        command: AnyCommand,
        plan: Plan | None,
        outcome: Outcome | None,
        error: str | None = None,
    ) -> None:
        """Append one line; ``who`` is process and user. See ``AuditEntry``."""
        when = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        program = None if who[0] is None else program_of(who[0])
        line = msgspec.json.encode(AuditEntry(when, engine, *who, command, plan, outcome, error, program)) + b"\n"
        with self._lock:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    if self._path.stat().st_size + len(line) > MAX_BYTES:
                        self._path.replace(self._path.with_name(self._path.name + ".1"))
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self._path, flags, 0o600)
                try:
                    os.write(fd, line)
                finally:
                    os.close(fd)
            except OSError as problem:
                self._complain(f"the audit log {self._path} cannot be written: {problem.strerror}")


class AuditTail:
    """Follows this user's audit log: its last lines, and those written since. Used by one thread at a time.

    Args:
        path: The file, which need not exist yet.

    Attributes:
        entries: The latest lines, oldest first, at most ``MAX_KEPT``.
        num_bad: Lines that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._is_cut = False
        self._rest = b""
        self._decoder = msgspec.json.Decoder(AuditEntry)
        self.entries: tuple[AuditEntry, ...] = ()
        self.num_bad = 0

    def read(self) -> None:
        """Take in what was written since; a log that is not there, or may not be read, has no lines."""
        try:
            now = self._path.stat()
            if now.st_ino != self._inode:
                before = self._path.with_name(self._path.name + ".1")
                if self._inode is not None and before.exists() and before.stat().st_ino == self._inode:
                    self._take(before)  # what was still written to the file that was set aside
                self._offset = max(0, now.st_size - TAIL_BYTES) if self._inode is None else 0
                # What stands where one begins in the middle is the end of a line.
                self._inode, self._rest = now.st_ino, b""
                self._is_cut = self._offset > 0
            if now.st_size > self._offset:
                self._take(self._path)
        except OSError:
            pass

    def _take(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(TAIL_BYTES)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._is_cut and lines:
            del lines[0]
            self._is_cut = False
        if len(self._rest) > TAIL_BYTES:  # no line of ours
            self._rest, self.num_bad = b"", self.num_bad + 1
        found = []
        for line in lines:
            try:
                found.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.num_bad += bool(line)
        self.entries = (*self.entries, *found)[-MAX_KEPT:]
