"""Estimator: works out what-if estimates in a thread of its own, one at a time, and only while somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvtop.model.what_if import WhatIf

#: Seconds from one result to the start of the next work, and seconds ``close`` waits for work that is under way.
EVERY_S: Final = 15.0
_END_S: Final = 1.0


class Estimator:
    """Gives the newest estimates at once, and has newer ones made beside.

    Args:
        work: Makes them; may take seconds. An error is told and ends nothing.
        clock: Monotonic seconds.
    """

    def __init__(self, work: Callable[[], WhatIf | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._newest: WhatIf | None = None
        self._due_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def newest(self) -> WhatIf | None:
        """Return the newest estimates, ``None`` before the first; called by one thread at a time."""
        is_idle = self._thread is None or not self._thread.is_alive()
        if is_idle and not self._is_closed and self._clock() >= self._due_s:
            self._due_s = float("inf")
            self._thread = threading.Thread(target=self._run, name="kvtop-what-if", daemon=True)
            self._thread.start()
        return self._newest

    def close(self) -> None:
        """Begin no more work. Safe to call twice."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._newest = self._work() or self._newest
        finally:
            self._due_s = self._clock() + EVERY_S
