"""KvcachedSource and KvcachedOperations: a pool of kvcached on this machine, through its file in shared memory.

The file is three numbers of the machine's own kind: the limit, what is used, what is taken but not used. [bytes]
Whoever writes the first one changes the limit; the engine looks every 100 ms and follows with its next allocation.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from allocator.commands import command_name
from allocator.plans import Effect, Outcome, Plan
from kvtop.audit import AuditLog
from kvtop.errors import SourceError, UserError
from kvtop.model.format import size
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import EngineRow, RemoteFacts
from kvtop.operations import NOT_OFFERED
from kvtop.serving_commands import AnyCommand, SetMemoryLimit
from kvtop.sources.remote.capabilities import READ_ONLY, capabilities_of

KIND: Final = "kvcached"
SHM: Final = Path("/dev/shm")
_NUMBERS: Final = struct.Struct("=3q")
_NAME: Final = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,79}")
#: Seconds the file's lock is waited for, and between two tries.
_LOCK_S: Final = 1.0
_TRY_S: Final = 0.01
_NOTE: Final = "read from shared memory, which stays when an engine is killed: whether one runs is not told"


class Pool(NamedTuple):
    """The numbers of one pool. [bytes]"""

    limit: int
    used: int
    spare: int


class PoolFile:
    """One pool's file; opened anew for each look, since an engine that is started again makes it anew.

    Args:
        name: Its name.
        folder: Where pools are.
        clock, sleep: Time, for the wait for its lock.

    Raises:
        UserError: It is no name.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"kvcached:{name}: NAME is that of a file in {SHM}")
        self.name = name
        self._folder = folder or SHM
        self._clock, self._sleep = clock, sleep

    def read(self) -> Pool:
        """Return the pool's numbers.

        Raises:
            SourceError: There is no such pool, it is none, or it stays locked.
        """
        with self._open(os.O_RDONLY, fcntl.LOCK_SH) as fd:
            return self._pool(fd)

    def set_limit(self, limit: int) -> Pool:
        """Write another limit, and return the numbers as they are then.

        Raises:
            SourceError: There is no such pool, it is none, it stays locked, or it may not be written to.
        """
        with self._open(os.O_RDWR, fcntl.LOCK_EX) as fd:
            self._pool(fd)
            os.pwrite(fd, struct.pack("=q", limit), 0)
            return self._pool(fd)

    @contextlib.contextmanager
    def _open(self, flags: int, lock: int) -> Iterator[int]:
        try:
            fd = os.open(self._folder / self.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            found = pools(self._folder)
            there = f"; there are {', '.join(found)}" if found else ""
            raise SourceError(f"no pool {self.name} in {self._folder}{there}") from None
        except OSError as error:
            raise SourceError(f"{self.name}: {error.strerror}") from None
        try:
            self._lock(fd, lock)
            yield fd
        finally:
            os.close(fd)

    def _lock(self, fd: int, lock: int) -> None:
        until_s = self._clock() + _LOCK_S
        while True:
            try:
                return fcntl.flock(fd, lock | fcntl.LOCK_NB)
            except OSError:
                if self._clock() >= until_s:
                    raise SourceError(f"{self.name}: another program keeps it locked") from None
            self._sleep(_TRY_S)

    def _pool(self, fd: int) -> Pool:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size == _NUMBERS.size:
            pool = Pool(*_NUMBERS.unpack(os.pread(fd, _NUMBERS.size, 0)))
            if pool.limit > 0 and pool.used >= 0 and pool.spare >= 0:
                return pool
        raise SourceError(f"{self.name}: no pool of kvcached, which is three numbers in 24 bytes")


def pools(folder: Path = SHM) -> list[str]:
    """Return the names of files that could be pools."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False) and _NAME.fullmatch(entry.name)]
            return sorted(entry.name for entry in files if entry.stat(follow_symlinks=False).st_size == _NUMBERS.size)
    except OSError:
        return []


class KvcachedSource:
    """Reads one pool.

    Args:
        pool: Its file.
        may_operate: Whether whoever looks may also act.
    """

    def __init__(self, pool: PoolFile, *, may_operate: bool = False) -> None:
        self.name = f"kvcached:{pool.name}"
        self._pool = pool
        self._may_operate = may_operate
        offered = ("block-map", "sequences", "events", "host-tier")
        self.missing: Mapping[str, str] = dict.fromkeys(offered, NOT_OFFERED)
        if not may_operate:
            self.missing = {**self.missing, "operations": READ_ONLY}

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the pool's numbers; see ``Source``."""
        pool = self._pool.read()
        row = EngineRow(
            usage_ratio=min(1.0, pool.used / pool.limit),
            limit_bytes=pool.limit,
            used_bytes=pool.used,
            spare_bytes=pool.spare,
        )
        numbers = f"limit {size(pool.limit)}, used {size(pool.used)}, taken ahead {size(pool.spare)}"
        notes = (numbers, *([_shrinking(pool)] if pool.used > pool.limit else []), _NOTE)
        table = capabilities_of(KIND, (row,), events_reason=None, has_events=False, may_operate=self._may_operate)
        return RemoteObservation(RemoteFacts(KIND, None, self.name, (row,), capabilities=table, notes=notes))

    def close(self) -> None:
        """There is nothing to let go of."""


class KvcachedOperations:
    """Changes one pool's limit; each change leaves a line in the audit log."""

    def __init__(self, pool: PoolFile, audit: AuditLog) -> None:
        self._pool = pool
        self._audit = audit

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; see ``Operations``."""
        if not isinstance(command, SetMemoryLimit):
            return Plan(command_name(command), refusal=NOT_OFFERED)
        pool, limit = self._pool.read(), command.limit_mib << 20
        summary = f"set the limit to {size(limit)}"
        if pool.used > limit:
            summary += f"; {_shrinking(pool._replace(limit=limit))}"
        effects = (
            Effect("limit bytes", pool.limit, limit),
            Effect("used bytes", pool.used, None if pool.used > limit else pool.used),
            Effect("spare bytes", pool.spare, None),
        )
        return Plan(summary, effects=effects)

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Write the limit and read it back; see ``Operations``."""
        who, plan = (os.getpid(), os.getuid()), None
        try:
            plan = self.plan(command, timeout_s)
            outcome = self._apply(command, plan)
        except SourceError as error:
            self._audit.write(f"kvcached:{self._pool.name}", who, command, plan, None, str(error))
            raise
        self._audit.write(f"kvcached:{self._pool.name}", who, command, plan, outcome)
        return outcome

    def _apply(self, command: AnyCommand, plan: Plan) -> Outcome:
        if plan.refusal is not None or not isinstance(command, SetMemoryLimit):
            return Outcome(ok=False, message=plan.refusal or NOT_OFFERED)
        was, limit = self._pool.read().limit, command.limit_mib << 20
        pool = self._pool.set_limit(limit)
        more = _shrinking(pool) if pool.used > pool.limit else "its engine follows with its next allocation"
        message = f"observed: the limit was {size(was)} and is {size(pool.limit)}; {more}"
        return Outcome(ok=pool.limit == limit, message=message, is_seen=pool.used <= pool.limit)


def _shrinking(pool: Pool) -> str:
    return f"{size(pool.used)} are in use: no new blocks until sequences end and bring that below {size(pool.limit)}"
