"""StepGate: lets another thread have an engine's state read between two of its steps. Owns no engine and no thread.

The engine never waits for a reader. Reading happens in the engine's own thread, at the end of a step in which somebody
asked; an engine that takes no step is read by whoever asks, and the reading thrown away if a step began meanwhile.
While nobody asks, a step costs two counters and a look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Generic, Literal, TypeVar

from kvtop.errors import SourceError

#: Seconds a reader waits for the end of a step before it reads between steps itself.
PATIENCE_S: Final = 0.1

_R = TypeVar("_R")


class StepGate(Generic[_R]):
    """Reads by ``collect`` when the engine is between two steps.

    Args:
        collect: Reads the engine's state; quick, and raises nothing of the system's.
        is_idle: Whether the engine has nothing to do, so that no step is worth waiting for.
        by_engine_only: Whether only the engine's own thread may read, such as where that needs its own stream of work.

    Attributes:
        cost_s: Time the last reading took. [s]
        steps: Steps that ended.
    """

    def __init__(self, collect: Callable[[], _R], is_idle: Callable[[], bool], *, by_engine_only: bool = False) -> None:
        self._collect = collect
        self._by_engine_only = by_engine_only
        self._is_idle = is_idle
        self._depth = self._entered = 0
        self._wanted = False
        self._taken = threading.Event()
        self._answer: _R | None = None
        self._error: Exception | None = None
        self.cost_s = 0.0
        self.steps = 0

    def guard(
        self,
        method: Callable[..., Any],
        *,
        read: Literal["before", "after"] | None = None,
        is_step: bool = False,
    ) -> Callable[..., Any]:
        """Return ``method`` as it is to be called by the engine: nothing is read while it runs.

        Args:
            method: What changes the engine's state.
            read: Where the state is that of the end of a step, and may be read.
            is_step: Whether it is called once a step.
        """

        @wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._wanted and read == "before" and not self._depth:
                self._take()
            self._entered += 1
            self._depth += 1
            try:
                result = method(*args, **kwargs)
            finally:
                self._depth -= 1
            if is_step:
                self.steps += 1
            if self._wanted and read == "after" and not self._depth:
                self._take()
            return result

        return guarded

    def read(self, timeout_s: float) -> _R:
        """Return a reading made from here on; for one thread at a time.

        Raises:
            SourceError: The engine was busy with one step for ``timeout_s``.
            Exception: Reading failed; whatever ``collect`` raised.
        """
        deadline_s = time.monotonic() + timeout_s
        self._answer = self._error = None
        self._taken.clear()
        self._wanted = True
        try:
            patience_s = 0.0 if not self._by_engine_only and self._is_idle() else PATIENCE_S
            while not self._taken.wait(min(patience_s, max(0.0, deadline_s - time.monotonic()))):
                answer = self._between_steps()
                if answer is not None:
                    return answer
                if time.monotonic() >= deadline_s:
                    raise SourceError(f"the engine ended no step in {timeout_s:g} s")
                patience_s = PATIENCE_S
        finally:
            self._wanted = False
        return self._taken_answer()

    def _taken_answer(self) -> _R:
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def _between_steps(self) -> _R | None:
        """Read in this thread; ``None`` when the engine was, or began to be, in the middle of something."""
        before = self._entered
        if self._depth or self._by_engine_only:
            return None
        began_s = time.perf_counter()
        try:
            answer = self._collect()
        except Exception:
            if self._depth or self._entered != before:
                return None  # a step changed what was being read
            raise
        if self._depth or self._entered != before:
            return None
        self.cost_s = time.perf_counter() - began_s
        return answer

    def _take(self) -> None:
        """Read in the engine's thread, which must come to no harm."""
        self._wanted = False
        began_s = time.perf_counter()
        try:
            self._answer = self._collect()
        except Exception as error:
            self._error = error
        self.cost_s = time.perf_counter() - began_s
        self._taken.set()
