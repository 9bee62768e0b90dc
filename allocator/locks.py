"""The layers' locks: their order, what they count, and the checker that tests turn on.

Locks are taken in the order sequence → reservation → allocator, never backwards. Reservations need
no lock of their own under the GIL (see ``reservation``), but keep their place in the order. Nobody
waits for a sequence while holding the allocator lock: waiting lets go of it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from allocator.errors import InvariantViolation, Refused
from allocator.timings import Stopwatch

#: Position of each layer; a thread may only take a lock of a higher one than those it holds.
RANKS: Final = {"sequence": 1, "reservation": 2, "allocator": 3}

#: Longest wait for a sequence that a copy uses. [s]
WAIT_BOUND_S: Final = 30.0

#: Of how many acquisitions one has its time of holding measured.
HOLD_SAMPLE: Final = 64

_held = threading.local()


class CountedLock:
    """A re-entrant lock that counts how often it was taken, how often somebody had to wait, and for how long.

    Attributes:
        layer: Its name in ``RANKS``.
        acquisitions: Times it was taken with ``with`` or ``acquire``, re-entries included.
        contended: Of these, times the taker had to wait.
        wait_s: Time spent waiting. [s]
        longest_wait_s: The longest wait. [s]
        waits: How long the waits were.
        holds: How long it was held with ``with``, of every ``HOLD_SAMPLE``-th time.
    """

    def __init__(self, layer: str) -> None:
        require_gil()
        self.layer = layer
        self.acquisitions = self.contended = 0
        self.wait_s = self.longest_wait_s = 0.0
        self.waits, self.holds = Stopwatch(), Stopwatch()
        self._depth = 0
        self._held_since = 0.0
        self._lock = threading.RLock()
        self.try_acquire = self._lock.acquire
        self.release = self._lock.release

    def condition(self) -> threading.Condition:
        """Return a condition on this lock: who waits for it lets go of the lock, however often it was re-entered."""
        return threading.Condition(self._lock)

    def acquire(self) -> None:
        """Take the lock, waiting if somebody else holds it."""
        if not self.try_acquire(False):
            self._wait()
        self.acquisitions += 1

    def __enter__(self) -> CountedLock:
        if not self.try_acquire(False):
            self._wait()
        self.acquisitions += 1
        self._depth += 1
        if self._depth == 1 and not self.acquisitions % HOLD_SAMPLE:
            self._held_since = time.perf_counter()
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        self._depth -= 1
        if self._held_since and not self._depth:
            self.holds.add(time.perf_counter() - self._held_since)
            self._held_since = 0.0
        self.release()

    def let_go_until(self, condition: threading.Condition, ready: Callable[[], bool], bound_s: float) -> bool:
        """Wait for a condition of this lock, which others hold meanwhile; return whether it became true."""
        depth, self._depth, self._held_since = self._depth, 0, 0.0
        try:
            return condition.wait_for(ready, bound_s)
        finally:
            self._depth, self._held_since = depth, 0.0

    def _wait(self) -> None:
        started = time.perf_counter()
        self._lock.acquire()
        # Counted while holding the lock, so that no count is lost.
        waited = time.perf_counter() - started
        self.contended += 1
        self.wait_s += waited
        self.longest_wait_s = max(self.longest_wait_s, waited)
        self.waits.add(waited)


class SequenceLocks:
    """One writer at a time for each block table: a byte a row, written under the allocator lock.

    An operation that lets go of the allocator lock in its middle, to copy, takes its rows first. All others
    hold the allocator lock throughout, so for them a look is enough, and a decode step looks at hundreds of rows
    at once. Who has to wait lets go of the allocator lock; several rows are taken all at once, so that nobody waits
    while holding some.

    Args:
        lock: The allocator lock; held around every call.

    Attributes:
        num_taken: Rows taken.
        acquisitions: Times rows were taken.
        contended: Times somebody had to wait for a row or for a fence.
        wait_s: Time spent waiting. [s]
        longest_wait_s: The longest wait. [s]
        waits: How long the waits were.
    """

    layer: Final = "sequence"

    def __init__(self, lock: CountedLock) -> None:
        self.num_taken = self.acquisitions = self.contended = 0
        self.wait_s = self.longest_wait_s = 0.0
        self.waits = Stopwatch()
        self._taken: set[int] = set()
        self._lock = lock
        self._changed = lock.condition()

    def take(self, rows: Iterable[int]) -> None:
        """Take rows that nobody has taken."""
        self._taken.update(rows)
        self.num_taken = len(self._taken)
        self.acquisitions += 1

    def drop(self, rows: Iterable[int]) -> None:
        """Give rows back, and wake those who wait."""
        self._taken.difference_update(rows)
        self.num_taken = len(self._taken)
        self._changed.notify_all()

    def any_taken(self, rows: Iterable[int]) -> bool:
        """Whether any of these rows is taken."""
        return not self._taken.isdisjoint(rows)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, without the allocator lock, until ``ready`` is true; it is called with the lock held.

        Raises:
            Refused: It has not become true within ``WAIT_BOUND_S``.
        """
        if ready():
            return
        started = time.perf_counter()
        done = self._lock.let_go_until(self._changed, ready, WAIT_BOUND_S)
        waited = time.perf_counter() - started
        self.contended += 1
        self.wait_s += waited
        self.longest_wait_s = max(self.longest_wait_s, waited)
        self.waits.add(waited)
        if not done:
            raise Refused(f"{what}: a copy has kept it for {WAIT_BOUND_S:g} s")


@contextmanager
def checked_order() -> Iterator[None]:
    """Check the order of locks in this process while the context lasts.

    Raises (in the offending thread):
        InvariantViolation: Law 7: a lock was taken backwards, and two threads could wait for each other.
    """
    enter, leave = CountedLock.__enter__, CountedLock.__exit__

    def checked_enter(lock: CountedLock) -> CountedLock:
        _note_taken(lock)
        return enter(lock)

    def checked_exit(lock: CountedLock, kind: object, value: object, traceback: object) -> None:
        leave(lock, kind, value, traceback)
        _note_released(lock)

    # Put in place only for the check, so that it costs nothing without.
    CountedLock.__enter__, CountedLock.__exit__ = checked_enter, checked_exit  # type: ignore[method-assign]
    try:
        yield
    finally:
        CountedLock.__enter__, CountedLock.__exit__ = enter, leave  # type: ignore[method-assign]


def require_gil() -> None:
    """Refuse a free-threaded Python: reservations rely on the GIL to make list operations and byte writes atomic.

    Raises:
        Refused: This Python runs without the GIL.
    """
    enabled = getattr(sys, "_is_gil_enabled", None)
    if enabled is not None and not enabled():
        raise Refused("the allocator needs the GIL; start Python with PYTHON_GIL=1")


def _note_taken(lock: CountedLock) -> None:
    stack: list[CountedLock] = _held.__dict__.setdefault("stack", [])
    if stack and lock not in stack and RANKS[lock.layer] < max(RANKS[other.layer] for other in stack):
        order = " → ".join(other.layer for other in stack)
        raise InvariantViolation(7, f"{lock.layer} lock taken while holding {order}")
    stack.append(lock)


def _note_released(lock: CountedLock) -> None:
    stack: list[CountedLock] = _held.__dict__.get("stack", [])
    if lock in stack:
        stack.remove(lock)
