"""The loop of a run without a screen: its bounds, its pace, how it can end, and the signals that end it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Final

from allocator.config import STEP_S
from allocator.errors import InvariantViolation
from kvtop.engine_setup import EngineOptions
from kvtop.errors import UserError
from kvtop.model.format import count

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Bound of an endless workload when none is asked for.
DEFAULT_STEPS: Final = 10_000
#: Steps of a turn: at the start, and at most. In between a turn grows and shrinks to take about ``_TURN_S``,
#: so that signals and progress are not kept waiting by a busy engine, nor an idle one held up by looking at them.
_FIRST_TURN: Final = 64
MAX_TURN: Final = 1 << 40
_TURN_S: Final = 0.05
#: Longest sleep while paced, so that a signal is noticed. [s]
_NAP_S: Final = 0.05
#: Seconds for which a copy that does not come back may hold a run up.
LATE_BOUND_S: Final = 10.0


class Ending(Enum):
    """Why a run ended."""

    DONE = "every request has ended"
    STEPS = "the steps asked for were taken"
    DURATION = "the time asked for is over"
    STUCK = "nothing can progress"
    FAULT = "a law was broken"
    INTERRUPTED = "interrupted"
    TERMINATED = "asked to stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run ends, besides when its requests have all ended; ``None`` is no bound.

    Attributes:
        steps: Engine steps.
        duration_s: Real seconds.
        until_done: Insist on the end of the requests: refused for a workload that has none.
    """

    steps: int | None = None
    duration_s: float | None = None
    until_done: bool = False


@dataclass(frozen=True, slots=True)
class Drive:
    """How a drive ended, the real seconds spent inside the engine, and the broken law where there is one."""

    ending: Ending
    engine_s: float
    fault: InvariantViolation | None = None


class Signals:
    """Turns signals into flags that the loop reads between turns.

    Ctrl-C and SIGTERM ask for the end, and a second Ctrl-C ends at once; SIGHUP, where it is taken, for a new look at
    the configuration.

    Args:
        takes_hangup: Take SIGHUP too, instead of being ended by it.
    """

    def __init__(self, *, takes_hangup: bool = False) -> None:
        self.ending: Ending | None = None
        self._numbers = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if takes_hangup else ()))
        self._has_hung_up = False

    def __enter__(self) -> Signals:
        self._before = [(s, signal.signal(s, self._note)) for s in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def take_hangup(self) -> bool:
        """Return whether SIGHUP came since the last call."""
        has, self._has_hung_up = self._has_hung_up, False
        return has

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._has_hung_up = True
            return
        if number == signal.SIGINT and self.ending is Ending.INTERRUPTED:
            raise KeyboardInterrupt
        self.ending = Ending.INTERRUPTED if number == signal.SIGINT else Ending.TERMINATED


def bounds_for(options: EngineOptions, asked: Bounds, *, stays: bool = False) -> tuple[Bounds, tuple[str, ...]]:
    """Return the bounds in force, and a note when they were not asked for.

    Args:
        options: The engine.
        asked: The bounds that were asked for.
        stays: Whether a run without bounds goes on until it is stopped.

    Raises:
        UserError: A workload without an end was asked to run until it is done.
    """
    if asked.until_done and options.is_endless:
        raise UserError(
            f"--until-done: the workload {options.load_name} never ends; give --requests, --steps or --duration"
        )
    if options.takes_all_load or (stays and options.is_endless and asked == Bounds()):
        return asked, (f"the workload {options.load_name} never ends: Ctrl-C stops it, or --duration",)
    if options.is_endless and asked == Bounds():
        note = f"the workload {options.load_name} never ends: stopping after {count(DEFAULT_STEPS)} steps (--steps N)"
        return Bounds(steps=DEFAULT_STEPS), (note,)
    return asked, ()


def drive(
    engine: Engine,
    bounds: Bounds,
    *,
    speed: float | None,
    stop: Callable[[], Ending | None],
    after_turn: Callable[[float], None],
    max_turn: int = MAX_TURN,
    keep_open: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Drive:
    """Advance ``engine`` until a bound, its end, or a stop; return why it ended.

    Args:
        engine: The engine; attached programs aside, nobody else may touch it meanwhile.
        bounds: When to end at the latest.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
        stop: Asked before every turn; an answer ends the drive.
        after_turn: Called after every turn with the time.
        max_turn: Most steps one turn may cover.
        keep_open: Whether attached programs may still come when every request has ended.
        clock, sleep: Real time. [s]
    """
    started_s, engine_s, first_step, first_time_s = clock(), 0.0, engine.step, engine.time_s
    if speed is not None:
        max_turn = max(1, min(max_turn, int(speed * _NAP_S / STEP_S)))
    turn = min(_FIRST_TURN, max_turn)
    while True:
        ending = stop()
        now_s = clock()
        if ending is None and bounds.duration_s is not None and now_s - started_s >= bounds.duration_s:
            ending = Ending.DURATION
        budget = turn
        if ending is None and bounds.steps is not None:
            budget = min(turn, bounds.steps - (engine.step - first_step))
            if budget <= 0:
                ending = Ending.STEPS
        # Waiting for attached programs is no work: it goes at the pace of real time.
        is_waiting = speed is None and engine.is_waiting
        if is_waiting:
            budget = min(budget, 1)
        if ending is not None:
            return Drive(ending, engine_s)
        if speed is not None:
            ahead_s = (engine.time_s - first_time_s) / speed - (now_s - started_s)
            if ahead_s > 0:
                sleep(min(ahead_s, _NAP_S))
                continue
        try:
            taken = engine.advance(budget)
            after_s = clock()
            engine_s += after_s - now_s
            after_turn(after_s)
        except InvariantViolation as fault:
            return Drive(Ending.FAULT, engine_s, fault)
        if taken == 0 and engine.late_s is not None and engine.late_s < LATE_BOUND_S:
            continue  # the turn has waited for the copy already
        if taken == 0 and not (keep_open and engine.done):
            return Drive(Ending.DONE if engine.done else Ending.STUCK, engine_s)
        if taken == 0 or is_waiting:
            sleep(STEP_S)
            continue
        if after_s - now_s < _TURN_S / 2:
            turn = min(turn * 2, max_turn)
        elif after_s - now_s > _TURN_S:
            turn = max(1, turn // 2)
