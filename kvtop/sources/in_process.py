"""InProcessSource and InProcessOperations: an engine in this very process, for tests, lessons and ``--in-process``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

from allocator.commands import command_name
from allocator.plans import Outcome, Plan
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.operations import NOT_OFFERED
from kvtop.runner import EngineRunner
from kvtop.serving_commands import AnyCommand, ServingCommand
from kvtop.sources.local import NO_HOST_TIER

#: Seconds ``close`` waits for the engine's thread.
_END_S: Final = 2.0


class InProcessSource:
    """Reads an engine through its runner.

    Args:
        runner: The engine. Without a thread it stands still until somebody calls ``runner.turn()`` or a ``Step``.
        name: The target's name.
        on_close: Called once at the end, such as the engine's own ``close``.
    """

    def __init__(
        self, runner: EngineRunner, *, name: str = "embedded", on_close: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self.missing: Mapping[str, str] = {}
        self._runner = runner
        self._on_close = on_close
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Let the engine run in a thread that ``close`` ends."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._runner.run, args=(self._stop,), name="kvtop-engine", daemon=True
            )
            self._thread.start()

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        """Return the newest observation; see ``Source``."""
        if self._is_closed:
            raise SourceError("the engine was closed")
        observation = self._runner.observe(focus, timeout_s)
        self.missing = {} if observation.host is not None else {"host-tier": NO_HOST_TIER}
        return observation

    def close(self) -> None:
        """Stop the engine's thread, if it has one, and let go of the engine. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        self._runner.wake()
        if self._thread is not None:
            self._thread.join(_END_S)
        if self._on_close is not None:
            self._on_close()


class InProcessOperations:
    """The door to an engine in this process."""

    def __init__(self, runner: EngineRunner) -> None:
        self._runner = runner

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; see ``Operations``."""
        if isinstance(command, ServingCommand):
            return Plan(command_name(command), refusal=NOT_OFFERED)
        return self._runner.plan(command, timeout_s)

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Do ``command`` at the next step boundary; see ``Operations``."""
        if isinstance(command, ServingCommand):
            return Outcome(ok=False, message=NOT_OFFERED)
        return self._runner.apply(command, timeout_s)
