"""Background: the console's threads. Owns their start, their stop, and the bound on waiting for them.

They are daemon threads of our own rather than the framework's workers: those run in an executor that the
interpreter joins at exit, so that one call which hangs would keep the program alive after its screen is gone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from kvtop.errors import KvtopError

#: Tasks that may wait for the command thread.
_MAX_TASKS: Final = 64


class Background:
    """Runs loops and one-off tasks beside the screen until ``stop``.

    Args:
        on_crash: Told of an exception that a task let out; called on the task's thread.
    """

    def __init__(self, on_crash: Callable[[BaseException], object]) -> None:
        self.stopping = threading.Event()
        self._on_crash = on_crash
        self._threads: list[threading.Thread] = []
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_TASKS)
        self._task_thread: threading.Thread | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread of its own."""
        self._threads = [t for t in self._threads if t.is_alive()]
        thread = threading.Thread(target=self._guard, args=(work,), name=f"kvtop-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, task: Callable[[], None]) -> bool:
        """Run ``task`` after those submitted before it, one at a time; false when too many wait already."""
        if self._task_thread is None:
            self.start("commands", self._run_tasks)
            self._task_thread = self._threads[-1]
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def stop(self, wait_s: float) -> bool:
        """Ask every thread to end and wait for all of them together at most ``wait_s``; true when all have ended."""
        self.stopping.set()
        with contextlib.suppress(queue.Full):
            self._tasks.put_nowait(None)
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_tasks(self) -> None:
        while not self.stopping.is_set():
            task = self._tasks.get()
            if task is not None:
                self._guard(task)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            # The thread's own traceback would be written across the screen.
            if not self.stopping.is_set():
                self._on_crash(error)


def reason(error: BaseException) -> str:
    """Return an error's text; one that is not ours is an internal fault and says its kind too."""
    return str(error) if isinstance(error, KvtopError) else f"internal fault: {type(error).__name__}: {error}"
