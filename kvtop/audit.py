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
from kvtop.serving_commands import AnyCommand

#: Bytes after which a file is set aside as ``….1`` and a new one begun.
MAX_BYTES: Final = 8 << 20


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
    """

    time: str
    engine: str
    pid: int | None
    uid: int | None
    command: AnyCommand
    plan: Plan | None
    outcome: Outcome | None
    error: str | None = None


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
        line = msgspec.json.encode(AuditEntry(when, engine, *who, command, plan, outcome, error)) + b"\n"
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
