"""Poller: one thread that asks one server for facts at a bounded rate. Readers take the newest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtop.errors import SourceError
from kvtop.model.remote import RemoteFacts
from kvtop.sources.remote.fetch import FetchError

#: Seconds from the end of one reading to the start of the next, and at most after failures.
EVERY_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
#: Seconds ``close`` waits for the thread, which may be in the middle of an answer.
_END_S: Final = 1.0


class Poller:
    """Calls ``ask`` in a thread of its own, never twice at once, and slower after each failure in a row.

    Args:
        ask: Returns facts or raises ``FetchError``.
        release: Called by the thread at its end.
        every_s: Seconds between two readings.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], RemoteFacts],
        *,
        release: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._release = release
        self._every_s = every_s
        self._clock = clock
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._news = threading.Condition()
        self._newest: tuple[RemoteFacts, float] | None = None
        self._failure: tuple[str, float] | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="kvtop-attach", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def newest(self, timeout_s: float) -> RemoteFacts:
        """Return the newest facts, with their age.

        Raises:
            SourceError: The last reading failed, or there was none within ``timeout_s``.
        """
        with self._news:
            self._news.wait_for(lambda: self._newest or self._failure or self._stop.is_set(), timeout_s)
            now_s = self._clock()
            if self._stop.is_set():
                raise SourceError("the source was closed")
            if self._failure is not None:
                reason, again_s = self._failure
                raise SourceError(f"{reason}; asked again in {max(0, round(again_s - now_s))} s")
            if self._newest is None:
                raise SourceError("no answer yet")
            facts, read_s = self._newest
            return replace(facts, age_s=max(0.0, now_s - read_s))

    def hurry(self) -> None:
        """Read again at once: somebody wants something else."""
        self._hurry.set()

    def after(self, at_s: float, timeout_s: float) -> RemoteFacts | None:
        """Return facts of a reading that began at ``at_s`` or later; asks for one at once.

        Returns:
            The facts; ``None`` when no such reading succeeds within ``timeout_s``.
        """
        self._hurry.set()
        with self._news:
            self._news.wait_for(
                lambda: self._stop.is_set() or (self._newest is not None and self._newest[1] >= at_s), timeout_s
            )
            if self._newest is None or self._newest[1] < at_s:
                return None
            return self._newest[0]

    def close(self) -> None:
        """Stop the thread, within a second even if the server hangs. Safe to call twice."""
        self._stop.set()
        self._hurry.set()
        with self._news:
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._hurry.wait(self.turn())
                self._hurry.clear()
        finally:
            self._release()

    def turn(self) -> float:
        """Read once; returns the seconds to wait before the next reading."""
        began_s = self._clock()
        try:
            facts = self._ask()
        except FetchError as error:
            self._failures += 1
            pause_s = min(MAX_PAUSE_S, self._every_s * 2 ** min(self._failures, 10))
            self._publish(None, (_one_line(str(error)), self._clock() + pause_s))
            return pause_s
        except Exception as error:
            self._publish(None, (f"internal fault: {type(error).__name__}: {error}", self._clock() + MAX_PAUSE_S))
            return MAX_PAUSE_S
        self._failures = 0
        self._publish((facts, began_s), None)
        return self._every_s

    def _publish(self, newest: tuple[RemoteFacts, float] | None, failure: tuple[str, float] | None) -> None:
        with self._news:
            self._newest, self._failure = newest or self._newest, failure
            self._news.notify_all()


def _one_line(text: str) -> str:
    """Return a reason that goes to a terminal or a log: part of it may be the server's own words."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
