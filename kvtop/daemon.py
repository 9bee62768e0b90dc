"""A published run: the engine stepped by this thread, watched and driven by others by its name, until it is to end.

The loop is the runner's; this module decides when it ends, keeps the service manager informed, and reads the
configuration again when asked to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from allocator.block_map import BlockMapWriter
from allocator.commands import Command, SetAutoCompaction, SetLoad, SetPolicy, SetSpeed, SetWatermark
from allocator.errors import ConfigError, InvariantViolation, Refused
from allocator.plans import Outcome
from kvtop.driving import LATE_BOUND_S, Bounds, Drive, Ending, Signals
from kvtop.engine_setup import EngineOptions
from kvtop.errors import KvtopError
from kvtop.log import Log
from kvtop.runner import EngineRunner
from kvtop.sd_notify import ServiceManager
from kvtop.server import PublishedEngine
from kvtop.stepped_engine import SteppedEngine

if TYPE_CHECKING:
    from allocator.engine import Engine

#: What a running engine can be told of its options: the fields, and the command that carries them.
RELOADABLE: Final[tuple[tuple[tuple[str, ...], Callable[[EngineOptions], Command]], ...]] = (
    (("policy",), lambda options: SetPolicy(options.policy)),
    (("speed",), lambda options: SetSpeed(options.speed)),
    (("rate_scale", "size_scale"), lambda options: SetLoad(options.rate_scale, options.size_scale)),
    (("watermark_ratio",), lambda options: SetWatermark(options.watermark_ratio)),
    (
        ("compact", "compact_threshold_ratio"),
        lambda options: SetAutoCompaction(options.compact, options.compact_threshold_ratio),
    ),
)


class DrivenEngine:
    """An engine as the runner drives it: its time is taken, it is checked, and the first broken law is kept.

    Args:
        engine: The engine.
        after_step: Called after every step, such as to check the laws; without it, steps are taken many at a time.
        clock: Real seconds.

    Attributes:
        engine_s: Real seconds spent inside the engine. [s]
        fault: The first broken law.
    """

    def __init__(
        self, engine: Engine, after_step: Callable[[], None] | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine = engine
        self._after_step = after_step
        self._clock = clock
        self.engine_s = 0.0
        self.fault: InvariantViolation | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def advance(self, max_steps: int) -> int:
        """Take steps; see ``Engine.advance``."""
        began_s = self._clock()
        try:
            taken = self._engine.advance(max_steps if self._after_step is None else 1)
            self.engine_s += self._clock() - began_s
            if self._after_step is not None:
                self._after_step()
        except InvariantViolation as fault:
            self.fault = self.fault or fault
            raise
        return taken

    def apply(self, command: Command) -> Outcome:
        """Do a command; see ``Engine.apply``."""
        try:
            return self._engine.apply(command)
        except InvariantViolation as fault:
            self.fault = self.fault or fault
            raise


class Daemon:
    """One published run.

    Args:
        engine: The engine; nobody else may touch it until ``run`` returns.
        name: The name it is published by.
        options: What it was built from.
        bounds: When to end at the latest.
        stays: Whether it stays for looking at when a law is broken or nothing can progress, instead of ending.
        signals: What asks it to end, or to read its configuration again.
        after_turn: Called after every turn with the time.
        after_step: See ``DrivenEngine``.
        reload: Reads the configuration again.
        notes: Lines for those who watch.
        log: Told what happens.
        service: Told how it goes.
        clock: Real seconds, monotonic.

    Attributes:
        path: The socket.

    Raises:
        UserError: ``name`` is no name, or an engine with that name runs already.
        KvtopError: The socket or the map cannot be made.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        options: EngineOptions,
        bounds: Bounds,
        *,
        stays: bool,
        signals: Signals,
        after_turn: Callable[[float], None],
        after_step: Callable[[], None] | None = None,
        reload: Callable[[], EngineOptions] | None = None,
        notes: tuple[str, ...] = (),
        log: Log | None = None,
        service: ServiceManager | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = DrivenEngine(engine, after_step)
        self._name = name
        self._options = options
        self._bounds = bounds
        self._stays = stays
        self._signals = signals
        self._after_turn = after_turn
        self._reload = reload
        self._notes = notes
        self._log = log or Log()
        self._service = service or ServiceManager({})
        self._clock = clock
        self._stop = threading.Event()
        self._ending: Ending | None = None
        self._map: BlockMapWriter | None = None
        self._began_s = clock()
        self._published = PublishedEngine(
            name, engine.clients, make_runner=self._make_runner, notes=notes, log=self._log
        )
        assert self._published.runner is not None
        self._runner = self._published.runner
        self.path = self._published.path

    def run(self) -> Drive:
        """Step the engine until it is to end, commit the copies under way, and return how it ended.

        Raises:
            KvtopError: The engine failed; carries its reason.
        """
        self._began_s = self._clock()
        self._service.ready(f"published as {self._name}")
        self._runner.run(self._stop)
        self._service.stopping()
        self.close()
        if self._runner.failure is not None:
            raise KvtopError(f"the engine failed at step {self._engine.step}: {self._runner.failure}")
        with contextlib.suppress(Refused):  # a copy that does not come back is let go of when the engine is closed
            self._engine.settle()
        assert self._ending is not None
        return Drive(self._ending, self._engine.engine_s, self._engine.fault)

    def close(self) -> None:
        """Stop listening and remove the files. Safe to call twice."""
        self._published.close()
        if self._map is not None:
            self._map.close()
            self._map = None

    def _make_runner(self, map_fd: int) -> EngineRunner:
        engine = cast(SteppedEngine, self._engine)
        first = engine.snapshot(phase="running", speed=self._options.speed, steps_per_s=None)
        self._map = BlockMapWriter(
            map_fd,
            engine=self._name,
            block_size=first.block_size,
            block_bytes=first.block_bytes,
            slab_size=first.slab_size,
        )
        runner = EngineRunner(
            engine,
            speed=self._options.speed,
            max_steps=self._bounds.steps,
            notes=self._notes,
            block_map=self._map,
            on_turn=self._on_turn,
        )
        runner.claim()
        return runner

    def _on_turn(self) -> None:
        assert self._map is not None
        now_s = self._clock()
        self._map.heartbeat()
        self._service.alive()
        if self._engine.fault is None:
            self._after_turn(now_s)
        if self._signals.take_hangup():
            self._read_again()
        self._ending = self._decide(now_s)
        if self._ending is not None:
            # Before this turn ends, so that whoever asks from here on is told so, and nobody touches the engine.
            self._runner.retire()
            self._stop.set()

    def _decide(self, now_s: float) -> Ending | None:
        """Return why the run is to end, or ``None``."""
        engine, runner, bounds = self._engine, self._runner, self._bounds
        if self._signals.ending is not None:
            return self._signals.ending
        if runner.failure is not None:
            return Ending.FAULT
        if bounds.duration_s is not None and now_s - self._began_s >= bounds.duration_s:
            return Ending.DURATION
        if runner.has_ended:
            return Ending.STEPS
        if engine.done and not self._options.takes_all_load:
            return Ending.DONE
        if self._stays:
            return None
        if engine.fault is not None:
            return Ending.FAULT
        is_late = engine.late_s is not None and engine.late_s >= LATE_BOUND_S
        if is_late or (runner.is_stalled and not engine.done):
            return Ending.STUCK
        return None

    def _read_again(self) -> None:
        """Read the configuration again and do what of it a running engine can be told."""
        if self._reload is None:
            self._log.warning("SIGHUP: there is no configuration to read again")
            return
        self._service.reloading()
        try:
            fresh = self._reload()
        except (KvtopError, ConfigError) as error:
            self._log.error(f"SIGHUP: nothing was changed: {error}")
        else:
            self._take_over(fresh)
        self._service.ready(f"published as {self._name}")

    def _take_over(self, fresh: EngineOptions) -> None:
        changed = {f for f in fresh.__struct_fields__ if getattr(fresh, f) != getattr(self._options, f)}
        if not changed:
            self._log.info("SIGHUP: nothing has changed")
        for fields, make_command in RELOADABLE:
            if changed.intersection(fields):
                outcome = self._runner.apply(make_command(fresh))
                (self._log.info if outcome.ok else self._log.error)(f"SIGHUP: {outcome.message}")
                changed.difference_update(fields)
        if changed:
            options = (field.removeprefix("num_").removesuffix("_ratio").replace("_", "-") for field in changed)
            self._log.warning(f"SIGHUP: takes a restart: {', '.join(sorted(options))}")
        self._options = fresh
